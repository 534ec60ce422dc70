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
CHECKOUT = ("benchmarks", "examples", "deploy")
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
VERBS = {"holds"}
"""Whether a thing contains another: a verb, not the plural of an order."""
OWN_BOUNDS = {"Ratio", "Seconds"}
"""Numbers of a file or of a wire, each within bounds of its own."""
_PLAIN = """
abort absent accepted access account action activated active actor adapted add address admission
admit age agent agreement alive alone alternative announcer answer any api applied apply arrived
asleep
assign assignments async away backend backoff bar base baselines batch bearer beat began begins bell
bet bill binds bits blame body bounds bucket build burn busy by byte cache calibration call caller
capabilities capacity case certificate chance change cheapest check checkpoint choice chunk cleared
client clock close cluster codec command compared comparison compiled completion compute condition
config connections constraint contents context continuation control core corrupt coserve counters
counts course cpu credentials csv cursor curve cut dated deadline deaths decided decision declared
defer demand dense deployment derived description device dialect difference digests directory
dispatch disruptions distribution document doubling draft drift driver drop dropped durable duration
effect elapsed emptied encoded end endings endpoint engaged enqueue enter entry environment estimate
evacuation event evictions evidence exchange execution executor exhausted expected experiments
expiry explanation exposition facts failed fallback fault field file finish first fleet force
foreign forget free frozen full gaps gateway generate gloo gpu greedy guard harm harvest hash head
health held history hold holders horizon host hour http id identity idle ids impact in index info
init intake isolation joined journal journalled judge keeper kept kernels key kill kind kit known
kubernetes kv kvcached label lag lanes large last latency latest launch law layers layout lazy
leasable least leave ledger left lent lift limit linear list listener load location lock log logger
logprob longest lookup loop lora lost mailbox make manifest map mapped match max measured median
member memory message met meta metadata method metrics middleware miss mode model moment monotonic
movable mps mux name narrow needed not object objective objects observed obstacles occupant offer on
only openapi operation operator options order other outage outcome output over overruns overwrite
own owners pace packer page pair parallel params parent part passed paths pause payload peer pending
per percentile permissions picked piece plain plan plane planned plugin policy pool prefix pressure
price printed priority private probe process profile progress promise prompt proof protocol publish
pull quantile queue quiesce ran random range rank ray reader reason recall reclaim record ref
refusal refuse register registry regroup release reload relocation remembered removal render renew
repair repeated replay reply report request reserve resident restart result resumed retarget
retention retry return revocations revoke ring rise risk role rollout room root rose roster route
row rules run runner sample scan scenarios scheduled scores seal searched seconds section seen
segment selection sender sense sensor sent serve settings settle sglang shadow shape shard share
shelf short siblings side signal simulate single sizes skipped slowdown snapshot socket source
sparse spec spent spool sqlite squares stage stale stat state status step stock stopped storage
streak stream stretch strict struct submission submit successful sum summary switch sync systemd
table take target template tenant tensor terms test text thread threshold tile time timeline
timeouts timestamp
tinker tls token total trainer transfer transport trigger type unanswered undo undone unload
unplaced unreachable unrecorded unsafe unseen unshared unsupported up update upstream usage use
value varint verdict view virtual vllm wait waker walk warn watch watchdog weight weightsync whole
widen wire withdraw withdrawn word work workload world worst writable write written xor xxh yaml yet
zero
"""
"""Plain English words, units and names of programs, in names. The glossary has RoseMux's own words
and the field's terms."""


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


def definitions(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Public names in CamelCase with what they stand for: a class of a file, or an alias's text."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                meaning = f"class of {path}"
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                meaning = ast.unparse(node.value) if node.value else path
            case _:
                continue
        if re.fullmatch("[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
            yield name, meaning


def test_no_public_class_or_alias_stands_for_two_things(trees: dict[str, ast.Module]) -> None:
    meanings: dict[str, set[str]] = defaultdict(set)
    for path, tree in of_packages(trees):
        for name, meaning in definitions(path, tree):
            meanings[name].add(meaning)
    assert len(meanings) > 500, "no classes were found"
    found = {name: each for name, each in meanings.items() if len(each) > 1}
    assert {name: each for name, each in found.items() if name not in OWN_BOUNDS} == {}
    assert found.keys() >= OWN_BOUNDS


def test_no_class_of_packages_and_checkout_stands_twice(trees: dict[str, ast.Module]) -> None:
    """Private classes too: a reader meets their names in tracebacks and searches."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


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
    assert found - ALLOWED == set(), "the glossary's table of retired words says what to use"


def test_a_word_of_one_meaning_in_a_class_s_name_has_the_meaning_of_a_row(
    trees: dict[str, ast.Module], table_after: TableAfter
) -> None:
    listed: dict[str, list[str]] = defaultdict(list)
    for word, _, _, classes in table_after(PAGE, "## Words of one meaning"):
        listed[word] += [] if classes == "none" else classes.split(", ")
    names = {name for _, tree in of_packages(trees) for name in public_classes(tree)}
    for word, classes in listed.items():
        found = {name for name in names if {word, f"{word}s"} & set(words_of(name))}
        assert sorted(classes) == sorted(found), word


def test_a_word_of_one_meaning_in_a_function_or_file_lies_in_a_folder_of_its_row(
    trees: dict[str, ast.Module], table_after: TableAfter
) -> None:
    folders = {
        word: tuple(f"{folder}/" for folder in rooms.split(", "))
        for word, _, rooms, _ in table_after(PAGE, "## Words of one meaning")
        if rooms != "any"
    }
    assert len(folders) > 5, "the folders of the table were not found"
    forms = {word: {word, f"{word}s"} - VERBS for word in folders}
    found = {
        (word, path, name)
        for path, tree in of_packages(trees)
        for name in (stem_of(path) or "", *functions(tree))
        for word in folders
        if forms[word] & set(words_of(name)) and not path.startswith(folders[word])
    }
    assert found == set(), "the glossary says which folders have names with the word"


def test_no_docstring_has_a_retired_word(
    retired_in_prose: re.Pattern[str], trees: dict[str, ast.Module]
) -> None:
    found = [
        f"{path}:{node.lineno}: {match[0]}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and (match := retired_in_prose.search(re.sub("`[^`]*`", "", node.value.value)))
    ]
    assert found == []


def test_nothing_that_operators_read_has_a_retired_word(
    repository: Path, retired_in_prose: re.Pattern[str]
) -> None:
    deploy = repository / "deploy"
    pages = [
        path
        for folder in ("runbooks", "prometheus", "systemd", "grafana")
        for path in sorted((deploy / folder).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    ]
    assert len(pages) > 30, "the runbooks were not found"
    found = [
        f"{path.relative_to(repository)}:{number}: {match[0]}"
        for path in pages
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := retired_in_prose.search(line))
    ]
    assert found == []


def test_no_page_has_a_retired_word(repository: Path, retired_in_prose: re.Pattern[str]) -> None:
    """The READMEs of benchmarks and examples too; the glossary lists the words themselves."""
    pages = [
        path
        for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
        for path in sorted(repository.glob(pattern))
        if path.name not in ("CHANGELOG.md", Path(PAGE).name)
    ]
    assert len(pages) > 70, "the pages were not found"
    found = {
        (path.relative_to(repository).as_posix(), match[0])
        for path in pages
        for line in path.read_text().splitlines()
        if (match := retired_in_prose.search(re.sub("`[^`]*`", "", line)))
    }
    assert found == set()


def test_words_of_names_are_terms_of_the_glossary_or_plain_english(
    repository: Path, trees: dict[str, ast.Module]
) -> None:
    """A word with a meaning of its own goes to the glossary, a plain one to `_PLAIN`."""
    page = (repository / PAGE).read_text().partition("## Retired words")[0]
    terms = " ".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)).lower()
    known = {
        stem for word in [*re.findall("[a-z]+", terms), *_PLAIN.split()] for stem in stems_of(word)
    }
    unknown: dict[str, set[str]] = defaultdict(set)
    names = {stem_of(path) or "" for path, _ in of_packages(trees)}
    names.update(*(public_classes(tree) for _, tree in of_packages(trees)))
    names |= {metric.name for metric in METRICS if metric.exported_by is not Exporter.VLLM}
    for name in names:
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


def test_a_name_is_read_as_its_words() -> None:
    assert words_of("MPSStateFile") == ["mps", "state", "file"]
    assert words_of("_kv_pages") == ["kv", "pages"]
    assert {"retry", "place"} <= stems_of("retries") | stems_of("placed")
