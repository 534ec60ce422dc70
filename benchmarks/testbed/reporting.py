"""The end of a benchmark: its result on screen and in a file, or one clear line.

The file is checked for writing before anything is measured, not after.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.testbed.prerequisites import check_machine
from harvester.contracts.errors import RoseMuxError
from harvester.platform.whole_file import make_writable


def report(
    name: str,
    measured: Callable[[], dict[str, Any]],
    path: Path | None,
    *,
    engines: bool = True,
) -> dict[str, Any]:
    """The result. Without a path it goes to the screen alone.

    Leaves through SystemExit where a part fails or the path cannot be written, and, with
    `engines`, where the machine will not do for real ones.
    """
    try:
        if path is not None:
            make_writable(path)
        if engines:
            check_machine()
        result = measured()
    except RoseMuxError as error:
        sys.exit(f"benchmarks.{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    text = json.dumps(result, indent=1)
    # First where nothing can go wrong: a disk may have filled up meanwhile.
    print(text, flush=True)
    if path is not None:
        try:
            path.write_text(text + "\n")
        except OSError as error:
            sys.exit(f"benchmarks.{name}: cannot write {path}: {error.strerror}")
    return result
