"""Results of a long run's parts, each kept in a file: the run may be taken in pieces."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

Result = TypeVar("Result")


def kept_result(path: Path | None, run: Callable[[], Result], kind: type[Result]) -> Result:
    """The result in `path`, else that of `run`, which is then kept there; None keeps nothing."""
    if path is not None and path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=kind)
    result = run()
    if path is not None:
        # A run that is stopped while it writes leaves no half of a result.
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(result))
        part.replace(path)
    return result
