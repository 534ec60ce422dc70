"""Refuses a demo's `result.json` that is not whole, or whose zeros are not zeros.

Usage: check_result.py PATH. What is whole is written in `examples.demo.schema`. Judges no speed: a
quick run on a busy machine may be slow, but it may lose nothing.
"""

import json
import sys
from pathlib import Path

from examples.demo.schema import problems


def main(path: Path) -> int:
    try:
        result = json.loads(path.read_bytes())
    except OSError as error:
        print(f"{path}: {error.strerror}; did the demo end?", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{path} is not JSON: {error}", file=sys.stderr)
        return 1
    found = problems(result) if isinstance(result, dict) else ["not an object"]
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_result.py PATH")
    sys.exit(main(Path(sys.argv[1])))
