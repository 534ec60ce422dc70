"""A guest's KV budget over a block pool with the rules of vLLM's."""

from dataclasses import dataclass

import pytest

from coserve.vllm.kv_reserve import KvReserve

PER_BLOCK = 16


@dataclass
class Block:
    block_id: int


class Pool:
    """Ten blocks and the null block; those at the front of the queue go first."""

    num_gpu_blocks = 11

    def __init__(self) -> None:
        self.free = [Block(number) for number in range(1, 11)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Block]:
        assert count <= len(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def free_blocks(self, blocks: list[Block]) -> None:
        self.free = [*blocks, *self.free]


@dataclass
class Scene:
    pool: Pool
    reserve: KvReserve
    returned: list[int]


@pytest.fixture
def scene() -> Scene:
    pool, returned = Pool(), []

    def give_back(blocks: list[int], total: int) -> None:
        assert total == pool.num_gpu_blocks
        returned.extend(blocks)

    return Scene(pool, KvReserve(pool, tokens_per_block=PER_BLOCK, give_back=give_back), returned)


def test_a_young_engine_gives_back_its_unused_memory(scene: Scene) -> None:
    in_use = scene.pool.get_new_blocks(2)
    scene.reserve.give_back_unused()
    assert sorted(scene.returned) == list(range(3, 11))
    assert (scene.pool.get_num_free_blocks(), scene.reserve.tokens_withheld) == (8, 0)
    assert not {block.block_id for block in in_use} & set(scene.returned)
    static = KvReserve(scene.pool, tokens_per_block=PER_BLOCK)
    static.give_back_unused()
    assert scene.pool.get_num_free_blocks() == 8


def test_without_a_budget_nothing_is_withheld(scene: Scene) -> None:
    assert scene.reserve.keep_within(None) == 0
    assert (scene.reserve.tokens_total, scene.reserve.tokens_withheld) == (160, 0)
    assert scene.returned == []


def test_a_budget_leaves_whole_blocks_and_returns_the_rest(scene: Scene) -> None:
    assert scene.reserve.keep_within(4 * PER_BLOCK + 5) == 0
    assert scene.reserve.tokens_withheld == 6 * PER_BLOCK
    assert scene.reserve.tokens_held == 0
    assert scene.pool.get_num_free_blocks() == 4
    assert scene.returned == [1, 2, 3, 4, 5, 6]


def test_a_larger_budget_gives_blocks_back_to_requests(scene: Scene) -> None:
    scene.reserve.keep_within(0)
    assert scene.reserve.keep_within(3 * PER_BLOCK) == 0
    assert scene.pool.get_num_free_blocks() == 3
    assert scene.reserve.keep_within(None) == 0
    assert scene.pool.get_num_free_blocks() == 10


def test_memory_of_requests_is_reported_and_taken_once_it_is_free(scene: Scene) -> None:
    held = scene.pool.get_new_blocks(7)
    assert scene.reserve.tokens_held == 7 * PER_BLOCK
    assert scene.reserve.keep_within(2 * PER_BLOCK) == 5 * PER_BLOCK
    scene.pool.free_blocks(held)
    assert scene.reserve.keep_within(2 * PER_BLOCK) == 0
    assert scene.pool.get_num_free_blocks() == 2
    assert len(scene.returned) == len(set(scene.returned)) == 8


def test_a_budget_beyond_the_pool_is_the_pool(scene: Scene) -> None:
    assert scene.reserve.keep_within(10**9) == 0
    assert scene.reserve.tokens_withheld == 0


def test_while_released_every_block_is_free_and_then_the_budget_holds_again(scene: Scene) -> None:
    scene.reserve.keep_within(2 * PER_BLOCK)

    def drop_prefixes() -> bool:
        assert scene.pool.get_num_free_blocks() == 10
        scene.pool.free.reverse()
        return True

    assert scene.reserve.released(drop_prefixes) is True
    assert scene.pool.get_num_free_blocks() == 2
    assert {block.block_id for block in scene.pool.free} <= set(scene.returned)
    assert set(range(1, 11)) - {block.block_id for block in scene.pool.free} <= set(scene.returned)


def test_without_a_worker_that_returns_pages_the_budget_holds_all_the_same() -> None:
    pool = Pool()
    reserve = KvReserve(pool, tokens_per_block=PER_BLOCK)
    assert reserve.keep_within(PER_BLOCK) == 0
    assert pool.get_num_free_blocks() == 1
