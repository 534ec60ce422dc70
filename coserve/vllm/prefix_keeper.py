"""Keeps prefixes of open trajectories in vLLM's block pool while their tools run.

vLLM's own cache is kept by age: a flood of turns that never come back pushes out a prefix that is
needed in a second. A kept block has one more user, as if a request held it; it goes before a
running request or production lacks room, and then stays in vLLM's cache by age. Block hashes begin
with the salt of the request, which names job, weight version and adapter: a kept prefix serves no
other.
"""

from collections.abc import Callable, Iterable
from typing import Any

from coserve.guest.prefix_retention import PrefixRetention
from harvester.contracts.wire.rollouts import ENDED_ARGUMENT, TRAJECTORY_ARGUMENT

# The only group of a model whose layers all cache alike; other models keep no prefixes.
_GROUP = [0]


class PrefixKeeper:
    """Used by the engine loop's thread alone."""

    def __init__(self, pool: Any, *, tokens_per_block: int) -> None:
        self._pool = pool
        self._tokens_per_block = tokens_per_block
        self._retention = PrefixRetention()
        self._kept: dict[str, list[Any]] = {}
        self._waiting: dict[str, tuple[str, int]] = {}
        """Trajectory and expected hit, by the id of a request that has had no step yet."""
        self.tokens_used_total = 0
        """Kept until the trajectory came back, and hit by it."""
        self.tokens_dropped_total = 0

    @property
    def tokens(self) -> int:
        return self._retention.blocks * self._tokens_per_block

    def arrive(self, request: Any, *, now: float) -> None:
        """A request is new in the engine."""
        for ended in ended_trajectories(request):
            self._retention.ended(ended)
            self._count_dropped(ended)
        trajectory = trajectory_of(request)
        if trajectory is None:
            return
        self._retention.came_back(trajectory, now=now)
        if trajectory not in self._kept:
            return
        found = {block.block_id for block in self._cached(request)}
        hits = sum(block.block_id in found for block in self._kept[trajectory])
        if hits:
            self._waiting[request.request_id] = trajectory, hits * self._tokens_per_block
        else:
            # The kept prefix has another weight version, or the new context does not extend it.
            self._count_dropped(trajectory)

    def stepped(
        self, request_ids: Iterable[str], *, open_requests: Iterable[str], now: float
    ) -> None:
        """Requests `request_ids` are in the step just made and now hold their own prefixes."""
        if not self._waiting:
            return
        stepping, still_open = set(request_ids), set(open_requests)
        for request_id, (trajectory, hit_tokens) in list(self._waiting.items()):
            if request_id in stepping:
                del self._waiting[request_id]
                kept_tokens = self._release(trajectory)
                used_tokens = min(hit_tokens, kept_tokens)
                self.tokens_used_total += used_tokens
                self.tokens_dropped_total += kept_tokens - used_tokens
            elif request_id not in still_open:
                del self._waiting[request_id]
                self._retention.turned_away(trajectory, now=now)

    def leave(self, request: Any, *, most_blocks: int, now: float) -> None:
        """A request has come to its end by itself."""
        trajectory = trajectory_of(request)
        if trajectory is None:
            return
        blocks = self._cached(request) if most_blocks > 0 else []
        self._pool.touch(blocks)
        self._release(trajectory)
        kept = self._retention.left(trajectory, [b.block_id for b in blocks], now=now)
        if kept:
            self._kept[trajectory] = blocks
        else:
            self._pool.free_blocks(reversed(blocks))
        for gone in self._retention.given_up(now=now):
            self._count_dropped(gone)
        self.keep_within(most_blocks, now=now)

    def keep_within(self, most_blocks: int, *, now: float) -> None:
        self._drop_until(lambda: self._retention.blocks <= most_blocks, now)

    def make_room(self, free_blocks: int, *, now: float) -> None:
        """Release kept prefixes until `free_blocks` are free for vLLM, as far as that helps."""
        self._drop_until(lambda: self._pool.get_num_free_blocks() >= free_blocks, now)

    def drop_all(self) -> None:
        for trajectory in list(self._kept):
            self._count_dropped(trajectory)

    def _drop_until(self, enough: Callable[[], bool], now: float) -> None:
        if not self._kept or enough():
            return
        for trajectory in self._retention.least_first(now=now):
            self._count_dropped(trajectory)
            if enough():
                return

    def _count_dropped(self, trajectory: str) -> None:
        self.tokens_dropped_total += self._release(trajectory)

    def _release(self, trajectory: str) -> int:
        """Tokens that are kept no more."""
        self._retention.drop(trajectory)
        blocks = self._kept.pop(trajectory, [])
        # The order in which vLLM frees a request: the end of an evicted prefix goes first.
        self._pool.free_blocks(reversed(blocks))
        return len(blocks) * self._tokens_per_block

    def _cached(self, request: Any) -> list[Any]:
        """Blocks of the request that a next turn would hit, from its first token on."""
        found: list[Any] = []
        for block_hash in request.block_hashes:
            cached = self._pool.get_cached_block(block_hash, _GROUP)
            if cached is None:
                break
            found += cached
        return found


def trajectory_of(request: Any) -> str | None:
    """The trajectory that the gateway named; None for any other request."""
    trajectory = _extra_args(request).get(TRAJECTORY_ARGUMENT)
    return trajectory if isinstance(trajectory, str) else None


def ended_trajectories(request: Any) -> list[str]:
    """Trajectories whose end the gateway reports with this request."""
    ended = _extra_args(request).get(ENDED_ARGUMENT)
    return [each for each in ended if isinstance(each, str)] if isinstance(ended, list) else []


def _extra_args(request: Any) -> dict[str, Any]:
    return getattr(request.sampling_params, "extra_args", None) or {}
