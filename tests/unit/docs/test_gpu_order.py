"""The order of tests/gpu: an engine that hangs costs no test that needs none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu import conftest
from tests.gpu.conftest import START_ENGINES, pytest_collection_modifyitems

FOLDER = Path(conftest.__file__).parent


def items(*files: str) -> list[Any]:
    return [SimpleNamespace(path=FOLDER / f"{file}.py") for file in files]


def order(*files: str) -> list[str]:
    collected = items(*files)
    pytest_collection_modifyitems(collected)
    return [item.path.stem for item in collected]


def test_modules_that_start_engines_run_last_and_the_rest_keeps_its_order() -> None:
    assert order("test_operator_guest", "test_driver", "test_engine_slot", "test_weights") == [
        "test_driver",
        "test_weights",
        "test_engine_slot",
        "test_operator_guest",
    ]


def test_a_file_of_another_folder_stays_where_it_is() -> None:
    assert order("test_mps", "../unit/test_engine_slot", "test_driver") == [
        "test_mps",
        "test_engine_slot",
        "test_driver",
    ]


def test_each_module_that_is_named_is_there() -> None:
    assert [name for name in START_ENGINES if not (FOLDER / f"{name}.py").exists()] == []
