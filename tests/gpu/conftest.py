"""Fixtures for tests on a real GPU: `python -m pytest -m gpu tests/gpu`.

Each test body runs everywhere, on host memory or beside a stand-in, and with the mark `gpu` on the
device itself, so that a GPU run differs in the device only.
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.cuda_device import why_no_cuda
from tests.unit.weightsync.conftest import published, states

if TYPE_CHECKING:
    from tests.integration.engine_slot import EngineSlot

__all__ = ["published", "states"]

ON_A_GPU = pytest.mark.gpu
ENGINE_START_S = 150.0
"""Timeout for an engine on a GPU to answer; a hanging engine takes no more machine time."""
START_ENGINES = ("test_kvcached", "test_engine_slot", "test_operator_guest")
"""Modules of this folder, from the cheapest; they run after the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    """Sort key: 0 for tests that start no engine and for other folders, which keep their order."""
    if item.path.parent != Path(__file__).parent or item.path.stem not in START_ENGINES:
        return 0
    return 1 + START_ENGINES.index(item.path.stem)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """torch's name of the device."""
    if request.param == "cuda":
        need_cuda()
    return str(request.param)


def need_cuda() -> None:
    if why := why_no_cuda():
        pytest.skip(why)


@pytest.fixture(scope="session")
def engine_slot(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EngineSlot]":
    """Production and guest on one GPU, in place of the two on CPUs that other tests share."""
    need_cuda()
    plugins = {one.name for one in entry_points(group="vllm.general_plugins")}
    if "rosemux_coserve" not in plugins:
        pytest.fail("RoseMux is on the path and not installed: vLLM would not find its plugins")
    from tests.integration.engine_slot import GPU_SHARE, started_slot

    folder = tmp_path_factory.mktemp("slot")
    with started_slot(folder, gpu=GPU_SHARE, start_s=ENGINE_START_S) as slot:
        yield slot
