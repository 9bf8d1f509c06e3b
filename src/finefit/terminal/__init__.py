"""A run and a plan on the terminal. Sees only events, plans as JSON, and text of units."""

from .live import Kind, LineReporter, LiveReporter, Reporter, reporter
from .planned import plan_renderable, plan_view

__all__ = ["Kind", "LineReporter", "LiveReporter", "Reporter", "plan_renderable", "plan_view", "reporter"]
