"""The device that steps run on: a CUDA GPU with its steps in graphs, or the CPU with the same code.

On the CPU nothing is captured: a step is the call of its work. Everything that only CUDA has stands
in this file, so that the rehearsal on a CPU runs the rest.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch

Work = Callable[[], None]

_WARM_UPS = 3
"""Runs before a capture: libraries choose kernels and allocate workspaces in the first ones."""


class Device(Protocol):
    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def captured(self, work: Work) -> Work:
        """Launches `work` and returns; inputs and outputs stay where they are."""
        ...

    def synchronize(self) -> None:
        """Returns once everything launched by this device object has ended."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Within it, allocations and launches of the calling thread are this device's."""
        ...

    def free_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "CPU"

    def captured(self, work: Work) -> Work:
        work()
        return work

    def synchronize(self) -> None:
        """A call on the CPU has ended when it returns."""

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)


class CudaDevice:
    """The first visible GPU and one stream of it."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream` is one of its own unless it is given, as by a green context."""
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        self._stream = stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Graphs run one at a time and leave nothing in it: they share what they compute in.
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self._device))

    def captured(self, work: Work) -> Work:
        with self.current():
            for _ in range(_WARM_UPS):
                work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process allocate while a green context's graphs are captured.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        self.synchronize()

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def synchronize(self) -> None:
        self._stream.synchronize()

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)


def device_of(kind: str) -> Device:
    """`cuda` or `cpu`."""
    return CudaDevice() if kind == "cuda" else CpuDevice()
