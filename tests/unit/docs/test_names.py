"""One name, one thing: docs/glossary.md holds names of classes, files, functions and metrics."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.metrics import METRICS, Exporter

PAGE = "docs/glossary.md"
PACKAGES = ("harvester", "coserve", "weightsync", "scheduler")
CHECKOUT = ("benchmarks", "examples")
TableAfter = Callable[[str, str], list[list[str]]]

_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z]|\d|$)|[A-Z]?[a-z]+")
_SUFFIXES = (
    *(("ies", "y"), ("es", ""), ("s", ""), ("ed", ""), ("ed", "e"), ("ing", ""), ("ing", "e")),
    *(("er", ""), ("er", "e"), ("ion", ""), ("ion", "e"), ("al", ""), ("ment", "")),
)
_DERIVED_STEM_MIN = 3
UNITS = ("seconds", "bytes", "tokens", "ratio", "total", "max", "hour")

ALLOWED = frozenset({"_cell"})
"""A cell of an HTML table."""
REMAINING = frozenset(
    {
        "Conversation",
        "Told",
        "Wanted",
        "_asked",
        "_asked_latest",
        "_heard",
        "_said_terms",
        "_told",
        "asked",
        "conversation",
        "heard",
        "standing",
        "wanted",
        "wanted_terms",
    }
)
"""Names with a retired or unknown word. A new name never comes here."""


def words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def stems_of(word: str) -> set[str]:
    """The word, and what it may be derived from."""
    return {word} | {
        word.removesuffix(suffix) + ending
        for suffix, ending in _SUFFIXES
        if word.endswith(suffix) and len(word) >= len(suffix) + _DERIVED_STEM_MIN
    }


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Syntax trees of every module by its path from the repository's root."""
    repository = Path(__file__).parents[3]
    found = {
        path.relative_to(repository).as_posix(): ast.parse(path.read_text())
        for folder in (*PACKAGES, *CHECKOUT)
        for path in sorted((repository / folder).rglob("*.py"))
    }
    assert len(found) > 300, "the packages were not found"
    return found


def of_packages(trees: dict[str, ast.Module]) -> Iterator[tuple[str, ast.Module]]:
    return ((path, tree) for path, tree in trees.items() if path.split("/")[0] in PACKAGES)


def stem_of(path: str) -> str | None:
    stem = Path(path).stem
    return None if stem.startswith("__") else stem


def public_classes(tree: ast.Module) -> list[str]:
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def functions(tree: ast.Module) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def names_in(trees: dict[str, ast.Module]) -> set[str]:
    """Class names, file stems, function names and metrics that are ours."""
    names = {metric.name for metric in METRICS if metric.exported_by is not Exporter.VLLM}
    for path, tree in trees.items():
        names |= {stem_of(path) or "", *public_classes(tree), *functions(tree)}
    return names - {""}


def test_no_public_class_name_stands_for_two_classes(trees: dict[str, ast.Module]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in of_packages(trees):
        for name in public_classes(tree):
            places[name].append(path)
    assert len(places) > 400, "no classes were found"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    "package",
    ["harvester", "coserve", "weightsync", "scheduler"],
)
def test_no_file_name_stands_twice_in_a_package(package: str, trees: dict[str, ast.Module]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in trees:
        if path.startswith(f"{package}/") and (stem := stem_of(path)):
            places[stem].append(path)
    assert {stem: found for stem, found in places.items() if len(found) > 1} == {}


def test_no_name_has_a_retired_word(trees: dict[str, ast.Module], table_after: TableAfter) -> None:
    rows = table_after(PAGE, "## Retired words")
    retired = {word for row in rows for word in row[0].split(", ")}
    found = {name for name in names_in(trees) if retired & set(words_of(name))}
    assert found - REMAINING - ALLOWED == set(), (
        "the glossary's table of retired words says what to use"
    )


def test_no_docstring_has_a_retired_word(repository: Path, trees: dict[str, ast.Module]) -> None:
    line = next(
        line for line in (repository / PAGE).read_text().splitlines() if line.startswith("Nor do `")
    )
    retired = re.compile(rf"\b({'|'.join(re.findall('`([a-z]+)`', line))})\b", re.IGNORECASE)
    found = [
        f"{path}:{node.lineno}: {match[0]}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and (match := retired.search(re.sub("`[^`]*`", "", node.value.value)))
    ]
    assert found == []


def test_words_of_names_are_those_of_the_documentation(
    repository: Path, trees: dict[str, ast.Module]
) -> None:
    """A new noun goes to the glossary; a plain word to the list at its end."""
    text = " ".join(page.read_text() for page in (repository / "docs").glob("*.md"))
    known = {stem for word in re.findall("[a-z]+", text.lower()) for stem in stems_of(word)}
    unknown: dict[str, set[str]] = defaultdict(set)
    names = {stem_of(path) or "" for path, _ in of_packages(trees)}
    names.update(*(public_classes(tree) for _, tree in of_packages(trees)))
    names |= {metric.name for metric in METRICS if metric.exported_by is not Exporter.VLLM}
    for name in names - REMAINING:
        for word in words_of(name):
            if not stems_of(word) & known:
                unknown[word].add(name)
    assert unknown == {}


def test_a_metric_of_a_measured_quantity_ends_with_its_unit() -> None:
    """Counts of things, states (0 or 1) and versions have none."""
    for metric in METRICS:
        if metric.name.startswith(("harvester_", "scheduler_")):
            measured = re.search(
                "duration|_age_|memory|wait_|hold_|credit|price|impact|budget|headroom", metric.name
            )
            assert not measured or metric.name.split("_")[-1] in UNITS, metric.name


def test_names_that_remain_are_still_there(trees: dict[str, ast.Module]) -> None:
    assert REMAINING - names_in(trees) == set(), "take them out of REMAINING"


def test_a_name_is_read_as_its_words() -> None:
    assert words_of("MPSStateFile") == ["mps", "state", "file"]
    assert words_of("_kv_pages") == ["kv", "pages"]
    assert {"retry", "place"} <= stems_of("retries") | stems_of("placed")
