"""Keeps the guest's KV within its budget where it shares a GPU's pages with production: kvcached.

The same calls as `KvReserve`, another means. Blocks that are withheld from a pool of kvcached would
be mapped first, so here the pool's own limit moves. kvcached defers a limit below what is in use,
without end; here cached prefixes go first, what is still above is told to the scheduler, which
aborts the youngest requests, and pages that only wait for a next step go without one, since a
closed guest has none. A page is free once every block on it is, so that tokens are a lower bound.

Names are those of kvcached 0.1.6: `ElasticBlockPool`, which it puts in the place of vLLM's pool,
and `KVCacheManager`. It has been exercised with kvcached's own manager over a stand-in for its
compiled allocator, and never on a GPU.
"""

import logging
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from coserve.vllm.capabilities import Capabilities
from harvester.contracts.errors import Exhausted, Unsupported
from harvester.platform.kv_segment import KVCACHED_VERSION, KvSegment

OLDEST_VLLM, NEWEST_VLLM = (0, 24, 0), (0, 30, 0)
"""Of those that RoseMux supports, the ones that kvcached 0.1.6 says it was tested up to."""

_TRIES, _TRY_AGAIN_S = 20, 0.001

_log = logging.getLogger(__name__)


def is_shared(pool: Any) -> bool:
    """Whether kvcached has taken the place of this engine's block pool."""
    return hasattr(pool, "kv_cache_manager") and hasattr(pool, "_evictable_blocks")


def check(vllm: Capabilities) -> None:
    """Raises Unsupported unless this kvcached and this vLLM are known together."""
    try:
        found = metadata.version("kvcached")
    except metadata.PackageNotFoundError as error:
        raise Unsupported("memory level `shared` needs kvcached beside vLLM") from error
    if found != KVCACHED_VERSION:
        raise Unsupported(f"kvcached {found} is not known; install {KVCACHED_VERSION}")
    version = tuple(int(part) for part in vllm.version.split("."))
    if not OLDEST_VLLM <= version <= NEWEST_VLLM:
        raise Unsupported(
            f"kvcached {KVCACHED_VERSION} supports vLLM up to 0.30.0, this is {vllm.version}: use "
            "static memory, or that vLLM"
        )


class KvShared:
    """Used by the engine loop's thread alone."""

    returns_pages = True

    def __init__(self, pool: Any, *, tokens_per_block: int, segment: KvSegment | None) -> None:
        """`segment` is where others see the limit; None where there is none to write."""
        self._pool = pool
        self._manager = pool.kv_cache_manager
        self._tokens_per_block = tokens_per_block
        self._segment = segment
        manager = self._manager
        self._block_bytes = manager.block_mem_size * manager.num_layers * manager.num_kv_buffers
        self._page_bytes = manager.page_size * manager.num_layers * manager.num_kv_buffers
        pages = manager.mem_size // manager.page_size
        self._capacity_bytes: int = pages * self._page_bytes
        # Block 0 is vLLM's null block: never free, and nobody's.
        self._blocks = pool.num_gpu_blocks - 1
        self._budget_tokens: int | None = None
        self._limit_bytes = self._capacity_bytes
        self._told_bytes: int | None = None
        self._revision = 0

    @property
    def tokens_total(self) -> int:
        return int(self._blocks * self._tokens_per_block)

    @property
    def blocks_usable(self) -> int:
        return (self.tokens_total - self.tokens_withheld) // self._tokens_per_block

    @property
    def tokens_withheld(self) -> int:
        """What the budget leaves out, less what is still mapped of it."""
        if self._budget_tokens is None:
            return 0
        over = -(-self._over_bytes() // self._block_bytes) * self._tokens_per_block
        usable = min(self.tokens_total, self._budget_tokens + over)
        return self.tokens_total - usable

    @property
    def tokens_held(self) -> int:
        """By requests: whole pages, less the prefixes that are merely cached."""
        blocks = self._used_bytes() // self._block_bytes - 1 - len(self._pool._evictable_blocks)
        return int(max(0, blocks) * self._tokens_per_block)

    def give_back_unused(self) -> None:
        """Of an engine that has just started: nothing is mapped before it is used."""

    def keep_within(self, budget_tokens: int | None) -> int:
        """Move the limit (None: all there is). Returns the tokens still missing, which requests
        hold."""
        self._set(budget_tokens)
        if self._deferred():
            self._evict()
        self._release()
        if self._mapped_bytes() > self._limit_bytes:
            # Pages that are mapped ahead are memory all the same.
            self._manager.trim()
        self._tell()
        short = -(-self._over_bytes() // self._block_bytes)
        return int(short * self._tokens_per_block)

    def released(self, act: Callable[[], bool]) -> bool:
        """kvcached drops prefixes under any limit."""
        done = act()
        self._release()
        return done

    def _set(self, budget_tokens: int | None) -> None:
        limit_bytes = self._capacity_bytes
        if budget_tokens is not None:
            blocks = budget_tokens // self._tokens_per_block
            # Whole pages, and the page of the null block, which stays mapped.
            pages = 1 + blocks * self._block_bytes // self._page_bytes
            limit_bytes = min(limit_bytes, pages * self._page_bytes)
        self._budget_tokens = budget_tokens
        if limit_bytes == self._limit_bytes:
            return
        self._limit_bytes = limit_bytes
        self._revision += 1
        # Seen before it holds: whoever compares use with limit must not find an older, larger one.
        self._tell()
        state = self._manager.set_memory_limit(limit_bytes, revision=self._revision)
        if state["status"] not in {"applied", "deferred"}:
            _log.error("kvcached does not set a limit: %s", state.get("reason"))

    def _tell(self) -> None:
        if self._segment is None or self._told_bytes == self._limit_bytes:
            return
        for _ in range(_TRIES):
            try:
                self._segment.limit(self._limit_bytes)
            except Exhausted:
                # kvcached holds the file for microseconds, whenever it maps a page.
                time.sleep(_TRY_AGAIN_S)
            else:
                self._told_bytes = self._limit_bytes
                return
        _log.warning("the KV limit is not written: %s stays locked", self._segment.path)

    def _evict(self) -> None:
        """Cached prefixes, those first that free whole pages, until the limit holds."""
        while self._deferred():
            blocks = max(1, -(-self._over_bytes() // self._block_bytes))
            if self._pool._evict_blocks_from_pool(blocks) == 0:
                return
            self._release()

    def _release(self) -> None:
        """Pages whose blocks are free wait for the worker's steps before they are unmapped. The
        engine drains them in its next step; this one may be closed and have none."""
        marker = self._manager.capture_physical_release_marker()
        self._manager.release_retired_pages_through(marker)

    def _deferred(self) -> bool:
        return bool(self._manager.memory_limit_state()["status"] == "deferred")

    def _used_bytes(self) -> int:
        return int(self._manager.get_mapped_memory_size())

    def _over_bytes(self) -> int:
        return max(0, self._used_bytes() - self._limit_bytes)

    def _mapped_bytes(self) -> int:
        return int(self._manager.memory_limit_state()["mapped_bytes"])
