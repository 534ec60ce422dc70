"""Decisions name files and classes that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.docs.folders import CODE

_OF_VLLM = {"CPUUnquantizedExperts.apply", "SpinCondition.wait", "cpu_moe.py"}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"[\w/-]+\.py")
_CLASS = re.compile(r"((?:[A-Z][a-z0-9]+){2,}|[A-Z][a-z0-9]+(?=\.))(?:\.(\w+))?(?:\(.*)?")
"""`GroupPlanner`, `Beat.recall`, `PhaseRuntime.observe(event)`; not `Beat`, which is a word too."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Text of each Python file by its path from the repository's root."""
    repository = Path(__file__).parents[3]
    paths = [path for folder in CODE for path in (repository / folder).rglob("*.py")]
    return {path.relative_to(repository).as_posix(): path.read_text() for path in paths}


def members_of(owner: str, sources: dict[str, str]) -> set[str] | None:
    """Names that the body and the methods of a class bind; None if there is no such class."""
    defined = re.compile(rf"^ *class {owner}\b", re.MULTILINE)
    trees = [ast.parse(text) for text in sources.values() if defined.search(text)]
    classes = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == owner
    ]
    return {name for each in classes for name in names_bound_in(each)} if classes else None


def names_bound_in(body: ast.ClassDef) -> list[str]:
    names = []
    for node in ast.walk(body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.append(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.append(name)
    return names


def quoted_in(page: Path) -> list[str]:
    """Text between single backticks, outside blocks of code."""
    return re.findall(r"`([^`\n]+)`", _FENCED.sub("", page.read_text()))


def is_known(name: str, sources: dict[str, str]) -> bool:
    if name in _OF_VLLM:
        return True
    if _FILE.fullmatch(name):
        return any(f"/{path}".endswith(f"/{name}") for path in sources)
    if named := _CLASS.fullmatch(name):
        members = members_of(named[1], sources)
        return members is not None and (named[2] is None or named[2] in members)
    return True


def test_files_and_classes_that_decisions_name_exist(
    repository: Path, sources: dict[str, str]
) -> None:
    pages = sorted((repository / "docs/decisions").glob("0*.md"))
    names = [(page.name, name) for page in pages for name in quoted_in(page)]
    assert len(names) > 300, "the names were not found"
    assert [found for found in names if not is_known(found[1], sources)] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scheduler/model.py", True),
        ("model.py", True),
        ("scheduler/models.py", False),
        ("odel.py", False),
        ("Beat.recall", True),
        ("Beat.recalled", False),
        ("TailRecalled", False),
        ("PhaseRuntime.observe(event, now) -> effects", True),
        ("PhaseRuntime.observed(event, now)", False),
        ("journal_max_bytes", True),
        ("ROSEMUX_WEIGHT_ROOT", True),
    ],
)
def test_a_name_is_looked_up(name: str, expected: bool, sources: dict[str, str]) -> None:
    assert is_known(name, sources) is expected
