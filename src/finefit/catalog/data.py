"""The catalogue's JSON files, each read once and on first use, and the spelling under which names are compared."""

import functools
import json
import re
from pathlib import Path
from typing import Any


@functools.cache
def read_data(file_name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((Path(__file__).parent / file_name).read_text("utf-8"))
    return data


def plain_name(text: str) -> str:
    """A spelling without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", "", text.lower())
