"""A GPU's virtual memory over a fake driver: the calls, their order and their failures."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu_slot import cuda_driver  # noqa: E402
from benchmarks.gpu_slot.cuda_driver import checked  # noqa: E402
from benchmarks.gpu_slot.sleeping.cuda_virtual_memory import CudaVirtualMemory  # noqa: E402
from benchmarks.gpu_slot.sleeping.pieces import SleepingPieces  # noqa: E402
from benchmarks.gpu_slot.sleeping.virtual_memory import CpuVirtualMemory  # noqa: E402
from harvester.contracts.errors import Unsupported  # noqa: E402

PAGE = CpuVirtualMemory().granularity_bytes
STREAM = 77


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_PERMITTED = 800


class FakeDriver:
    """The part of cuda.bindings.driver that is called, over pages of the host."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED="virtual",
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED="rdma",
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.memory = CpuVirtualMemory()
        self.virtual = 1
        self.gives_rdma = True
        self.rdma = -1
        self.room_bytes = 1 << 30
        self.asked: list[str] = []
        self.created: dict[str, int] = {}
        self.freed: list[tuple[int, int]] = []

    def CUmemAllocationProp(self) -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:  # noqa: N802
        return CUresult.CUDA_SUCCESS, self.virtual if attribute == "virtual" else 1

    def cuMemGetAllocationGranularity(self, asked: Any, option: int) -> Any:  # noqa: N802
        assert (asked.type, asked.location.type, asked.location.id) == (1, 1, 0)
        return CUresult.CUDA_SUCCESS, PAGE

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, address: int, flags: int
    ) -> Any:
        return CUresult.CUDA_SUCCESS, self.memory.reserve(size)

    def cuMemCreate(self, size: int, asked: Any, flags: int) -> Any:  # noqa: N802
        self.asked.append("create")
        self.rdma = asked.allocFlags.gpuDirectRDMACapable
        if self.rdma and not self.gives_rdma:
            return CUresult.CUDA_ERROR_NOT_PERMITTED, None
        if sum(self.created.values()) + size > self.room_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        handle = f"handle {len(self.asked)}"
        self.created[handle] = size
        return CUresult.CUDA_SUCCESS, handle

    def cuMemMap(  # noqa: N802
        self, address: int, size: int, offset: int, handle: str, flags: int
    ) -> Any:
        assert self.created[handle] == size
        self.asked.append("map")
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, asked: list[Any], count: int) -> Any:  # noqa: N802
        assert (count, asked[0].flags, asked[0].location.id) == (1, 3, 0)
        self.asked.append("access")
        self.memory.map(address)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> Any:  # noqa: N802
        self.asked.append("unmap")
        self.memory.unmap(address)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: str) -> Any:  # noqa: N802
        self.asked.append("release")
        del self.created[handle]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> Any:  # noqa: N802
        self.freed.append((address, size))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyAsync(self, to: int, source: int, size: int, stream: int) -> Any:  # noqa: N802
        assert stream == STREAM
        self.asked.append("copy")
        self.memory.copy(to=to, source=source, size_bytes=size)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        assert stream == STREAM
        self.asked.append("wait")
        return (CUresult.CUDA_SUCCESS,)


def test_a_piece_sleeps_and_wakes_by_the_calls_of_vllm_s_allocator() -> None:
    fake = FakeDriver()
    memory = CudaVirtualMemory(fake, STREAM)
    assert memory.granularity_bytes == PAGE
    assert memory.rdma
    host = torch.zeros(3 * PAGE, dtype=torch.uint8)
    pieces = SleepingPieces(memory, torch.device("cpu"), [PAGE, 2 * PAGE], host)
    fake.asked.clear()
    asleep = pieces.fall_asleep()
    assert fake.asked == ["copy", "wait", "unmap", "release"] * 2
    assert not fake.created, "asleep, nothing is behind the addresses"
    fake.asked.clear()
    awake = pieces.wake()
    assert fake.asked == ["create", "map", "access", "copy", "wait"] * 2
    assert pieces.damaged() == []
    assert asleep.calls.keys() == {"copy", "cuMemUnmap", "cuMemRelease"}
    assert awake.calls.keys() == {"copy", "cuMemCreate", "cuMemMap", "cuMemSetAccess"}
    memory.close()
    assert not fake.created
    assert fake.rdma == 1
    assert sorted(size for _, size in fake.freed) == [PAGE, 2 * PAGE]


def test_a_call_that_fails_is_named_with_its_result() -> None:
    fake = FakeDriver()
    fake.room_bytes = PAGE
    memory = CudaVirtualMemory(fake, STREAM)
    with pytest.raises(RuntimeError, match=r"cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        memory.map(memory.reserve(2 * PAGE))
    assert checked(fake, "cuStreamSynchronize", STREAM) is None


def test_memory_for_rdma_is_requested_only_where_the_device_has_it() -> None:
    fake = FakeDriver()
    fake.gives_rdma = False
    memory = CudaVirtualMemory(fake, STREAM)
    assert not memory.rdma
    memory.map(memory.reserve(PAGE))
    assert fake.rdma == 0


def test_a_missing_virtual_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeDriver()
    fake.virtual = 0
    with pytest.raises(Unsupported, match="no virtual memory management"):
        CudaVirtualMemory(fake, STREAM)

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(cuda_driver.importlib, "import_module", absent)
    with pytest.raises(Unsupported, match="cuda-bindings"):
        cuda_driver.driver()
