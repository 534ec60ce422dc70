"""The device that steps run on: a CUDA GPU with its steps in graphs, or the CPU with the same code.

On the CPU nothing is captured: a step is the call of its work. Everything that only CUDA has stands
in this file, so that the rehearsal on a CPU runs the rest.
"""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
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
        # Graphs run one at a time and keep nothing in the pool: they share its scratch memory.
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

        # A graph is uploaded with its first launch.
        replay()
        self.synchronize()
        return replay

    def synchronize(self) -> None:
        self._stream.synchronize()

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)


@dataclass(frozen=True, slots=True)
class KnownDevice(CpuDevice):
    """A device with a known answer, to check the measurement: all steps last equally long.

    With `turns` the processes that name the file run one at a time, in turns of `turn_s`; turns as
    long as a step preempt nothing. Without it steps run side by side.
    """

    turns: Path | None = None
    turn_s: float = 0.02
    step_s: float = 0.02

    def captured(self, work: Work) -> Work:
        work()

        def step() -> None:
            left_s = self.step_s
            while left_s > 1e-6:
                with self._turn():
                    time.sleep(min(left_s, self.turn_s))
                left_s -= self.turn_s

        return step

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self.turns is None:
            yield
            return
        # First come, first served, and no time between two turns: a process that waits holds the
        # place behind the turn, so the last holder cannot take the next turn before it.
        with self.turns.open("ab") as turn:
            with self.turns.with_suffix(".next").open("ab") as place:
                fcntl.flock(place, fcntl.LOCK_EX)
                fcntl.flock(turn, fcntl.LOCK_EX)
            yield


def device_of(kind: str) -> Device:
    """`cuda` or `cpu`; known devices are `turns:FILE`, `short_turns:FILE` and `apart`."""
    name, _, file = kind.partition(":")
    if name == "cuda":
        return CudaDevice()
    if name == "apart":
        return KnownDevice()
    if name in ("turns", "short_turns"):
        return KnownDevice(Path(file), turn_s=0.002 if name == "short_turns" else 0.02)
    return CpuDevice()
