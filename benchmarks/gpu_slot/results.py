"""Results of one part, written as they come: what a killed part has measured is not lost."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from harvester.result_file import write_whole

Put: TypeAlias = Callable[[str, Any], None]
"""Keeps one named result; given again, the name has the newer one."""


@dataclass(slots=True)
class ResultFile:
    """A JSON object in a file, whole after every `put`."""

    path: Path
    found: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, result: Any) -> None:
        """Raises ConfigError where the file cannot be written."""
        self.found[name] = result
        write_whole(self.path, json.dumps(self.found, indent=1, allow_nan=False) + "\n")


def under(name: str, put: Put) -> Put:
    """Keeps results as fields of one result."""
    found: dict[str, Any] = {}

    def keep(field_name: str, result: Any) -> None:
        found[field_name] = result
        put(name, found)

    return keep


def left_in(path: Path) -> dict[str, Any]:
    """Results that a part left; none where it did not come to its first."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
