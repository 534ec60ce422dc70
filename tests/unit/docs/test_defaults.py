"""Defaults on the pages of docs/, as `name` (value) or in a column `default`, are the code's."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.docs.folders import CODE

Defaults = dict[str, set[float]]

_UNITS = {"": 1, "s": 1, "%": 0.01, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_VALUE = r"(\d[\d,.]*)(?: (%|[KMG]iB|s))?"
_IN_TEXT = re.compile(rf"`(?:--)?(?:\w+\.)*([a-z][\w-]+)` \({_VALUE}(?=[;,)])")
_TABLE = re.compile(r"(?m)^\|[^|]*\| default \|.*\n(?:\|.*\n)+")
_ROW = re.compile(rf"(?m)^\| `([a-z]\w*)` \| {_VALUE} \|")


def number(node: ast.expr | None) -> float | None:
    """A number, arithmetic on numbers, or `Field` with one of them; None otherwise."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Field":
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        return number(node.args[0] if node.args else named.get("default"))
    kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if node is None or not all(isinstance(part, kinds) for part in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(body=node), "default", "eval"))
    return float(value) if isinstance(value, (int, float)) else None


def given_in(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Name and default of each constant, field, option and parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name, value
            case ast.arguments():
                places = [*node.posonlyargs, *node.args][::-1]
                yield from zip((place.arg for place in places), node.defaults[::-1], strict=False)
                names = (each.arg for each in node.kwonlyargs)
                yield from zip(names, node.kw_defaults, strict=True)


@pytest.fixture(scope="module")
def defaults() -> Defaults:
    repository = Path(__file__).parents[3]
    given = [
        pair
        for package in CODE[:4]
        for path in (repository / package).rglob("*.py")
        for pair in given_in(ast.parse(path.read_text()))
    ]
    constants = {name: number(value) for name, value in given if name.isupper()}
    found: Defaults = defaultdict(set)
    for name, value in given:
        default = constants.get(value.id) if isinstance(value, ast.Name) else number(value)
        if default is not None:
            found[name].add(default)
    return found


def stated(text: str) -> Iterator[tuple[str, float]]:
    """Name and default of each setting for which a page states one."""
    rows = _ROW.findall("".join(_TABLE.findall(text)))
    for name, value, unit in (*_IN_TEXT.findall(text), *rows):
        yield name.replace("-", "_"), float(value.replace(",", "")) * _UNITS[unit]


def test_a_default_on_a_page_is_one_of_that_name_in_the_code(
    repository: Path, defaults: Defaults
) -> None:
    pages = [*(repository / "docs").glob("*.md"), *(repository / "docs/protocol").glob("*.md")]
    found = [(page.name, *pair) for page in pages for pair in stated(page.read_text())]

    wrong = [each for each in found if each[2] not in defaults[each[1]]]
    assert wrong == []
    assert len(found) > 50, "the defaults on the pages were not found"


def test_forms_of_defaults_are_read() -> None:
    page = "`a.keep_s` (30 s; 0 keeps none), `--mib` (64), `x` (1 while\n"
    page += "| a | default |\n|---|---|\n| `b` | 25 |\n"
    assert [*stated(page)] == [("keep_s", 30.0), ("mib", 64.0), ("b", 25.0)]
    source = "def f(a, b=2, *, c=64 << 20): ...\nd: int = Field(default=3, ge=1)"
    pairs = [(name, number(value)) for name, value in given_in(ast.parse(source))]
    assert {*pairs} == {("b", 2.0), ("c", float(64 << 20)), ("d", 3.0)}
