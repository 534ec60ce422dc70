"""How a benchmark of real engines ends: its result in a file and on screen, or one clear line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harvester.contracts.errors import RoseMuxError
from scheduler.demo.prerequisites import check_machine


def report(name: str, measured: Callable[[], dict[str, Any]], path: Path) -> None:
    """Leaves through SystemExit where the machine will not do, or a part fails."""
    try:
        check_machine()
        result = measured()
    except RoseMuxError as error:
        sys.exit(f"benchmarks.{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
