"""Kept prefixes on a fake block pool: they survive others' turns, and yield to what matters."""

from types import SimpleNamespace
from typing import Any

import pytest

from coserve.vllm.kv_reserve import KvReserve
from coserve.vllm.prefix_keeper import PrefixKeeper, trajectory_of
from harvester.contracts.wire.rollouts import ENDED_ARGUMENT
from tests.unit.coserve.vllm.fake_pool import (
    BLOCK_TOKENS,
    FakeEngine,
    FakePool,
    agents_in_a_flood,
    fake_request,
)

POOL_BLOCKS = 160


def engine_of(pool: FakePool, *, most_blocks: int) -> FakeEngine:
    keeper = PrefixKeeper(pool, tokens_per_block=BLOCK_TOKENS)
    return FakeEngine(pool, keeper, most_blocks, pool.cache)


@pytest.fixture
def pool() -> FakePool:
    return FakePool(POOL_BLOCKS)


@pytest.fixture
def engine(pool: FakePool) -> FakeEngine:
    return engine_of(pool, most_blocks=POOL_BLOCKS // 2)


def hashes(name: str, count: int) -> list[Any]:
    return [f"{name}.{block}" for block in range(count)]


def test_prefixes_of_open_trajectories_survive_a_flood_of_single_turns() -> None:
    by_age = agents_in_a_flood(engine_of(FakePool(POOL_BLOCKS), most_blocks=0))
    kept = agents_in_a_flood(engine_of(FakePool(POOL_BLOCKS), most_blocks=POOL_BLOCKS // 2))
    # Kept by age, all prefixes fall to the flood: four trajectories compute 3, 6, 9 ... blocks. Two
    # floods teach that single turns do not come back; from then on only new blocks are computed.
    assert by_age == 4 * (3 + 6 + 9 + 12 + 15 + 18)
    assert kept == 4 * (3 + 6 + 9 + 3 + 3 + 3)


def test_retained_prefixes_stay_within_their_bound(pool: FakePool) -> None:
    engine = engine_of(pool, most_blocks=10)
    for number in range(6):
        engine.turn(f"t{number}", hashes(f"t{number}", 4), now=float(number))
        assert engine.keeper.tokens <= 10 * BLOCK_TOKENS
    assert engine.keeper.tokens == 8 * BLOCK_TOKENS
    assert engine.keeper.tokens_dropped_total == 16 * BLOCK_TOKENS


def test_a_prefix_is_the_next_turn_s_own_once_it_steps(pool: FakePool, engine: FakeEngine) -> None:
    engine.turn("t", hashes("t", 4), now=0.0)
    following = fake_request("r", "t", hashes("t", 6))
    engine.keeper.arrive(following, now=1.0)
    engine.keeper.stepped([], open_requests=["r"], now=1.0)
    assert engine.keeper.tokens == 4 * BLOCK_TOKENS, "it waits for its first step"
    engine.keeper.stepped(["r"], open_requests=["r"], now=1.0)
    assert (engine.keeper.tokens, engine.keeper.tokens_used_total) == (0, 4 * BLOCK_TOKENS)
    assert pool.get_num_free_blocks() == POOL_BLOCKS


def test_a_turn_that_goes_without_a_step_leaves_the_prefix_kept(engine: FakeEngine) -> None:
    engine.turn("t", hashes("t", 4), now=0.0)
    engine.keeper.arrive(fake_request("r", "t", hashes("t", 6)), now=1.0)
    engine.keeper.stepped(["another"], open_requests=["another"], now=1.0)
    assert engine.keeper.tokens == 4 * BLOCK_TOKENS
    engine.turn("t", hashes("t", 6), now=2.0)
    assert engine.prefilled["t"] == 6


def test_running_requests_find_room_before_anything_is_kept(
    pool: FakePool, engine: FakeEngine
) -> None:
    for number in range(3):
        engine.turn(f"t{number}", hashes(f"t{number}", 20), now=float(number))
    assert pool.get_num_free_blocks() == POOL_BLOCKS - 60
    engine.keeper.make_room(POOL_BLOCKS - 45, now=3.0)
    assert pool.get_num_free_blocks() == POOL_BLOCKS - 40, "the oldest went, and no more than it"
    assert pool.get_cached_block("t0.19", [0]), "and is still in the engine's own cache"


def test_production_s_claim_takes_what_is_cached_then_what_is_kept_of_least_worth(
    pool: FakePool, engine: FakeEngine
) -> None:
    reserve = KvReserve(pool, tokens_per_block=BLOCK_TOKENS)
    for number in range(3):
        engine.turn(f"t{number}", hashes(f"t{number}", 20), now=float(number))
    halved = POOL_BLOCKS // 2 * BLOCK_TOKENS
    assert reserve.keep_within(halved) == 0
    assert engine.keeper.tokens == 60 * BLOCK_TOKENS, "all survive: free blocks were enough"
    assert reserve.blocks_usable == POOL_BLOCKS // 2
    short = reserve.keep_within(halved // 2)
    assert short == 20 * BLOCK_TOKENS
    engine.keeper.make_room(short // BLOCK_TOKENS, now=3.0)
    assert reserve.keep_within(halved // 2) == 0
    assert engine.keeper.tokens == 40 * BLOCK_TOKENS
    assert pool.get_cached_block("t0.0", [0]) is None, "the oldest went"
    assert pool.get_cached_block("t2.19", [0])


def test_a_new_version_finds_nothing_in_use(pool: FakePool, engine: FakeEngine) -> None:
    engine.turn("t", hashes("t", 4), now=0.0)
    engine.keeper.drop_all()
    assert (engine.keeper.tokens, pool.get_num_free_blocks()) == (0, POOL_BLOCKS)


def test_the_prefix_of_a_trajectory_that_is_reported_ended_goes_at_once(
    pool: FakePool, engine: FakeEngine
) -> None:
    for name in ("t", "u"):
        engine.turn(name, hashes(name, 4), now=0.0)
    request = fake_request("r", "v", hashes("v", 2))
    request.sampling_params.extra_args[ENDED_ARGUMENT] = ["t", "never seen", 7]
    engine.keeper.arrive(request, now=1.0)
    assert engine.keeper.tokens == 4 * BLOCK_TOKENS, "of the trajectory that goes on"
    assert pool.get_cached_block("t.3", [0]), "and what went is in the engine's own cache by age"
    engine.turn("t", hashes("t", 5), now=2.0)
    assert engine.prefilled["t"] == 5, "a name that comes back all the same is a trajectory again"


def test_another_salt_is_another_prefix(engine: FakeEngine) -> None:
    engine.turn("t", hashes("version 1", 4), now=0.0)
    engine.turn("t", hashes("version 2", 4), now=1.0)
    assert engine.prefilled["t"] == 8
    assert engine.keeper.tokens == 4 * BLOCK_TOKENS, "of the newest turn"
    counted = (engine.keeper.tokens_used_total, engine.keeper.tokens_dropped_total)
    assert counted == (0, 4 * BLOCK_TOKENS)


def test_a_context_that_leaves_the_prefix_half_way_uses_half(engine: FakeEngine) -> None:
    engine.turn("t", hashes("t", 4), now=0.0)
    engine.turn("t", [*hashes("t", 2), *hashes("other", 4)], now=1.0)
    assert engine.prefilled["t"] == 4 + 4
    counted = (engine.keeper.tokens_used_total, engine.keeper.tokens_dropped_total)
    assert counted == (2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)


def test_requests_without_a_trajectory_are_left_to_the_engine(
    pool: FakePool, engine: FakeEngine
) -> None:
    for extra in (None, {}, {"rosemux_trajectory": 7}):
        request = fake_request("r", "t", [])
        request.sampling_params.extra_args = extra
        assert trajectory_of(request) is None
    assert trajectory_of(SimpleNamespace(sampling_params=None)) is None
    engine.keeper.leave(request, most_blocks=9, now=0.0)
    assert engine.keeper.tokens == 0
