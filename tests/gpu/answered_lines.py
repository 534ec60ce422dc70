"""The child's end of `child.py`: a line is a command and its words, its answer a line of JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any


def answer_lines(commands: object) -> None:
    """Until the input ends; a command that fails is answered with its error."""
    for line in sys.stdin:
        name, *words = line.split()
        act: Callable[..., dict[str, Any]] = getattr(commands, name)
        try:
            said = act(*words)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
