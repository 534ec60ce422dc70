"""The parts that a worker reports add up to the driver's figure for its process."""

import pytest

from harvester.contracts.page import GuestMemory
from tests.gpu.child import Child
from tests.gpu.fake_worker import (
    ACTIVATIONS_BYTES,
    GRAPH_BYTES,
    KV_BYTES,
    MIB,
    WEIGHTS_BYTES,
)

SEGMENT_BYTES = 20 * MIB
"""torch requests small tensors' memory from the driver in segments of at most this size."""
CONTEXT_BYTES = (32 * MIB, 4096 * MIB)
"""Plausible sizes of CUDA's context with its loaded code."""


def test_a_worker_s_parts_have_their_sizes_and_the_driver_s_sum(device: str) -> None:
    with Child(device) as worker:
        worker.ask("hold")
        said = worker.ask("report")
    memory = GuestMemory(**said["memory"])
    assert (memory.weights_bytes, memory.kv_bytes) == (WEIGHTS_BYTES, KV_BYTES)
    if device == "cpu":
        assert memory == GuestMemory(weights_bytes=WEIGHTS_BYTES, kv_bytes=KV_BYTES)
        return
    assert GRAPH_BYTES <= memory.graphs_bytes <= GRAPH_BYTES + SEGMENT_BYTES
    above = memory.activations_bytes - ACTIVATIONS_BYTES
    assert 0 <= above <= SEGMENT_BYTES
    parts = memory.weights_bytes + memory.kv_bytes + memory.graphs_bytes
    assert parts + memory.activations_bytes == said["reserved_bytes"]
    if said["driver_bytes"] is None:
        assert not memory.whole
        pytest.skip("the driver counts processes in another pid namespace")
    assert memory.whole
    assert memory.floor_bytes + memory.kv_bytes == said["driver_bytes"]
    least, most = CONTEXT_BYTES
    assert least <= memory.other_bytes <= most
