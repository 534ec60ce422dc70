"""Planes of a KV cache's blocks, in the layouts of vLLM versions."""

import pytest

torch = pytest.importorskip("torch")

from coserve.guest.kv_pages import Plane  # noqa: E402
from coserve.vllm.kv_worker import planes_of  # noqa: E402

BLOCKS, HEADS, TOKENS, WIDTH = 9, 2, 32, 64
BLOCK_BYTES = HEADS * TOKENS * WIDTH * 2


def test_keys_and_values_apart_are_two_planes() -> None:
    cache = torch.zeros(2, BLOCKS, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    start = cache.data_ptr()
    assert planes_of([cache], BLOCKS) == [
        Plane(start, BLOCK_BYTES, BLOCK_BYTES),
        Plane(start + BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES),
    ]


def test_layers_of_one_allocation_are_planes_of_their_own() -> None:
    buffer = torch.zeros(3 * BLOCKS * HEADS * TOKENS * WIDTH, dtype=torch.bfloat16)
    layers = buffer.view(3, BLOCKS, HEADS, TOKENS, WIDTH).unbind(0)
    planes = planes_of(layers, BLOCKS)
    assert [plane.address - buffer.data_ptr() for plane in planes] == [
        layer * BLOCKS * BLOCK_BYTES for layer in range(3)
    ]


def test_layers_that_take_turns_within_a_block_s_stride_own_their_part_of_it() -> None:
    buffer = torch.zeros(BLOCKS, 3, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    (plane, *_) = planes_of([buffer[:, 1]], BLOCKS)
    assert plane == Plane(buffer.data_ptr() + BLOCK_BYTES, 3 * BLOCK_BYTES, BLOCK_BYTES)


def test_a_tensor_with_unknown_blocks_is_left_alone() -> None:
    assert planes_of([torch.zeros(2, 2, TOKENS)], 2) == []
    assert planes_of([torch.zeros(2, 5, TOKENS)], BLOCKS) == []
