"""kvcached without a GPU: its page allocator, which is compiled, and over that either its own
manager and block pool or a stand-in with the same habits.

Pages hold whole blocks and are unmapped once all of them are free; some are kept mapped ahead; a
limit below what is in use is deferred until it can hold; where steps run ahead of the engine, freed
pages wait for a release.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

PAGE_BYTES = 2 << 20
BLOCKS_PER_PAGE = 8
MOST_AHEAD = 2


class FakePage:
    """One page of blocks."""

    def __init__(self, page_id: int) -> None:
        self.page_id = page_id
        self._free: list[int] = []
        self._blocks = 0

    def init(self, block_mem_size: int) -> None:
        start, end = self.get_block_range(self.page_id, PAGE_BYTES, block_mem_size)
        self._free, self._blocks = list(range(start, end)), end - start

    def alloc(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free_batch(self, blocks: list[int]) -> None:
        self._free += blocks

    def empty(self) -> bool:
        return len(self._free) == self._blocks

    def full(self) -> bool:
        return not self._free

    def num_free_blocks(self) -> int:
        return len(self._free)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        first = -(-page_id * page_size // block_mem_size)
        return first, (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        return page_size // block_mem_size


class FakeAllocator:
    """Pages by number; `told` is called with (in use, ahead), in pages, at every change."""

    def __init__(self, _layers: int, layer_bytes: int, *_: Any, **__: Any) -> None:
        self.total = layer_bytes // PAGE_BYTES
        self.free = list(range(self.total))
        self.ahead: list[int] = []
        self.reclaimed: list[int] = []
        self.told: Callable[[int, int], None] = lambda _used, _ahead: None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith(("set_", "start_", "stop_")):
            return lambda *_, **__: None
        raise AttributeError(name)

    @property
    def in_use(self) -> int:
        return self.total - len(self.free) - len(self.ahead)

    def get_resize_target(self) -> int:
        return -1

    def alloc_page(self) -> FakePage:
        if not self.free and not self.ahead:
            raise RuntimeError("No free pages left")
        page = FakePage((self.ahead or self.free).pop(0))
        self._tell()
        return page

    def free_pages(self, pages: list[int]) -> None:
        kept = max(0, MOST_AHEAD - len(self.ahead))
        self.ahead += pages[:kept]
        self.free += pages[kept:]
        self._tell()

    def resize(self, layer_bytes: int) -> bool:
        pages = layer_bytes // PAGE_BYTES
        if pages < self.in_use:
            return False
        if len(self.free) < self.total - pages:
            self.trim()
        while self.total > pages:
            self.reclaimed.append(self.free.pop())
            self.total -= 1
        while self.total < pages:
            self.free.append(self.reclaimed.pop())
            self.total += 1
        self._tell()
        return True

    def trim(self) -> None:
        self.free += self.ahead
        self.ahead = []
        self._tell()

    def get_num_free_pages(self) -> int:
        return len(self.free) + len(self.ahead)

    def get_num_inuse_pages(self) -> int:
        return self.in_use

    def get_num_reserved_pages(self) -> int:
        return len(self.ahead)

    def get_avail_physical_pages(self) -> int:
        return len(self.free)

    def get_page_state(self) -> dict[str, int]:
        return {
            "total_pages": self.total,
            "free_pages": self.get_num_free_pages(),
            "inuse_pages": self.in_use,
            "reserved_pages": len(self.ahead),
        }

    def group_indices_by_page(self, blocks: list[int], block_bytes: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for block in blocks:
            found.setdefault(block * block_bytes // PAGE_BYTES, []).append(block)
        return found

    def _tell(self) -> None:
        self.told(self.in_use, len(self.ahead))


class FakeManager:
    """A stand-in for kvcached's `KVCacheManager`: pages under a limit."""

    def __init__(self, blocks: int, block_bytes: int, layers: int, buffers: int) -> None:
        self.block_mem_size, self.page_size = block_bytes, PAGE_BYTES
        self.num_layers, self.num_kv_buffers = layers, buffers
        self.mem_size = blocks * block_bytes
        self.page_allocator = FakeAllocator(layers, self.mem_size)
        self.defer_physical_release = False
        self._pages: dict[int, FakePage] = {}
        self._retired: list[int] = []
        self._due: int | None = None
        self.alloc(1)

    def alloc(self, count: int) -> list[int] | None:
        if self.available_size() < count:
            return None
        taken: list[int] = []
        while len(taken) < count:
            page = next((one for one in self._pages.values() if not one.full()), None)
            if page is None:
                page = self.page_allocator.alloc_page()
                page.init(self.block_mem_size)
                self._pages[page.page_id] = page
            self._retired = [one for one in self._retired if one != page.page_id]
            taken += page.alloc(min(count - len(taken), page.num_free_blocks()))
        return taken

    def free(self, blocks: list[int]) -> None:
        groups = self.page_allocator.group_indices_by_page(blocks, self.block_mem_size)
        for number, freed in groups.items():
            self._pages[number].free_batch(freed)
            if self._pages[number].empty():
                self._retired.append(number)
        if not self.defer_physical_release:
            self.release_retired_pages_through(0)

    def available_size(self) -> int:
        known = sum(page.num_free_blocks() for page in self._pages.values())
        unmapped = 0 if self._due is not None else self.page_allocator.get_num_free_pages()
        return known + unmapped * BLOCKS_PER_PAGE

    def capture_physical_release_marker(self) -> int:
        return 0

    def release_retired_pages_through(self, _marker: int) -> None:
        for number in self._retired:
            del self._pages[number]
        if self._retired:
            self.page_allocator.free_pages(self._retired)
        self._retired = []
        if self._due is not None and self.page_allocator.resize(self._due):
            self._due = None

    def set_memory_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        assert revision > 0
        bundle = PAGE_BYTES * self.num_layers * self.num_kv_buffers
        target = limit_bytes // bundle * PAGE_BYTES
        self._due = None if self.page_allocator.resize(target) else target
        return self.memory_limit_state()

    def memory_limit_state(self) -> dict[str, Any]:
        state = self.page_allocator.get_page_state()
        mapped = state["inuse_pages"] + state["reserved_pages"]
        return {
            "status": "applied" if self._due is None else "deferred",
            "mapped_bytes": mapped * PAGE_BYTES * self.num_layers * self.num_kv_buffers,
        }

    def get_mapped_memory_size(self) -> int:
        pages = self.page_allocator.get_num_inuse_pages()
        return pages * PAGE_BYTES * self.num_layers * self.num_kv_buffers

    def trim(self) -> None:
        self.page_allocator.trim()


class FakePool:
    """A stand-in for kvcached's `ElasticBlockPool`: blocks and cached prefixes."""

    def __init__(self, manager: FakeManager, blocks: int) -> None:
        self.kv_cache_manager, self.num_gpu_blocks = manager, blocks
        self._evictable_blocks: OrderedDict[int, Any] = OrderedDict()
        self._cached: set[int] = set()

    def get_num_free_blocks(self) -> int:
        return self.kv_cache_manager.available_size() + len(self._evictable_blocks)

    def get_new_blocks(self, count: int) -> list[Any]:
        missing = count - self.kv_cache_manager.available_size()
        if missing > 0:
            self._evict_blocks_from_pool(missing)
        taken = self.kv_cache_manager.alloc(count)
        if taken is None:
            raise ValueError("exhausted")
        return [SimpleNamespace(block_id=block) for block in taken]

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        gone = []
        for block in blocks:
            if block.block_id in self._cached:
                self._evictable_blocks[block.block_id] = block
            else:
                gone.append(block.block_id)
        self.kv_cache_manager.free(gone)

    def cache_full_blocks(self, _request: Any, blocks: list[Any], *_: int) -> None:
        self._cached.update(block.block_id for block in blocks)

    def _evict_blocks_from_pool(self, count: int) -> int:
        gone = list(self._evictable_blocks)[:count]
        for block in gone:
            del self._evictable_blocks[block]
            self._cached.discard(block)
        self.kv_cache_manager.free(gone)
        return len(gone)
