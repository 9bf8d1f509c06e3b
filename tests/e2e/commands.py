"""What the end-to-end tests share."""

import json
from pathlib import Path


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
