"""Lines of logs and texts of errors name their subject, as docstrings and pages do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.docs.folders import CODE

PRODUCT = CODE[:4]
LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
"""Methods of a logger."""
_FAILS = re.compile(
    r"(Error|Refused|Refusal|Exhausted|Stale|Unsupported|Corrupt|Interrupted|Lost|Changed|Busy|Fault"
    r"|NotYet|Failed|InUse|Pressure|HTTP[A-Z]\w+)$|(^|_)(fail|failed|refuse|refused|refusal)$"
)
"""Names of exceptions, of refusals and of functions that make one."""
_WITHOUT_NOUN = re.compile(
    r"(?:\A\s*|[.;?!] +)(of|by|those|anew)\b|\A(it|they)\b"
    r"|\b(what|who|whom|whose|whoever|nobody|anybody|somebody|everybody|someone|anyone|everyone)\b"
    r"|\b(says|asked|wanted|heard)\b",
    re.IGNORECASE,
)
"""A part of a sentence that points at a thing or a person without its noun."""


def message_of(part: ast.AST) -> str | None:
    """A literal's text, with `_` for each value; None for another expression."""
    match part:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=pieces):
            return "".join(message_of(piece) or "_" for piece in pieces)
    return None


def literals(part: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each literal that an argument may be."""
    text = message_of(part)
    if text is not None:
        yield getattr(part, "lineno", 0), text
    elif isinstance(part, (ast.IfExp, ast.BinOp, ast.BoolOp)):
        for child in ast.iter_child_nodes(part):
            yield from literals(child)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each sentence that is logged or given to an exception or a refusal."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name in LOGS or _FAILS.search(name):
                pass
            case ast.Call(func=ast.Name(id=name)) if _FAILS.search(name):
                pass
            case _:
                continue
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from ((line, text) for line, text in literals(part) if " " in text.strip())


@pytest.fixture(scope="module")
def product() -> list[tuple[str, int, str]]:
    """File, line and text of each message of the packages."""
    repository = Path(__file__).parents[3]
    found = [
        (path.relative_to(repository).as_posix(), line, text)
        for package in PRODUCT
        for path in sorted((repository / package).rglob("*.py"))
        for line, text in messages(path.read_text())
    ]
    assert len(found) > 800, "the messages were not found"
    return found


def test_a_message_names_its_subject(product: list[tuple[str, int, str]]) -> None:
    found = [one for one in product if _WITHOUT_NOUN.search(one[2])]
    assert found == [], "name the file, the process, the job or the operator"


def test_no_message_has_a_retired_word(
    product: list[tuple[str, int, str]], retired_in_prose: re.Pattern[str]
) -> None:
    found = [one for one in product if retired_in_prose.search(one[2])]
    assert found == [], "the glossary's table of retired words says what to use"


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("it aborted the turn", True),
        ("the file is gone; of it no copy", True),
        ("lost what was written", True),
        ("the engine, who has it", True),
        ("_ says version _", True),
        ("slot _: of node _", False),
        ("the store holds it no more", False),
    ],
)
def test_a_sentence_without_its_noun_is_found(text: str, bad: bool) -> None:
    assert bool(_WITHOUT_NOUN.search(text)) is bad


def test_messages_of_logs_exceptions_and_refusals_are_found() -> None:
    source = """
raise ConfigError(f"a {b}" if c else "d e")
log.warning("f %s", g)
self._fail(Corrupt("h i"))
print("j k")
log.warn_s("l m")
"""
    assert list(messages(source)) == [(2, "a _"), (2, "d e"), (3, "f %s"), (4, "h i")]
