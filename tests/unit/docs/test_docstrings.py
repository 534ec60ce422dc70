"""Docstrings name their subject: none begins with a preposition or a pronoun for it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = (
    "harvester",
    "coserve",
    "weightsync",
    "scheduler",
    "benchmarks",
    "deploy",
    "examples",
    "tests",
)
_RIDDLE = re.compile(r"\s*(Of|By|Who|Whose|What)\b")
_RIDDLE_OF_A_TEST = re.compile(
    r"test_(of|by|who|whose|whom|what|nobody|everybody|somebody)_"
    r"|\w*_(told|said|nobody|somebody|everybody|whom)(_|$)"
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, class or function, and of each attribute's."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_a_preposition_or_pronoun(package: str, repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {text.strip().splitlines()[0]}"
        for path in sorted((repository / package).rglob("*.py"))
        for line, text in docstrings(path.read_text())
        if _RIDDLE.match(text)
    ]
    assert found == [], "name the subject first, then say what holds of it"


def test_a_test_s_name_has_a_subject(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}: {name}"
        for path in sorted((repository / "tests").rglob("*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if _RIDDLE_OF_A_TEST.match(name)
    ]
    assert found == [], "a test's name is a sentence with a noun as its subject"


def test_docstrings_of_modules_classes_functions_and_attributes_are_found() -> None:
    source = '"""A"""\nclass B:\n    """C"""\n    d = 1\n    """E"""\ndef f():\n    """G"""\n'
    assert sorted(docstrings(source)) == [(1, "A"), (3, "C"), (5, "E"), (7, "G")]
