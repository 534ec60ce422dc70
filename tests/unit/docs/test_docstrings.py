"""Sentences of docstrings name their subject: none begins with a preposition or a pronoun."""

import ast
import io
import re
import tokenize
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
PRODUCT = PACKAGES[:4]
_RIDDLE = re.compile(r"(?:\A\s*|[.:;?!]['\")]*\s+|\n\s*\n\s*)((?:Of|By|Who|Whose|What)\b[^\n]*)")
"""A capital letter after a colon or a semicolon begins a sentence too."""
_PERSON = re.compile(r"\b(nobody|anybody|whoever|whom)\b", re.IGNORECASE)
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


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def riddles(text: str) -> list[str]:
    """Beginnings of sentences without a subject."""
    return [match[1] for match in _RIDDLE.finditer(text)]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_sentence_begins_with_a_preposition_or_pronoun(package: str, repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {sentence}"
        for path in sorted((repository / package).rglob("*.py"))
        for line, text in docstrings(path.read_text())
        for sentence in riddles(text)
    ]
    assert found == [], "name the subject first, then say what holds of it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Of them.", ["Of them."]),
        (" \n What it is.", ["What it is."]),
        ("One. Who asks", ["Who asks"]),
        ("One: By day", ["By day"]),
        ('One ("a.") Whose', ["Whose"]),
        ("One\n\n    Of two\n    three", ["Of two"]),
        ("One of two: what it is, by whom", []),
        ("The Whole. Often", []),
    ],
)
def test_each_sentence_of_a_docstring_is_looked_at(text: str, found: list[str]) -> None:
    assert riddles(text) == found


@pytest.mark.parametrize("package", PRODUCT)
def test_docstrings_and_comments_name_no_unnamed_person(package: str, repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {match[0]}"
        for path in sorted((repository / package).rglob("*.py"))
        for source in (path.read_text(),)
        for line, text in (*docstrings(source), *comments(source))
        for match in _PERSON.finditer(text)
    ]
    assert found == [], "name the process, the job or the operator"


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
