"""Fixtures of several folders: the real engines, started once a session and on demand."""

import gc
import os
import re
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.file_queue import place_of, unit_of
from tests.integration.forked_program import preload_engines

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

    from tests.integration.engine_slot import EngineSlot

ENGINE = "engine"
"""The mark of tests that start a real vLLM."""

# Several processes of tests share the cores, and threads of torch that wait for one another spin:
# a small product then takes as long as a turn of the scheduler. Before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Compiling a loop, or a busy machine, takes as long as it takes.
# How fast examples are made says how loaded the machine is, nothing else.
settings.register_profile("rosemux", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rosemux")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing what is deselected anyway would take each process half a minute."""
    if collection_path.suffix != ".py" or config.option.markexpr not in (ENGINE, f"not {ENGINE}"):
        return None
    text = collection_path.read_text()
    if config.option.markexpr == ENGINE:
        of_folder = collection_path.with_name("conftest.py")
        text += of_folder.read_text() if of_folder.exists() else ""
        return None if f"mark.{ENGINE}" in text else True
    return True if re.search(rf"^pytestmark = .*mark\.{ENGINE}\b", text, re.MULTILINE) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports of all tests make objects that stay: looking for garbage among them again and again
    takes a good part of a collection's time, and of each search while the tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place_of)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or not find_spec("vllm"):
        return
    if any(item.get_closest_marker(ENGINE) for item in session.items):
        preload_engines()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    if config.getvalue("dist") != "loadfile":
        return None
    # Only pytest-xdist calls this.
    from xdist.scheduler import LoadFileScheduling

    class FileQueue(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return FileQueue(config, log)


@pytest.fixture(scope="session")
def engine_slot(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EngineSlot]":
    """A production engine and a guest on one slot, without a grant."""
    pytest.importorskip("vllm")
    # Imports torch, which most tests do without.
    from tests.integration.engine_slot import started_slot

    with started_slot(tmp_path_factory.mktemp("slot")) as slot:
        yield slot


@pytest.fixture(scope="session")
def real_engine_url(engine_slot: "EngineSlot") -> str:
    """A stock engine with token routes."""
    return engine_slot.production_url
