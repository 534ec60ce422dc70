"""`python deploy/observer/sources.py FOLDER`: a source tree of the observer, as `build` packs it.

Its modules are those that production's hooks import, found by reading the sources; imports that
only a guest reaches end the search. Needs the standard library alone.
"""

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
OWN = ("coserve", "harvester")
ROOTS = ("coserve.vllm.middleware", "coserve.vllm.observer", "coserve.vllm.pulse_logger")
"""Modules that vLLM loads in production: by the flag, and by the two entry points."""
GUEST_ONLY = (
    "coserve.guest",
    "coserve.law.work_gate",
    "harvester.contracts.isolation",
    "harvester.contracts.wire",
    "harvester.platform",
)
"""Imported in functions that production does not call."""


def observer_files(tree: Path = TREE) -> list[Path]:
    """Paths of the modules below `tree`, in order."""
    found: set[Path] = set()
    pending = list(ROOTS)
    while pending:
        name = pending.pop()
        for path in _files(tree, name):
            if path not in found:
                found.add(path)
                pending += _imports(tree / path)
    return sorted(found)


def _files(tree: Path, name: str) -> Iterator[Path]:
    """A module's file and those of the packages that it is in; none for a name in a module."""
    if any(f"{name}.".startswith(f"{each}.") for each in GUEST_ONLY):
        return
    words = name.split(".")
    for depth in range(1, len(words) + 1):
        module = Path(*words[:depth])
        for path in (module / "__init__.py", module.with_suffix(".py")):
            if (tree / path).is_file():
                yield path


def _imports(file: Path) -> Iterator[str]:
    body = ast.parse(file.read_text()).body
    for node in _running(body):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in OWN)


def _running(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from _running([child])


def main(folder: Path) -> None:
    for path in observer_files():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / path, target)
    for name in ("deploy/observer/pyproject.toml", "LICENSE"):
        shutil.copy(TREE / name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
