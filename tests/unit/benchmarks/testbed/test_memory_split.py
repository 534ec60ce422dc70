"""Two 8B engines on cards on sale; the sizes are nvidia-smi's."""

import pytest

from benchmarks.testbed.memory_split import (
    GIB,
    GUEST_KV_BYTES_MAX,
    KV_BYTES_MIN,
    WORKSPACE_BYTES,
    GpuMemory,
    beside,
    side_by_side,
)
from benchmarks.testbed.production_model import EIGHT_BILLION
from harvester.contracts.errors import Unsupported

MIB = 1 << 20
H200_MIB, H100_MIB, L40S_MIB, L4_MIB = 143_771, 81_559, 46_068, 23_034


def card(mib: int, *, taken_mib: int = 600) -> GpuMemory:
    return GpuMemory(total_bytes=mib * MIB, free_bytes=(mib - taken_mib) * MIB)


def test_the_models_weights_are_those_of_eight_billion_parameters() -> None:
    assert EIGHT_BILLION.weights_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert EIGHT_BILLION.kv_bytes_per_token == 131_072


@pytest.mark.parametrize("mib", [H200_MIB, H100_MIB])
def test_production_has_half_and_the_guest_fits_beside_it(mib: int) -> None:
    memory = card(mib)
    part = beside(memory, EIGHT_BILLION)
    assert part.production_ratio == 0.5
    production = int(part.production_ratio * memory.total_bytes) + WORKSPACE_BYTES
    guest = EIGHT_BILLION.weights_bytes + WORKSPACE_BYTES + part.guest_kv_bytes
    assert production + guest <= memory.total_bytes
    assert KV_BYTES_MIN <= part.guest_kv_bytes <= GUEST_KV_BYTES_MAX


def test_a_large_cards_guest_takes_what_it_uses_and_a_smaller_ones_what_is_left() -> None:
    assert beside(card(H200_MIB), EIGHT_BILLION).guest_kv_bytes == 24 * GIB
    left = beside(card(H100_MIB), EIGHT_BILLION).guest_kv_bytes
    assert 16 * GIB < left < 18 * GIB


@pytest.mark.parametrize("mib", [L4_MIB, L40S_MIB])
def test_a_card_that_is_too_small_is_refused_with_what_is_needed(mib: int) -> None:
    with pytest.raises(Unsupported, match=r"production and a guest .* need 54 GiB.*--hardware cpu"):
        beside(card(mib), EIGHT_BILLION)


def test_the_memory_named_as_needed_is_enough() -> None:
    part = beside(card(54 * 1024, taken_mib=0), EIGHT_BILLION)
    assert part.guest_kv_bytes >= KV_BYTES_MIN


def test_a_gpu_in_use_is_refused_with_the_way_to_its_user() -> None:
    with pytest.raises(Unsupported, match=r"60 GiB of the GPU's memory are free.*nvidia-smi"):
        beside(card(H200_MIB, taken_mib=H200_MIB - 60 * 1024), EIGHT_BILLION)


def test_three_engines_side_by_side_share_nine_tenths() -> None:
    assert side_by_side(card(H200_MIB), EIGHT_BILLION, engines=3) == pytest.approx(0.3)
    with pytest.raises(Unsupported, match="3 engines of 32 layers"):
        side_by_side(card(L40S_MIB), EIGHT_BILLION, engines=3)
