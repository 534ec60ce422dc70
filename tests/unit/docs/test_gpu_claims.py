"""Each claim about GPUs has a state, and the commands and modules that it names exist."""

import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

PAGE, CLAIMS, DAY = "docs/gpu.md", "## Every claim about GPUs", "## The day a GPU is there"
PACKAGES = ("harvester", "coserve", "weightsync", "scheduler", "benchmarks", "deploy", "examples")
_SPEAKS_OF_GPUS = re.compile(r"cuda|nvidia|nvml", re.IGNORECASE)
_STATE = re.compile(r"(measured|prepared) \((.+)\)|(never run)( \(.+\))?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

Table = list[list[str]]


@pytest.fixture
def claims(table_after: Callable[[str, str], Table]) -> Table:
    return table_after(PAGE, CLAIMS)


@pytest.fixture
def section(repository: Path) -> str:
    """Text between the claims' title and the next one."""
    text = (repository / PAGE).read_text()
    return text[text.index(CLAIMS) : text.index(DAY)]


def test_every_claim_names_what_makes_it(claims: Table, repository: Path) -> None:
    decisions = {path.name[:4] for path in (repository / "docs/decisions").glob("0*.md")}
    for claim, places, _state in claims:
        for place in places.split(", "):
            if number := re.fullmatch(r"decision (\d+)", place):
                assert f"{int(number[1]):04d}" in decisions, claim
            else:
                assert (repository / place).is_file(), f"{claim}: {place}"


def test_every_claim_has_a_state_with_its_figure_or_its_command(
    claims: Table, repository: Path
) -> None:
    for claim, _places, state in claims:
        found = _STATE.fullmatch(state)
        assert found, f"{claim}: {state}"
        if found[1] == "measured":
            assert _DATE.search(found[2]), f"{claim}: figure, machine and date"
        elif found[1] == "prepared":
            _check_commands(found[2], repository)


def _check_commands(said: str, repository: Path) -> None:
    tests = re.findall(r"tests/gpu/\w+\.py", said)
    benchmarks = re.findall(r"benchmarks\.(\w+)(?:, part (\w+))?", said)
    assert tests or benchmarks, said
    for test in tests:
        assert (repository / test).is_file(), test
    for name, part in benchmarks:
        assert (repository / "benchmarks" / name / "__main__.py").is_file(), name
        if part:
            parts = import_module(f"benchmarks.{name}.parts").PARTS
            assert part in {one.name for one in parts}, f"{name}: {part}"


def test_every_test_for_gpus_is_some_claim_s(section: str, repository: Path) -> None:
    for file in sorted((repository / "tests/gpu").glob("test_*.py")):
        assert f"`tests/gpu/{file.name}`" in section, file.name


def test_every_module_that_speaks_of_gpus_is_named_with_a_claim_or_without_one(
    section: str, repository: Path
) -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]*)`", section)
    for package in PACKAGES:
        for file in sorted((repository / package).rglob("*.py")):
            path = file.relative_to(repository).as_posix()
            if _SPEAKS_OF_GPUS.search(file.read_text()):
                folders = [one for one in named if one.endswith("/")]
                assert path in named or path.startswith(tuple(folders)), path


def test_every_command_of_the_day_exists(
    table_after: Callable[[str, str], Table], repository: Path
) -> None:
    rows = table_after(PAGE, DAY)
    assert [row[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    for _order, line, _about, _says in rows:
        for command in line.strip("`").split(" && "):
            _check_command(command, repository)


def _check_command(command: str, repository: Path) -> None:
    program, *words = command.removesuffix(" > /dev/null").split()
    if program == ".":
        assert words[0].endswith("/activate"), command
    elif found := re.match(r"python3 -m benchmarks\.(\w+)(?:\.(\w+))? ", command):
        package = repository / "benchmarks" / found[1]
        assert (package / f"{found[2] or '__main__'}.py").is_file(), command
        source = "".join(file.read_text() for file in package.glob("*.py"))
        for flag in (word for word in words if word.startswith("--")):
            assert f'"{flag}"' in source, command
    elif "python3 -m pytest -m gpu " in command:
        paths = [word for word in words if word.startswith("tests/")]
        assert paths, command
        assert all((repository / path).exists() for path in paths), command
    else:
        assert os.access(repository / program, os.X_OK), command
