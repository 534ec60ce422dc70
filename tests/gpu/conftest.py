"""What serves GPUs, on a GPU: `python -m pytest -m gpu tests/gpu`.

Each body runs everywhere, on the host's memory or beside a stand-in, and with the mark `gpu` on the
device itself, so that nothing but the device is new there.
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

from tests.gpu.cuda_device import why_no_cuda
from tests.unit.weightsync.conftest import published, states

if TYPE_CHECKING:
    from tests.integration.engine_slot import EngineSlot

__all__ = ["published", "states"]

ON_A_GPU = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """torch's name of it."""
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

    with started_slot(tmp_path_factory.mktemp("slot"), gpu=GPU_SHARE) as slot:
        yield slot
