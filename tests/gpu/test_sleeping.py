"""Sleeping weights release their memory, and are bit-identical once awake."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.gpu_slot.device import device_of
from benchmarks.gpu_slot.sleeping.cuda_virtual_memory import cuda_virtual_memory
from benchmarks.gpu_slot.sleeping.pieces import SleepingPieces
from benchmarks.gpu_slot.sleeping.virtual_memory import CpuVirtualMemory, VirtualMemory

_PIECES = 4
_GRANULES = 8
"""Granules of memory per piece: 16 MiB on a GPU."""


@contextmanager
def _pieces(device: str) -> Iterator[SleepingPieces]:
    used = device_of(device)
    with used.current():
        memory: VirtualMemory = cuda_virtual_memory() if device == "cuda" else CpuVirtualMemory()
        sizes = [_GRANULES * memory.granularity_bytes] * _PIECES
        host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device == "cuda")
        try:
            yield SleepingPieces(memory, used.torch_device, sizes, host)
        finally:
            memory.close()


def test_weights_are_whole_after_every_sleep(device: str) -> None:
    with _pieces(device) as pieces:
        for _ in range(3):
            pieces.fall_asleep()
            pieces.wake()
            assert pieces.damaged() == []


def test_a_bit_that_changes_while_they_sleep_is_found(device: str) -> None:
    with _pieces(device) as pieces:
        pieces.fall_asleep()
        pieces.host[pieces.sizes_bytes[0]] ^= 1
        pieces.wake()
        assert pieces.damaged() == [1]


def test_asleep_their_memory_is_free(device: str) -> None:
    if device == "cpu":
        pytest.skip("the host's free memory is everybody's")
    with _pieces(device) as pieces:
        awake_bytes = device_of(device).free_bytes()
        pieces.fall_asleep()
        assert device_of(device).free_bytes() - awake_bytes == pieces.size_bytes
        pieces.wake()
