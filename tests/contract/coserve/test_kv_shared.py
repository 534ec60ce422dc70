"""A guest's budget over kvcached's pool: a stand-in, and under `make kvcached` its own Python."""

import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coserve.vllm.capabilities import capabilities
from coserve.vllm.kv_shared import KvcachedLimit, check, is_shared
from harvester.contracts.errors import Unsupported
from harvester.platform.kv_segment import SEGMENTS, KvSegment
from tests.contract.coserve.fake_kvcached import (
    BLOCKS_PER_PAGE,
    MOST_AHEAD,
    PAGE_BYTES,
    FakeAllocator,
    FakeManager,
    FakePage,
    FakePool,
)

PER_BLOCK, BLOCKS, LAYERS, BUFFERS = 16, 64, 2, 2
BLOCK_BYTES = PAGE_BYTES // BLOCKS_PER_PAGE
BUNDLE_BYTES = PAGE_BYTES * LAYERS * BUFFERS
PAGES = BLOCKS // BLOCKS_PER_PAGE
PAGE_TOKENS = BLOCKS_PER_PAGE * PER_BLOCK


@dataclass
class Scene:
    pool: Any
    shared: KvcachedLimit
    segment: KvSegment

    @property
    def pages(self) -> FakeAllocator:
        allocator: FakeAllocator = self.pool.kv_cache_manager.page_allocator
        return allocator

    @property
    def mapped(self) -> int:
        """Pages."""
        return self.pages.in_use + len(self.pages.ahead)

    def cached(self, count: int) -> None:
        """Cache prefixes that no request uses."""
        blocks = self.pool.get_new_blocks(count)
        hashes = [os.urandom(32) for _ in blocks]
        request = types.SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(request, blocks, 0, count, PER_BLOCK)
        self.pool.free_blocks(blocks)

    def limit(self) -> int:
        use = self.segment.read()
        assert use is not None
        return use.limit_bytes


def fake(segment: KvSegment) -> Any:
    segment.path.write_bytes(bytes(24))
    return FakePool(FakeManager(BLOCKS, BLOCK_BYTES, LAYERS, BUFFERS), BLOCKS)


def real(segment: KvSegment, monkeypatch: pytest.MonkeyPatch) -> Any:
    """kvcached's manager, and its pool in vLLM's own module."""
    pytest.importorskip("kvcached.cli.utils")
    block_pool = pytest.importorskip("vllm.v1.core.block_pool")
    compiled: Any = types.ModuleType("kvcached.vmm_ops")
    compiled.PageAllocator, compiled.InternalPage = FakeAllocator, FakePage
    for name in (
        "kv_tensors_created", "init_kvcached", "shutdown_kvcached", "create_kv_tensors",
        "map_to_kv_tensors", "unmap_from_kv_tensors", "map_to_kv_tensors_with_result",
        "prepare_unmap_from_kv_tensors", "commit_unmap_from_kv_tensors",
        "abort_unmap_from_kv_tensors",
    ):  # fmt: skip
        setattr(compiled, name, lambda *_, **__: True)
    monkeypatch.setitem(sys.modules, "kvcached.vmm_ops", compiled)
    from kvcached.cli.utils import init_kv_cache_limit
    from kvcached.integration.vllm import interfaces, patches
    from kvcached.kv_cache_manager import KVCacheManager

    def manager(blocks: int, block_size: int, cell_size: int, layers: int, **more: Any) -> Any:
        more.pop("pool_name")
        return KVCacheManager(
            blocks, block_size, cell_size, layers, reserve_null_block=True, **more
        )

    monkeypatch.setattr(interfaces, "get_kv_cache_manager", manager)
    init_kv_cache_limit(segment.path.name, PAGES * BUNDLE_BYTES)
    assert patches.ElasticBlockPoolPatch().apply(block_pool)
    pool = block_pool.ElasticBlockPool(
        BLOCKS, PER_BLOCK, BLOCK_BYTES // PER_BLOCK, LAYERS, True, num_kv_buffers=BUFFERS
    )
    pool.kv_cache_manager._wait_post_init()
    return pool


@pytest.fixture(params=["fake", "kvcached"])
def scene(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    name = f"rosemux_test_{os.getpid()}"
    if request.param == "fake":
        segment = KvSegment(name, directory=tmp_path)
        pool = fake(segment)
    else:
        segment = KvSegment(name, directory=SEGMENTS)
        pool = real(segment, monkeypatch)
    yield Scene(pool, KvcachedLimit(pool, tokens_per_block=PER_BLOCK, segment=segment), segment)
    segment.path.unlink()


def test_kvcached_s_pool_is_known_from_vllm_s(scene: Scene) -> None:
    assert is_shared(scene.pool)
    assert not is_shared(object())


def test_without_a_budget_the_guest_has_all_and_holds_nothing(scene: Scene) -> None:
    assert scene.shared.keep_within(None) == 0
    assert scene.shared.tokens_total == (BLOCKS - 1) * PER_BLOCK
    assert scene.shared.tokens_withheld == 0
    assert scene.shared.blocks_usable == BLOCKS - 1
    # The page of the null block, and no more.
    assert scene.pages.in_use == 1
    assert scene.shared.tokens_held < PAGE_TOKENS


def test_a_budget_maps_nothing_and_becomes_the_limit_that_all_can_see(scene: Scene) -> None:
    before = scene.mapped
    assert scene.shared.keep_within(2 * PAGE_TOKENS) == 0
    assert scene.mapped <= before
    assert scene.limit() == 3 * BUNDLE_BYTES
    total = scene.shared.tokens_total
    assert total - scene.shared.tokens_withheld == 2 * PAGE_TOKENS
    scene.pool.get_new_blocks(2 * BLOCKS_PER_PAGE)
    with pytest.raises(ValueError, match=r"(?i)free blocks|exhausted|unable"):
        scene.pool.get_new_blocks(BLOCKS_PER_PAGE)


def test_cached_prefixes_go_before_anything_else_and_their_pages_with_them(scene: Scene) -> None:
    held = scene.pool.get_new_blocks(BLOCKS_PER_PAGE)
    scene.cached(4 * BLOCKS_PER_PAGE)
    assert scene.mapped > 4
    assert scene.shared.keep_within(PAGE_TOKENS) == 0
    assert scene.mapped * BUNDLE_BYTES <= scene.limit() == 2 * BUNDLE_BYTES
    scene.pool.free_blocks(held)


def test_memory_of_requests_is_reported_and_goes_once_they_are_aborted(scene: Scene) -> None:
    old = scene.pool.get_new_blocks(2 * BLOCKS_PER_PAGE)
    young = scene.pool.get_new_blocks(3 * BLOCKS_PER_PAGE)
    missing = scene.shared.keep_within(2 * PAGE_TOKENS)
    assert missing >= 3 * PAGE_TOKENS - PAGE_TOKENS
    assert scene.shared.tokens_withheld < scene.shared.tokens_total - 2 * PAGE_TOKENS
    scene.pool.free_blocks(young)
    assert scene.shared.keep_within(2 * PAGE_TOKENS) == 0
    assert scene.mapped * BUNDLE_BYTES <= scene.limit()
    scene.pool.free_blocks(old)


def test_a_budget_of_nothing_leaves_the_null_block_s_page_alone(scene: Scene) -> None:
    scene.cached(5 * BLOCKS_PER_PAGE)
    assert scene.shared.keep_within(0) == 0
    assert scene.mapped == 1
    assert scene.shared.tokens_withheld == scene.shared.tokens_total
    assert scene.shared.blocks_usable == 0


def test_pages_that_are_mapped_ahead_count_as_memory(scene: Scene) -> None:
    scene.pool.free_blocks(scene.pool.get_new_blocks(4 * BLOCKS_PER_PAGE))
    assert len(scene.pages.ahead) == MOST_AHEAD
    scene.shared.keep_within(0)
    assert scene.pages.ahead == []


def test_pages_that_wait_for_a_step_go_without_one(scene: Scene) -> None:
    scene.pool.kv_cache_manager.defer_physical_release = True
    held = scene.pool.get_new_blocks(5 * BLOCKS_PER_PAGE)
    assert scene.shared.keep_within(0) > 0
    scene.pool.free_blocks(held)
    assert scene.mapped > 1, "a step of the worker may still write them"
    assert scene.shared.keep_within(0) == 0
    assert scene.mapped == 1


def test_a_larger_budget_is_there_again(scene: Scene) -> None:
    scene.shared.keep_within(0)
    scene.shared.keep_within(4 * PAGE_TOKENS)
    scene.pool.free_blocks(scene.pool.get_new_blocks(4 * BLOCKS_PER_PAGE))
    scene.shared.keep_within(None)
    assert scene.limit() == PAGES * BUNDLE_BYTES
    scene.pool.free_blocks(scene.pool.get_new_blocks(BLOCKS - 1))


def test_dropping_all_prefixes_needs_no_other_limit(scene: Scene) -> None:
    scene.shared.keep_within(PAGE_TOKENS)
    drops: Callable[[], bool] = lambda: True  # noqa: E731
    assert scene.shared.released(drops)
    assert scene.limit() == 2 * BUNDLE_BYTES


def test_kvcached_s_own_code_writes_the_segment_that_we_read() -> None:
    utils = pytest.importorskip("kvcached.cli.utils")
    name = f"rosemux_layout_{os.getpid()}"
    segment = KvSegment(name)
    utils.init_kv_cache_limit(name, 5 << 30)
    try:
        with utils.RwLockedShm(name, utils.MemInfoStruct.SHM_SIZE, utils.RwLockedShm.WLOCK) as view:
            utils.MemInfoStruct(5 << 30, 3 << 20, 1 << 20).write_to_buffer(view)
        use = segment.read()
        assert use is not None
        assert (use.limit_bytes, use.used_bytes, use.ahead_bytes) == (5 << 30, 3 << 20, 1 << 20)
        segment.limit(2 << 30)
        seen = utils.get_kv_cache_limit(name)
        assert (seen.total_size, seen.used_size, seen.prealloc_size) == (2 << 30, 3 << 20, 1 << 20)
        utils.update_kv_cache_limit(name, 1 << 30)
        use = segment.read()
        assert use is not None
        assert use.limit_bytes == 1 << 30
    finally:
        utils.delete_kv_cache_segment(name)


def test_an_unknown_pair_of_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"kvcached": "0.1.6"}
    monkeypatch.setattr("coserve.vllm.kv_shared.metadata.version", versions.__getitem__)
    check(capabilities("0.24.0"))
    check(capabilities("0.30.0"))
    with pytest.raises(Unsupported, match=r"up to 0\.30\.0, this is 0\.32\.0"):
        check(capabilities("0.32.0"))
    versions["kvcached"] = "0.2.0"
    with pytest.raises(Unsupported, match=r"kvcached 0\.2\.0 is not known"):
        check(capabilities("0.30.0"))
