"""Fixtures of whole runs."""

from tiny_run import data, model  # noqa: F401
