"""Sentences of docstrings, comments and pages name their subject."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.docs.folders import CODE

PRODUCT = CODE[:4]
_RIDDLE = re.compile(
    r"(?:\A\s*|[.:;?!]['\")]*\s+|\n\s*\n\s*)((?:Of|By|Who|Whose|What|Those|Anew|Until cancelled"
    r"|The same of|The same and|As of)\b[^\n]*)"
)
"""A capital letter after a colon or a semicolon begins a sentence too."""
_WITHOUT_SUBJECT = re.compile(
    r"\s*(?:(?:It|Its|They|Their|Both|Neither|None|Nothing|Not|Same|Another|So|Also|Again|Else|As"
    r"|At|In|On|To|For|From|Per|With|Within|Without|Under|Above|Below|Beside|Beyond|Between|Before"
    r"|After|Since|Until)\b|One (?:that|which|of (?:them|these|those))\b)"
)
"""First words of a docstring of the packages that say nothing of its subject."""
_PERSON = re.compile(r"\b(nobody|anybody|whoever|whom)\b", re.IGNORECASE)
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_BEFORE_PROSE = re.compile(r"\n\s*\n|^#.*$|^[ >]*(?:[-*]|\d+\.) |\|", re.MULTILINE)
"""An empty line, a heading, the mark of an item, the border of a cell."""
_QUESTION = re.compile(r"[^.?!]*\?")
AS_THEY_ARE = {("docs/phases.md", "By default")}
"""Pages and first words of sentences that may begin so."""
_RIDDLE_OF_A_TEST = re.compile(
    r"test_(of|by|who|whose|whom|what|nobody|everybody|somebody)_"
    r"|\w*_(told|said|nobody|somebody|everybody|whom)(_|$)"
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, class or function, and of each attribute's."""
    for node in statements(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All of a module at any depth. Most nodes are parts of expressions, which hold none."""
    found: list[ast.AST] = [tree]
    for node in found:
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, block, ())
    yield from found


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def may_be_riddles(source: str) -> Iterator[tuple[int, str]]:
    """The comments of a source that may have a riddle. Tokenizing every source takes long."""
    if any(map(riddles, re.findall(r"#([^\n]*)", source))):
        yield from comments(source)


def prose_of(page: str) -> Iterator[str]:
    """Paragraphs, items and cells of a page in Markdown, without its code: a sentence a line."""
    text = re.sub(r"`[^`\n]*`", "X", _FENCED.sub("", page))
    for part in _BEFORE_PROSE.split(text):
        text = " ".join(part.replace("**", "").split())
        yield re.sub(r"([.:;?!]['\")]*) ", r"\1\n", text)


def pages_of(repository: Path) -> list[Path]:
    found = [*(repository / "docs").rglob("*.md"), *(repository / "deploy/runbooks").glob("*.md")]
    return [repository / "README.md", repository / "SECURITY.md", *sorted(found)]


def riddles(text: str) -> list[str]:
    """Beginnings of sentences without a subject."""
    return [match[1] for match in _RIDDLE.finditer(text)]


@pytest.mark.parametrize("package", CODE)
def test_no_sentence_begins_with_a_preposition_or_pronoun(package: str, repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {sentence}"
        for path in sorted((repository / package).rglob("*.py"))
        for source in (path.read_text(),)
        for line, text in (*docstrings(source), *may_be_riddles(source))
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
        ("Until cancelled; then", ["Until cancelled; then"]),
        ("One. Those of two", ["Those of two"]),
        ("The same of two. The same text", ["The same of two. The same text"]),
    ],
)
def test_each_sentence_of_a_docstring_is_looked_at(text: str, found: list[str]) -> None:
    assert riddles(text) == found


@pytest.mark.parametrize("package", PRODUCT)
def test_a_docstring_begins_with_its_subject_or_verb(package: str, repository: Path) -> None:
    """Tests and benchmarks may begin with the condition that they add to their name."""
    found = [
        f"{path.relative_to(repository)}:{line}: {text.strip().splitlines()[0]}"
        for path in sorted((repository / package).rglob("*.py"))
        for line, text in docstrings(path.read_text())
        if _WITHOUT_SUBJECT.match(text)
    ]
    assert found == [], "say what the thing is, or what the function does"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("None for a CPU engine.", True),
        ("The engine's GPUs; None for a CPU engine.", False),
        ("One that waits is drained.", True),
        ("One step of an engine.", False),
        ("\n    Per node, its job.", True),
        ("Period of looks, in s.", False),
    ],
)
def test_a_beginning_without_a_subject_is_found(text: str, found: bool) -> None:
    assert bool(_WITHOUT_SUBJECT.match(text)) is found


@pytest.mark.parametrize("package", PRODUCT)
def test_docstrings_and_comments_name_no_unnamed_person(package: str, repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {match[0]}"
        for path in sorted((repository / package).rglob("*.py"))
        for source in (path.read_text(),)
        if _PERSON.search(source)
        for line, text in (*docstrings(source), *comments(source))
        for match in _PERSON.finditer(text)
    ]
    assert found == [], "name the process, the job or the operator"


def test_no_sentence_of_a_page_begins_with_a_preposition_or_pronoun(repository: Path) -> None:
    found = [
        (page.relative_to(repository).as_posix(), sentence)
        for page in pages_of(repository)
        for prose in prose_of(page.read_text())
        for sentence in riddles(prose)
        if not _QUESTION.match(sentence)
    ]
    assert [
        (page, sentence)
        for page, sentence in found
        if not any(page == where and sentence.startswith(words) for where, words in AS_THEY_ARE)
    ] == [], "name the subject first, then say what holds of it"


def test_pages_name_no_unnamed_person(repository: Path) -> None:
    found = [
        f"{page.relative_to(repository)}: {prose}"
        for page in pages_of(repository)
        for prose in prose_of(page.read_text())
        if _PERSON.search(prose)
    ]
    assert found == [], "name the process, the job or the operator"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("# What it is\n\nBy day.\n", ["By day."]),
        (
            "- **Of them.** One\n  of two. Who\n  asks\n",
            ["Of them.", "Who asks"],
        ),
        ("1. Whose\n2. Two `a.b`. Of one\n", ["Whose", "Of one"]),
        ("| a | What it is |\n|---|---|\n", ["What it is"]),
        ("```\n\nWhat code\n```\none `of two`. [What it is](a.md)\n", []),
    ],
)
def test_each_sentence_of_a_page_is_looked_at(page: str, found: list[str]) -> None:
    assert [sentence for prose in prose_of(page) for sentence in riddles(prose)] == found


def test_a_test_s_name_has_a_subject(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}: {name}"
        for path in sorted((repository / "tests").rglob("*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if _RIDDLE_OF_A_TEST.match(name)
    ]
    assert found == [], "a test's name is a sentence with a noun as its subject"


def test_comments_are_found_without_their_mark() -> None:
    assert list(comments("# By day\na = 1  # What\n")) == [(1, " By day"), (2, " What")]


def test_docstrings_of_modules_classes_functions_and_attributes_are_found() -> None:
    source = '"""A"""\nclass B:\n    """C"""\n    d = 1\n    """E"""\ndef f():\n    """G"""\n'
    assert sorted(docstrings(source)) == [(1, "A"), (3, "C"), (5, "E"), (7, "G")]
