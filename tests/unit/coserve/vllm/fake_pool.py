"""A stand-in for vLLM's block pool and for a scheduler that runs whole turns on it.

Prefix blocks are found by hash, have users, and are given out by age once they have no user.
`tests/integration/test_prefix_keeper.py` plays the same on vLLM's own pool.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from coserve.vllm.prefix_keeper import PrefixKeeper
from harvester.contracts.wire.rollouts import TRAJECTORY_ARGUMENT

BLOCK_TOKENS = 16


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: Any = None


class FakePool:
    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks + 1
        self._free: OrderedDict[Block, None] = OrderedDict.fromkeys(
            Block(number) for number in range(1, blocks + 1)
        )
        self._cached: dict[Any, Block] = {}

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        assert num_blocks <= len(self._free)
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in taken:
            self._cached.pop(block.block_hash, None)
            block.block_hash, block.ref_cnt = None, 1
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block.block_hash is not None)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                del self._free[block]
            block.ref_cnt += 1

    def get_cached_block(
        self, block_hash: Any, kv_cache_group_ids: list[int]
    ) -> list[Block] | None:
        assert kv_cache_group_ids == [0]
        block = self._cached.get(block_hash)
        return None if block is None else [block]

    def cache(self, request: Any, blocks: list[Block], cached: int) -> None:
        """Cache full blocks, as vLLM does."""
        for block, block_hash in zip(blocks[cached:], request.block_hashes[cached:], strict=True):
            block.block_hash = block_hash
            self._cached.setdefault(block_hash, block)


def fake_request(name: str, trajectory: str, block_hashes: list[Any]) -> Any:
    extra = {TRAJECTORY_ARGUMENT: trajectory}
    sampling = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(request_id=name, sampling_params=sampling, block_hashes=block_hashes)


@dataclass
class FakeEngine:
    """Runs one turn at a time, in whole blocks."""

    pool: Any
    keeper: PrefixKeeper
    most_blocks: int
    cache: Callable[[Any, list[Any], int], None]
    """(request, its blocks, how many of them were cached)"""
    hashed: Callable[[str], Any] = str
    prefilled: dict[str, int] = field(default_factory=dict)
    """Blocks that a trajectory's turns had to compute."""

    def turn(self, trajectory: str, context: list[str], *, now: float) -> None:
        """A request whose context, output included, is these full blocks."""
        name, block_hashes = f"{trajectory}@{now}", [self.hashed(block) for block in context]
        request = fake_request(name, trajectory, block_hashes)
        self.keeper.arrive(request, now=now)
        hits: list[Any] = []
        for block_hash in block_hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits += found
        needed = len(block_hashes) - len(hits)
        self.keeper.make_room(needed, now=now)
        self.pool.touch(hits)
        blocks = [*hits, *self.pool.get_new_blocks(needed)]
        self.keeper.stepped([name], open_requests=[name], now=now)
        self.cache(request, blocks, len(hits))
        self.prefilled[trajectory] = self.prefilled.get(trajectory, 0) + needed
        self.pool.free_blocks(reversed(blocks))
        self.keeper.leave(request, most_blocks=self.most_blocks, now=now)


def agents_in_a_flood(engine: FakeEngine, *, trajectories: int = 4, turns: int = 6) -> int:
    """Multi-turn trajectories whose tools run while single turns flood the pool. Blocks that the
    trajectories computed."""
    now = 0.0
    for turn in range(1, turns + 1):
        for index in range(trajectories):
            now += 1.0
            context = [f"agent{index}.{block}" for block in range(3 * turn)]
            engine.turn(f"agent{index}", context, now=now)
        for _ in range(20):
            now += 1.0
            engine.turn(f"single{now}", [f"single{now}.{block}" for block in range(8)], now=now)
    return sum(count for name, count in engine.prefilled.items() if name.startswith("agent"))
