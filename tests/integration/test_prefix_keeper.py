"""Kept prefixes on vLLM's own block pool and request hashes. No engine runs."""

from typing import Any

import pytest

from coserve.vllm.kv_reserve import KvReserve
from coserve.vllm.prefix_keeper import PrefixKeeper
from tests.unit.coserve.vllm.fake_pool import (
    BLOCK_TOKENS,
    FakeEngine,
    agents_in_a_flood,
)

pytestmark = pytest.mark.engine

POOL_BLOCKS = 160


def pool_of(blocks: int) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(blocks + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS)


def engine_of(pool: Any, *, most_blocks: int) -> FakeEngine:
    def cache(request: Any, blocks: list[Any], cached: int) -> None:
        pool.cache_full_blocks(request, blocks, cached, len(blocks), BLOCK_TOKENS, 0)

    def hashed(name: str) -> bytes:
        return name.encode()

    keeper = PrefixKeeper(pool, tokens_per_block=BLOCK_TOKENS)
    return FakeEngine(pool, keeper, most_blocks, cache, hashed)


def test_retention_saves_prefills_in_vllm_s_own_pool_as_in_the_fake_one() -> None:
    by_age = agents_in_a_flood(engine_of(pool_of(POOL_BLOCKS), most_blocks=0))
    kept = agents_in_a_flood(engine_of(pool_of(POOL_BLOCKS), most_blocks=POOL_BLOCKS // 2))
    assert (kept, by_age) == (4 * 27, 4 * 63)


def test_a_shrink_takes_the_oldest_and_a_reset_finds_nothing_in_use() -> None:
    pool = pool_of(POOL_BLOCKS)
    engine = engine_of(pool, most_blocks=POOL_BLOCKS)
    reserve = KvReserve(pool, tokens_per_block=BLOCK_TOKENS)
    for number in range(3):
        context = [f"t{number}.{block}" for block in range(20)]
        engine.turn(f"t{number}", context, now=float(number))
    short = reserve.keep_within(40 * BLOCK_TOKENS)
    engine.keeper.make_room(short // BLOCK_TOKENS, now=3.0)
    assert reserve.keep_within(40 * BLOCK_TOKENS) == 0
    assert engine.keeper.tokens == 40 * BLOCK_TOKENS
    engine.keeper.drop_all()
    assert reserve.released(pool.reset_prefix_cache)


def test_vllm_hashes_equal_tokens_unlike_under_another_salt() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def last_hash(salt: str | None) -> Any:
        request = Request(
            "r",
            list(range(2 * BLOCK_TOKENS)),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        return request.block_hashes[-1]

    salts = (None, "job/1/", "job/2/", "job/2/adapter", "other/1/")
    assert len({last_hash(salt) for salt in salts}) == len(salts)
    assert last_hash("job/1/") == last_hash("job/1/")
