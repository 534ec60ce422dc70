"""`from scheduler import ...`: few names, each loaded on first use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import scheduler
import weightsync


def test_the_public_names_are_these_seven() -> None:
    assert scheduler.__all__ == [
        "AsyncRolloutClient",
        "JobSpec",
        "PhaseClient",
        "PhaseKind",
        "PhaseSpec",
        "RolloutClient",
        "SocketTransport",
    ]


def test_the_doors_of_all_packages_have_twelve_names() -> None:
    assert len(scheduler.__all__) + len(weightsync.__all__) == 12


REPOSITORY = Path(__file__).parents[3]
SHOWN_DEEPER = {"Adapter", "Base", "Corrupt"}
"""Names that pages and examples import from behind the doors: of adapters, and an error. No
further one: a new name either replaces one of a door or is reached through one."""
ERRORS = "harvester.contracts.errors"
"""Module of all packages' errors, for a caller that catches one."""
DEEP_IMPORT = re.compile(
    r"^(?:from|import) ((?:harvester|coserve|weightsync|scheduler)\.[\w.]+)(?: import (.+))?$",
    re.MULTILINE,
)


def test_examples_import_only_the_doors_and_errors() -> None:
    found = {
        (example.name, module)
        for example in (REPOSITORY / "examples").glob("*.py")
        for module, _ in DEEP_IMPORT.findall(example.read_text())
    }
    assert {module for _, module in found} <= {ERRORS}, found


def test_pages_and_examples_import_few_names_from_behind_the_doors() -> None:
    pages = [*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").glob("*.[mp][dy]")]
    found = {
        name.strip()
        for page in (REPOSITORY / "README.md", *pages)
        for _, names in DEEP_IMPORT.findall(page.read_text())
        for name in names.split(",")
    }
    assert found == SHOWN_DEEPER


@pytest.mark.parametrize("name", scheduler.__all__)
def test_each_public_name_is_the_class_of_its_module(name: str) -> None:
    assert getattr(scheduler, name).__name__ == name


def test_rarer_names_of_a_phase_are_reached_through_its_client() -> None:
    client = scheduler.PhaseClient
    rarer = (client.Terms, client.Terms.Phase, client.Gateway, client.Permit, client.Move)
    assert [each.__name__ for each in rarer] == [
        "JobTerms",
        "PhaseTerms",
        "GatewayAccess",
        "Permit",
        "OrderMove",
    ]


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Planner'"):
        _ = scheduler.Planner


def test_import_of_the_package_loads_no_other_module_of_rosemux_or_numerics() -> None:
    heavy = "('scheduler.', 'harvester', 'numpy', 'numba', 'scipy', 'aiohttp', 'msgspec')"
    code = f"import scheduler, sys; print([m for m in sys.modules if m.startswith({heavy})])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
