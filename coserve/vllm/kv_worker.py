"""The worker's half of a guest's memory; vLLM's `--worker-extension-cls`.

The scheduler decides which blocks stay unused; the tensors are the worker's, in another process.
Pages go back on a CPU alone; on a GPU the worker says what it holds.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from coserve.guest.kv_pages import Plane, give_back, whole_pages
from coserve.law.work_gate import WorkGate
from coserve.vllm.environment import work_gate
from coserve.vllm.memory_report import report
from coserve.vllm.residency import follow_updates


class KvPages:
    """Mixed into vLLM's worker, whose names it must not repeat."""

    model_runner: Any
    device: Any

    def rosemux_give_back(self, blocks: list[int], total: int) -> int:
        """Return the pages of these of the pool's `total` blocks. Bytes."""
        return give_back(whole_pages(self._rosemux_planes(total), blocks))

    def rosemux_pid(self) -> int:
        return os.getpid()

    def rosemux_memory(self) -> dict[str, Any]:
        """Of `GuestMemory`, as what vLLM's own calls can carry."""
        said: dict[str, Any] = msgspec.to_builtins(report(self))
        return said

    def rosemux_pace(self) -> None:
        """From now on what this worker does with weights asks the slot for slack, in pieces."""
        paced_by = getattr(getattr(self, "weight_transfer_engine", None), "paced_by", None)
        if paced_by is not None:
            paced_by(self._rosemux_gate())

    def rosemux_follow_updates(self) -> None:
        """New versions come through while this worker sleeps."""
        follow_updates(self, self._rosemux_gate())

    def _rosemux_gate(self) -> WorkGate:
        gate = getattr(self, "_rosemux_work_gate", None)
        if gate is None:
            on_host = torch.device(self.device).type == "cpu"
            gate = self._rosemux_work_gate = work_gate(on_host=on_host)
        return gate

    def _rosemux_planes(self, total: int) -> list[Plane]:
        planes = getattr(self, "_rosemux_known_planes", None)
        if planes is None:
            planes = planes_of(self.model_runner.kv_caches, total)
            self._rosemux_known_planes = planes
        return planes


def planes_of(tensors: Sequence[torch.Tensor], total: int) -> list[Plane]:
    """Where the blocks of these KV caches lie; a tensor that cannot be read this way is left out.

    vLLM's layouts differ by version in which dimension counts blocks, and layers share one
    allocation in some; a tensor's strides tell.
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
