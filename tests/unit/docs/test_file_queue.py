"""The order of the suite: files that are named are there, and those that share a slot are named."""

import re
from pathlib import Path

from tests.file_queue import LONGEST, SLOT, SLOT_FILES, unit_of

_FIXTURE = re.compile(r"\bengine_slot: EngineSlot\b|\(engine_url: str\)")


def test_each_file_that_is_named_is_there(repository: Path) -> None:
    named = {*LONGEST, *SLOT_FILES} - {SLOT}
    assert [name for name in sorted(named) if not (repository / "tests" / name).exists()] == []


def test_files_whose_tests_take_the_two_engines_are_one_unit(repository: Path) -> None:
    folders = (repository / "tests" / name for name in ("integration", "contract"))
    found = {
        f"{path.relative_to(repository / 'tests')}"
        for folder in folders
        for path in folder.rglob("test_*.py")
        if _FIXTURE.search(path.read_text())
    }
    assert found == SLOT_FILES
    assert {unit_of(f"tests/{name}::test_one[1]") for name in SLOT_FILES} == {SLOT}


def test_another_file_is_a_unit_of_its_own() -> None:
    assert unit_of("tests/unit/test_one.py::TestOne::test_two") == "tests/unit/test_one.py"
