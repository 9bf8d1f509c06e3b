"""Run files: `load` one with overrides into a `Config`, `dump` it resolved, publish its `json_schema`."""

from .load import dump, json_schema, load
from .schema import Config, Hardware, Lora, Memory, Train

__all__ = ["Config", "Hardware", "Lora", "Memory", "Train", "dump", "json_schema", "load"]
