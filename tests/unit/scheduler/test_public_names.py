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


SHOWN_DEEPER = {
    "Adapter",
    "Base",
    "Corrupt",
    "GatewayAccess",
    "JobId",
    "JobTerms",
    "Names",
    "OrderMove",
    "Permit",
    "PhaseTerms",
    "TensorParallel",
}
"""Names that pages and examples import from behind the doors. No further one: a new name either
replaces one of a door or is reached through one."""


def test_pages_and_examples_import_few_names_from_behind_the_doors() -> None:
    repository = Path(__file__).parents[3]
    pages = [*(repository / "docs").rglob("*.md"), *(repository / "examples").glob("*.[mp][dy]")]
    found = {
        name.strip()
        for page in (repository / "README.md", *pages)
        for names in re.findall(
            r"^from (?:harvester|coserve|weightsync|scheduler)\.[\w.]+ import (.+)$",
            page.read_text(),
            re.MULTILINE,
        )
        for name in names.split(",")
    }
    assert found == SHOWN_DEEPER


@pytest.mark.parametrize("name", scheduler.__all__)
def test_each_public_name_is_the_class_of_its_module(name: str) -> None:
    assert getattr(scheduler, name).__name__ == name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Planner'"):
        _ = scheduler.Planner


def test_import_of_the_package_loads_no_other_module_of_rosemux_or_numerics() -> None:
    heavy = "('scheduler.', 'harvester', 'numpy', 'numba', 'scipy', 'aiohttp', 'msgspec')"
    code = f"import scheduler, sys; print([m for m in sys.modules if m.startswith({heavy})])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
