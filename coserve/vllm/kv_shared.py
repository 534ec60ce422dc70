"""Keeps the guest's KV within its budget where kvcached shares a GPU's pages with production.

Same interface as `KvReserve`. kvcached would map blocks that are withheld from its pool, so the
pool's own limit moves instead. kvcached defers a limit below the present use without end; here
cached prefixes are evicted first, the scheduler aborts requests for the rest, and pages that await
a next step are released without one, since a closed guest has none. A page is free once every
block on it is, so token counts are a lower bound.

Names are those of kvcached 0.1.6: `ElasticBlockPool`, which replaces vLLM's pool, and
`KVCacheManager`. Tested with kvcached's own manager over a stand-in for its compiled allocator, and
never on a GPU.
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
"""Range of vLLM versions that both RoseMux and kvcached 0.1.6 support."""

_TRIES, _TRY_AGAIN_S = 20, 0.001

_log = logging.getLogger(__name__)


def is_shared(pool: Any) -> bool:
    """Whether kvcached has replaced this engine's block pool."""
    return hasattr(pool, "kv_cache_manager") and hasattr(pool, "_evictable_blocks")


def check(vllm: Capabilities) -> None:
    """Raises Unsupported unless this kvcached and this vLLM are known to work together."""
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


class KvcachedLimit:
    """KV limit of one engine under kvcached. Used by the engine loop's thread only."""

    def __init__(self, pool: Any, *, tokens_per_block: int, segment: KvSegment | None) -> None:
        """`segment` publishes the limit to other processes; None publishes nothing."""
        self._pool = pool
        self._manager = pool.kv_cache_manager
        self._tokens_per_block = tokens_per_block
        self._segment = segment
        manager = self._manager
        self._block_bytes = manager.block_mem_size * manager.num_layers * manager.num_kv_buffers
        self._page_bytes = manager.page_size * manager.num_layers * manager.num_kv_buffers
        pages = manager.mem_size // manager.page_size
        self._capacity_bytes: int = pages * self._page_bytes
        # Block 0 is vLLM's null block: never free, and never allocated.
        self._blocks = pool.num_gpu_blocks - 1
        self._budget_tokens: int | None = None
        self._limit_bytes = self._capacity_bytes
        self._reported_bytes: int | None = None
        self._revision = 0

    @property
    def tokens_total(self) -> int:
        return int(self._blocks * self._tokens_per_block)

    @property
    def blocks_usable(self) -> int:
        return (self.tokens_total - self.tokens_withheld) // self._tokens_per_block

    @property
    def tokens_withheld(self) -> int:
        """Tokens above the budget, less the tokens whose pages are still mapped."""
        if self._budget_tokens is None:
            return 0
        over = -(-self._over_bytes() // self._block_bytes) * self._tokens_per_block
        usable = min(self.tokens_total, self._budget_tokens + over)
        return self.tokens_total - usable

    @property
    def tokens_held(self) -> int:
        """Tokens held by requests: whole pages, less the prefixes that are merely cached."""
        blocks = self._used_bytes() // self._block_bytes - 1 - len(self._pool._evictable_blocks)
        return int(max(0, blocks) * self._tokens_per_block)

    def give_back_unused(self) -> None:
        """No-op: kvcached maps no memory before it is used."""

    def keep_within(self, budget_tokens: int | None) -> int:
        """Move the limit (None: the whole capacity). Returns the tokens still missing, which
        requests hold."""
        self._set(budget_tokens)
        if self._deferred():
            self._evict()
        self._release()
        if self._mapped_bytes() > self._limit_bytes:
            # Pages mapped ahead of use take memory too.
            self._manager.trim()
        self._tell()
        short = -(-self._over_bytes() // self._block_bytes)
        return int(short * self._tokens_per_block)

    def released(self, act: Callable[[], bool]) -> bool:
        """Run `act`; kvcached drops prefixes under any limit."""
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
        # Published before it holds: a reader that compares use with limit must not find an older,
        # larger limit.
        self._tell()
        state = self._manager.set_memory_limit(limit_bytes, revision=self._revision)
        if state["status"] not in {"applied", "deferred"}:
            _log.error("kvcached does not set a limit: %s", state.get("reason"))

    def _tell(self) -> None:
        if self._segment is None or self._reported_bytes == self._limit_bytes:
            return
        for _ in range(_TRIES):
            try:
                self._segment.limit(self._limit_bytes)
            except Exhausted:
                # kvcached holds the file for microseconds, whenever it maps a page.
                time.sleep(_TRY_AGAIN_S)
            else:
                self._reported_bytes = self._limit_bytes
                return
        _log.warning("the KV limit is not written: %s stays locked", self._segment.path)

    def _evict(self) -> None:
        """Evict cached prefixes until the limit holds, first those that free whole pages."""
        while self._deferred():
            blocks = max(1, -(-self._over_bytes() // self._block_bytes))
            if self._pool._evict_blocks_from_pool(blocks) == 0:
                return
            self._release()

    def _release(self) -> None:
        """Unmap retired pages now. Pages whose blocks are free await the worker's steps, and the
        engine drains them in its next step; a closed engine may have no next step."""
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
