import pytest
from pool import Ranks


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four():
    yield from _ranks(4)


def _ranks(size):
    ranks = Ranks(size)
    yield ranks
    ranks.end()
