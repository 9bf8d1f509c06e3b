"""Amounts of memory and budgets: what is said of the ones that cannot be."""

import pytest

from finefit.errors import ConfigError
from finefit.units import parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "the budget '0' is no memory at all"),
        ("0GiB", "the budget '0GiB' is no memory at all"),
        ("0..6GiB", "the budget '0..6GiB' is no memory at all"),
        ("-8GiB", "the budget '-8GiB' leaves nothing to use of 8.00 GiB"),
        ("6GiB..-8GiB", "the budget '6GiB..-8GiB' leaves nothing to use of 8.00 GiB"),
        ("6GiB..4GiB", "the budget '6GiB..4GiB' ends below where it begins"),
        ("0%", "'0%' is not a share of memory"),
    ],
)
def test_a_budget_of_nothing_says_why(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_budget(text, 8 * 2**30)
    assert message == caught.value.message


def test_no_device_has_that_much():
    for text in ("2000000TiB", "9" * 400):
        with pytest.raises(ConfigError, match="is more memory than any device has"):
            parse_bytes(text)
