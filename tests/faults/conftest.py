"""Fixtures of whole runs, and how many faults were survived."""

from tiny_run import data, model  # noqa: F401


def pytest_terminal_summary(terminalreporter):
    of = {
        kind: len([one for one in terminalreporter.stats.get(kind, []) if "faults/" in one.nodeid])
        for kind in ("passed", "failed", "error")
    }
    if total := sum(of.values()):
        terminalreporter.write_line(f"faults survived: {of['passed']} of {total}")
