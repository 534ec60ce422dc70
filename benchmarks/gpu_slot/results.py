"""Results of one part, written as they come: what a killed part has measured is not lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.testbed.partial_result import PartialResult

Put: TypeAlias = Callable[[str, Any], None]
"""Keeps one named result; given again, the name has the newer one."""


def put_into(path: Path) -> Put:
    """Keeps results in a file that is whole after each of them."""
    kept = PartialResult(path)
    return lambda name, result: kept.keep({name: result})


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
