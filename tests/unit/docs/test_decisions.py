"""Decisions name files and classes that exist."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

CODE = (
    "harvester",
    "coserve",
    "weightsync",
    "scheduler",
    "benchmarks",
    "deploy",
    "examples",
    "tests",
)
_OF_VLLM = {"CPUUnquantizedExperts.apply", "SpinCondition.wait", "cpu_moe.py"}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"[\w/-]+\.py")
_CLASS = re.compile(r"((?:[A-Z][a-z0-9]+){2,}|[A-Z][a-z0-9]+(?=\.))(?:\.(\w+))?(?:\(.*)?")
"""`GroupPlanner`, `Beat.recall`, `PhaseRuntime.observe(event)`; not `Beat`, which is a word too."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    repository = Path(__file__).parents[3]
    paths = (path for folder in CODE for path in (repository / folder).rglob("*.py"))
    return [f"/{path.relative_to(repository).as_posix()}" for path in paths]


@pytest.fixture(scope="module")
def members(files: list[str]) -> dict[str, set[str]]:
    """Names that each class's body or methods bind."""
    repository = Path(__file__).parents[3]
    found: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for node in ast.walk(ast.parse((repository / file[1:]).read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= set(names_bound_in(node))
    return found


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


def unknown(name: str, files: list[str], members: dict[str, set[str]]) -> bool:
    if name in _OF_VLLM:
        return False
    if _FILE.fullmatch(name):
        return not any(file.endswith(f"/{name}") for file in files)
    if named := _CLASS.fullmatch(name):
        owner, member = named.groups()
        return owner not in members or bool(member and member not in members[owner])
    return False


def test_files_and_classes_that_decisions_name_exist(
    repository: Path, files: list[str], members: dict[str, set[str]]
) -> None:
    pages = sorted((repository / "docs/decisions").glob("0*.md"))
    names = [(page.name, name) for page in pages for name in quoted_in(page)]
    assert len(names) > 300, "the names were not found"
    assert [found for found in names if unknown(found[1], files, members)] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scheduler/model.py", False),
        ("model.py", False),
        ("scheduler/models.py", True),
        ("odel.py", True),
        ("Beat.recall", False),
        ("Beat.recalled", True),
        ("TailRecalled", True),
        ("PhaseRuntime.observe(event, now) -> effects", False),
        ("PhaseRuntime.observed(event, now)", True),
        ("journal_max_bytes", False),
        ("ROSEMUX_WEIGHT_ROOT", False),
    ],
)
def test_a_name_is_looked_up(
    name: str, expected: bool, files: list[str], members: dict[str, set[str]]
) -> None:
    assert unknown(name, files, members) is expected
