"""docs/architecture.md has the transitions of the policies, the packages and their sizes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harvester.policy.states import TRANSITIONS, Condition, State
from scheduler.gateway.policy import versions

PAGE = "docs/architecture.md"
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


def test_rollmux_and_gateway_have_as_many_message_types_as_the_page_says(repository: Path) -> None:
    """Records with a tag, which journals and sockets carry."""
    rollmux, gateway = (
        sum(
            len(re.findall(r"^class .*\btag=", path.read_text(), re.M))
            for path in (repository / "scheduler" / folder).rglob("*.py")
        )
        for folder in ("rollmux", "gateway")
    )
    counted = f"{rollmux} tagged message types in RollMux, {gateway} tagged types in the gateway"
    assert counted in " ".join((repository / PAGE).read_text().split())
