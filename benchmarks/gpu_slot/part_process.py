"""One part in its process: `python -m benchmarks.gpu_slot.part_process MODULE KIND FILE`."""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_slot.parts import NOT_HERE
from benchmarks.gpu_slot.results import put_into
from harvester.contracts.errors import Unsupported


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_slot.part_process", description=__doc__)
    parser.add_argument("module")
    parser.add_argument("kind", choices=("cuda", "cpu"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    # At its limit a part still removes its pages and directories.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured: Callable[..., None] = importlib.import_module(given.module).measured
    try:
        measured(given.kind, tiny=given.tiny, put=put_into(given.file))
    except Unsupported as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_HERE)


if __name__ == "__main__":
    main()
