"""A GPU's memory by CUDA's virtual memory management: the driver's own calls, each one measured.

The calls, their order and their properties are those of vLLM's cumem allocator. They go to the
context that torch has made current in the calling thread.
"""

from typing import Any

import torch

from benchmarks.gpu_slot.cuda_driver import checked, driver
from benchmarks.gpu_slot.sleeping.virtual_memory import CallTimes
from harvester.contracts.errors import Unsupported

_VIRTUAL_MEMORY = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
_OLDER_NAME = "CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"
_RDMA = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"


def cuda_virtual_memory() -> "CudaVirtualMemory":
    """In torch's context and on its current stream.

    Raises Unsupported without cuda-bindings, or on a GPU without virtual memory.
    """
    library = driver()
    # A tensor makes torch's context the current one of this thread.
    torch.empty(1, device="cuda:0")
    return CudaVirtualMemory(library, torch.cuda.current_stream().cuda_stream)


class CudaVirtualMemory:
    """The first visible GPU, used by one thread. `stream` is the driver's handle of a stream."""

    def __init__(self, library: Any, stream: int) -> None:
        self._driver = library
        self._stream = stream
        self._calls = CallTimes()
        if not self._attribute(_VIRTUAL_MEMORY, _OLDER_NAME):
            raise Unsupported("this GPU has no virtual memory management")
        self._properties = properties(library, rdma=False)
        self._access = access(library)
        minimum = library.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", self._properties, minimum)
        self._granularity_bytes = int(granularity)
        for_rdma = properties(library, rdma=True)
        self.rdma = bool(self._attribute(_RDMA)) and self._creates(for_rdma)
        if self.rdma:
            self._properties = for_rdma
        self._sizes: dict[int, int] = {}
        self._handles: dict[int, Any] = {}
        self._calls.take()

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    @property
    def calls(self) -> CallTimes:
        return self._calls

    def reserve(self, size_bytes: int) -> int:
        address = int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))
        self._sizes[address] = size_bytes
        return address

    def map(self, address: int) -> None:
        size_bytes = self._sizes[address]
        handle = self._call("cuMemCreate", size_bytes, self._properties, 0)
        self._handles[address] = handle
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)
        self._call("cuMemSetAccess", address, size_bytes, [self._access], 1)

    def unmap(self, address: int) -> None:
        self._call("cuMemUnmap", address, self._sizes[address])
        self._call("cuMemRelease", self._handles.pop(address))

    def copy(self, *, to: int, source: int, size_bytes: int) -> None:
        # Addresses are unified: the driver sees from each what kind of memory it is.
        with self._calls.measured("copy"):
            self._checked("cuMemcpyAsync", to, source, size_bytes, self._stream)
            self._checked("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        for address in tuple(self._handles):
            self.unmap(address)
        while self._sizes:
            self._call("cuMemAddressFree", *self._sizes.popitem())

    def _creates(self, properties: Any) -> bool:
        """Whether the driver gives memory of this kind: some machines announce RDMA and refuse
        it."""
        code, handle = self._driver.cuMemCreate(self._granularity_bytes, properties, 0)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            return False
        self._checked("cuMemRelease", handle)
        return True

    def _attribute(self, *names: str) -> int:
        """The device's attribute, under the first of its names that the library has."""
        known = self._driver.CUdevice_attribute
        for name in names:
            if hasattr(known, name):
                device = self._call("cuDeviceGet", 0)
                return int(self._call("cuDeviceGetAttribute", getattr(known, name), device))
        return 0

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._calls.measured(name):
            return self._checked(name, *arguments)

    def _checked(self, name: str, *arguments: Any) -> Any:
        return checked(self._driver, name, *arguments)


def properties(library: Any, *, rdma: bool) -> Any:
    """Plain memory of the first GPU, as vLLM's cumem allocator asks for it."""
    properties = library.CUmemAllocationProp()
    properties.type = library.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = library.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.allocFlags.compressionType = 0
    properties.allocFlags.gpuDirectRDMACapable = int(rdma)
    return properties


def access(library: Any) -> Any:
    """Read and write by the first GPU."""
    properties = library.CUmemAccessDesc()
    properties.location.type = library.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.flags = library.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return properties
