"""docs/architecture.md has the transitions of the policies and walks through files that exist."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from harvester.policy.states import TRANSITIONS, Condition, State
from scheduler.gateway.policy import versions

PAGE = "docs/architecture.md"
MOST_RETURNS = 5
TableAfter = Callable[[str, str], list[list[str]]]


def test_the_slot_s_states_are_those_of_the_policy(table_after: TableAfter) -> None:
    usual = {row[0]: row[1] for row in table_after(PAGE, "| condition | state | when |")}
    rest = table_after(PAGE, "| from | condition | state |")
    exceptions = {(row[0], row[1]): row[2] for row in rest}

    assert list(usual) == [condition.value for condition in Condition], "in order of severity"
    assert {
        (state.value, condition.value): exceptions.get(
            (state.value, condition.value), usual[condition.value]
        )
        for state in State
        for condition in Condition
    } == {
        (state.value, condition.value): to.value for (state, condition), to in TRANSITIONS.items()
    }


def test_a_version_switch_moves_as_the_policy_does(table_after: TableAfter) -> None:
    rows = table_after(PAGE, "| state | on | next |")

    assert {(row[0], row[1]): row[2] for row in rows} == {
        (state.value, trigger.value): to.value
        for (state, trigger), to in versions.TRANSITIONS.items()
    }


@pytest.fixture
def walks(repository: Path, table_after: TableAfter) -> dict[str, tuple[list[Path], int]]:
    """Files of each walk in order, and how often the page says that one is entered again.

    A name without folders is beside the file before it, or in a folder beside it.
    """
    found: dict[str, tuple[list[Path], int]] = {}
    for walk, files, again in table_after(PAGE, "| walk | files | again |"):
        folder, package = Path(), Path()
        entered: list[Path] = []
        for name in re.findall(r"[\w/]+\.py", files):
            places = (at / name for at in (Path(), folder, package, package.parent))
            path = next((path for path in places if (repository / path).is_file()), None)
            assert path is not None, f"{name} after {folder}"
            folder = path.parent
            if len(Path(name).parts) > 2 or not package.parts:
                package = folder
            entered.append(path)
        found[walk] = entered, int(again)
    return found


def test_no_walk_enters_a_file_again_more_than_five_times(
    walks: dict[str, tuple[list[Path], int]],
) -> None:
    for walk, (entered, again) in walks.items():
        assert all(here != before for before, here in pairwise(entered)), walk
        returns = max(Counter(entered).values()) - 1
        assert (walk, returns) == (walk, again)
        assert returns <= MOST_RETURNS, walk


@pytest.mark.parametrize("folder", ["harvester", "coserve", "weightsync", "scheduler"])
def test_every_package_is_described(folder: str, repository: Path, table_after: TableAfter) -> None:
    packages = table_after(PAGE, "| package | what it is |")
    rooms = table_after(PAGE, "| room | what is in it |")
    described = {row[0] for row in (*packages, *rooms)}
    found = {
        f"{folder}.{path.name}"
        for path in (repository / folder).iterdir()
        if (path / "__init__.py").is_file()
    }
    # The adapter to vLLM stands in its package's own row, or in one of its own.
    adapter = {f"{folder}.vllm"}

    assert {name for name in described if name.startswith(f"{folder}.")} - adapter == (
        found - adapter
    )
    assert found or folder in described


def test_the_sizes_of_the_packages_are_those_of_the_tree(
    repository: Path, table_after: TableAfter
) -> None:
    for package, lines, files, _ in table_after(PAGE, "| package | lines | files | aim, lines |"):
        found = [*(repository / package).rglob("*.py")]
        count = sum(path.read_bytes().count(b"\n") for path in found)
        assert count == pytest.approx(int(lines.replace(",", "")), rel=0.03), package
        assert len(found) == pytest.approx(int(files), rel=0.03), package
