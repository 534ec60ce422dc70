"""The worker's half of a guest's memory; vLLM's `--worker-extension-cls`.

The scheduler decides which blocks stay unused; the tensors are the worker's, in another process.
Pages are returned on a CPU only; on a GPU the worker reports its memory.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch

from coserve.guest.kv_pages import Plane, give_back, whole_pages
from coserve.law.work_gate import WorkGate
from coserve.vllm.environment import work_gate
from coserve.vllm.memory_report import report
from coserve.vllm.residency import follow_updates


class KvPages:
    """Mixed into vLLM's worker, so its names must not collide with the worker's."""

    model_runner: Any
    device: Any

    def rosemux_give_back(self, blocks: list[int], total: int) -> int:
        """Return the pages of these blocks, of the pool's `total`, to the system. Returns bytes."""
        return give_back(whole_pages(self._rosemux_planes(total), blocks))

    def rosemux_pid(self) -> int:
        return os.getpid()

    def rosemux_memory(self) -> dict[str, Any]:
        """`GuestMemory` of this worker as builtins, which vLLM's own calls can carry."""
        builtins: dict[str, Any] = msgspec.to_builtins(report(self))
        return builtins

    def rosemux_pace(self) -> None:
        """Pace this worker's weight work from now on: each piece asks the slot for slack."""
        paced_by = getattr(getattr(self, "weight_transfer_engine", None), "paced_by", None)
        if paced_by is not None:
            paced_by(self._rosemux_gate)

    def rosemux_follow_updates(self) -> None:
        """Accept new versions while this worker sleeps."""
        follow_updates(self, self._rosemux_gate)

    @cached_property
    def _rosemux_gate(self) -> WorkGate:
        return work_gate(on_host=torch.device(self.device).type == "cpu")

    def _rosemux_planes(self, total: int) -> list[Plane]:
        planes = getattr(self, "_rosemux_known_planes", None)
        if planes is None:
            planes = planes_of(self.model_runner.kv_caches, total)
            self._rosemux_known_planes = planes
        return planes


def planes_of(tensors: Sequence[torch.Tensor], total: int) -> list[Plane]:
    """Planes in which the blocks of these KV caches lie; a tensor of unknown layout is left out.

    Which dimension counts blocks differs by vLLM version, and in some versions layers share one
    allocation; the tensor's strides decide.
    """
    found = [plane for tensor in tensors for plane in _planes(tensor, total)]
    return sorted(set(found), key=lambda plane: plane.address)


def _planes(tensor: torch.Tensor, total: int) -> list[Plane]:
    axes = [axis for axis, size in enumerate(tensor.shape) if size == total]
    if len(axes) != 1 or tensor.device.type != "cpu":
        return []
    block_stride, element = tensor.stride(axes[0]), tensor.element_size()
    starts, block_elements = [0], 1
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if axis in axes:
            continue
        if stride < block_stride:
            block_elements += (size - 1) * stride
        else:
            starts = [start + index * stride for start in starts for index in range(size)]
    first = tensor.data_ptr()
    return [
        Plane(first + start * element, block_stride * element, block_elements * element)
        for start in starts
    ]
