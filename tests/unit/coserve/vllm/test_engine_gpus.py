"""GPUs of an engine's ranks, from a configuration with vLLM's fields and a fake driver."""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.vllm import engine_gpus, pulse_reporter
from coserve.vllm.pulse_reporter import shape_of
from harvester.contracts.page import MOST_GPUS
from tests.unit.coserve.vllm.test_deployment import ALONE

ON_NODE = [f"GPU-{number:08x}-1111-2222-3333-444444444444" for number in range(24)]
NOT_SUPPORTED = 3


class FakeNvmlPlatform:
    """Devices of a process that sees some of the node's GPUs, as vLLM numbers them."""

    def __init__(self, *seen: str) -> None:
        self.seen = seen

    def get_device_uuid(self, device: int) -> str:
        return self.seen[device]


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class FakeNvml:
    """NVML of a node some of whose GPUs are divided by MIG; `models` are its GPUs' names."""

    def __init__(
        self,
        sliced: tuple[str, ...] = (),
        faults: dict[str, int] | None = None,
        models: tuple[str, ...] = ("H100", "H100"),
    ) -> None:
        self.sliced, self.faults, self.models, self.open = sliced, faults or {}, models, 0

    def module(self) -> SimpleNamespace:
        """The functions under the names of the bindings."""
        return SimpleNamespace(
            NVMLError=NvmlError,
            NVML_ERROR_NOT_SUPPORTED=NOT_SUPPORTED,
            nvmlInit=partial(self._count, 1),
            nvmlShutdown=partial(self._count, -1),
            nvmlDeviceGetCount=lambda: len(self.models),
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetName=lambda index: self.models[index],
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetMigMode=self._mig_mode,
        )

    def _count(self, change: int) -> None:
        self.open += change

    def _mig_mode(self, handle: str) -> tuple[int, int]:
        if handle in self.faults:
            raise NvmlError(self.faults[handle])
        return int(handle in self.sliced), 0


Sees = Callable[..., FakeNvml]


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch) -> Sees:
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def see(*uuids: str, nvml: FakeNvml | None = None) -> FakeNvml:
        library = nvml or FakeNvml()
        platform = FakeNvmlPlatform(*uuids) if uuids else None
        monkeypatch.setattr(engine_gpus, "nvml_platform", lambda: platform)
        third_party = SimpleNamespace(pynvml=library.module())
        monkeypatch.setitem(sys.modules, "vllm.third_party", third_party)
        return library

    return see


def parallel(ranks: int = 1, **fields: Any) -> Any:
    given = {"world_size": ranks, "data_parallel_size_local": 1, "data_parallel_rank_local": None}
    return SimpleNamespace(**(given | fields))


def test_ranks_run_on_the_first_devices_that_the_engine_sees(sees: Sees) -> None:
    """A pod sees the GPUs that the node's device plugin gave it, from number 0 on."""
    library = sees(*ON_NODE[2:6])
    assert engine_gpus.engine_gpus(parallel()) == (ON_NODE[2],)
    assert engine_gpus.engine_gpus(parallel(4)) == tuple(ON_NODE[2:6])
    assert library.open == 0


def test_data_parallel_ranks_have_devices_of_their_own(sees: Sees) -> None:
    sees(*ON_NODE[:8])
    assert engine_gpus.engine_gpus(parallel(2, data_parallel_size_local=3)) == tuple(ON_NODE[:6])
    assert engine_gpus.engine_gpus(parallel(2, data_parallel_rank_local=1)) == tuple(ON_NODE[2:4])


def test_nothing_is_stated_on_a_cpu(sees: Sees) -> None:
    sees()
    assert engine_gpus.engine_gpus(parallel()) == ()


def test_nothing_is_stated_where_it_could_be_another_device(sees: Sees) -> None:
    sees(*ON_NODE[:2])
    assert engine_gpus.engine_gpus(parallel(assigned_physical_gpu_ids=[1])) == ()
    assert engine_gpus.engine_gpus(parallel(3)) == (), "the engine itself would not start"
    assert engine_gpus.engine_gpus(SimpleNamespace()) == (), "upstream renamed its fields"
    sees(*ON_NODE[:2], nvml=FakeNvml(sliced=(ON_NODE[1],)))
    assert engine_gpus.engine_gpus(parallel(2)) == (), "a slice of MIG"
    assert engine_gpus.engine_gpus(parallel(1)) == (ON_NODE[0],)
    sees(*ON_NODE[:2], nvml=FakeNvml(faults={ON_NODE[0]: NOT_SUPPORTED}))
    assert engine_gpus.engine_gpus(parallel(1)) == (ON_NODE[0],), "a GPU that has no MIG"
    sees(*ON_NODE[:2], nvml=FakeNvml(faults={ON_NODE[0]: 999}))
    assert engine_gpus.engine_gpus(parallel(1)) == (), "a driver that does not say"


@pytest.mark.parametrize(
    ("models", "environment", "stated"),
    [
        (("T4", "H100"), {}, False),
        (("T4", "H100"), {"CUDA_VISIBLE_DEVICES": "1,0"}, False),
        (("T4", "H100"), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, False),
        (("T4", "H100"), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
        (("T4", "H100"), {"CUDA_VISIBLE_DEVICES": f"{ON_NODE[0]}, {ON_NODE[1]}"}, True),
        (("T4", "H100"), {"CUDA_VISIBLE_DEVICES": f"1,{ON_NODE[1]}"}, False),
        (("H100", "H100"), {"CUDA_VISIBLE_DEVICES": "1"}, True),
        (("H100",), {}, True),
        (("H100",), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, False),
        (("H100",), {"CUDA_VISIBLE_DEVICES": "MIG-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
    ],
)
def test_nothing_is_stated_where_cuda_may_number_the_gpus_otherwise(
    sees: Sees,
    monkeypatch: pytest.MonkeyPatch,
    models: tuple[str, ...],
    environment: dict[str, str],
    stated: bool,
) -> None:
    """CUDA's number 0 is the fastest GPU, and NVML's the first on the bus."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library = sees(*ON_NODE[:2], nvml=FakeNvml(models=models))
    assert bool(engine_gpus.engine_gpus(parallel())) is stated
    assert library.open == 0


def test_no_more_are_stated_than_a_page_has_room_for(sees: Sees) -> None:
    sees(*ON_NODE)
    assert len(engine_gpus.engine_gpus(parallel(MOST_GPUS))) == MOST_GPUS
    assert engine_gpus.engine_gpus(parallel(MOST_GPUS + 1)) == ()


def test_an_engine_states_its_gpus_unless_no_guest_may_run_beside_it(
    sees: Sees, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees(*ON_NODE[:2])
    monkeypatch.setattr(pulse_reporter, "_accelerator", lambda: "H100")
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            **(ALONE | vars(parallel(2)) | {"_api_process_count": 1, "_api_process_rank": 0}),
            data_parallel_external_lb=False,
            data_parallel_rank=0,
        ),
    )
    assert shape_of(config).gpus == tuple(ON_NODE[:2])
    config.parallel_config.nnodes = 2
    assert shape_of(config).unfit
    assert shape_of(config).gpus == ()
