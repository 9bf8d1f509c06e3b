import json
import os
from pathlib import Path

import pool
import pytest
from pool import Ranks

WRITES = "FINEFIT_RANKS_TABLE"  # in the environment: the file that what was found is written to
_found = []


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


@pytest.fixture(autouse=True)
def _noting(record_property):
    """What a test notes with ``pool.note`` is its property."""
    pool.NOTES.clear()
    yield
    for row in pool.NOTES:
        record_property("ranks", json.dumps(row))


def pytest_runtest_logreport(report):
    if report.when == "teardown" and report.passed:
        _found.extend(json.loads(value) for name, value in report.user_properties if name == "ranks")


def pytest_sessionfinish(session, exitstatus):
    """A table is of a whole run in which nothing failed."""
    path = os.environ.get(WRITES)
    if path and not exitstatus and _found:
        rows = sorted(_found, key=lambda row: [str(value) for value in row.values()])
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
