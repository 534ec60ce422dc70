"""One part in a process of its own: `python -m benchmarks.gpu_slot.part_process NAME KIND FILE`."""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_slot.parts import NOT_HERE, PARTS
from benchmarks.gpu_slot.results import ResultFile
from harvester.contracts.errors import Unsupported


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_slot.part_process", description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("kind", choices=("cuda", "cpu"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    part = next(part for part in PARTS if part.name == given.name)
    try:
        part.measure(given.kind, tiny=given.tiny, put=ResultFile(given.file).put)
    except Unsupported as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_HERE)


if __name__ == "__main__":
    main()
