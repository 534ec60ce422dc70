"""An engine's KV over kvcached, without the engine: on a GPU, or over the fake page allocator.

    start N      N blocks of KV, of which none is mapped but the null block's page
    take N       blocks for a request, written and read back on the device
    cache N      prefixes without a user
    give         every block of every request
    keep T       the guest's budget in tokens; "all" is no budget
    say          what this process and the device say

The segment is named by KVCACHED_IPC_NAME. Answers are lines of JSON.
"""

import os
import struct
import sys
from types import SimpleNamespace
from typing import Any

from coserve.vllm.kv_shared import KvcachedLimit
from coserve.vllm.launch import SEGMENT_VARIABLE
from harvester.platform.kv_segment import KvSegment
from tests.contract.coserve.fake_kvcached import (
    BLOCKS_PER_PAGE,
    PAGE_BYTES,
    FakeManager,
    FakePool,
)
from tests.gpu.answered_lines import answer_lines

LAYERS, BUFFERS, PER_BLOCK, HEADS, WIDTH = 8, 2, 16, 8, 64
_PLAYED_DEVICE_BYTES = 1 << 32


class FakeDevice:
    """Pages are numbers; the segment says of them what kvcached's tracker would."""

    def pool(self, blocks: int, segment: KvSegment) -> Any:
        manager = FakeManager(blocks, PAGE_BYTES // BLOCKS_PER_PAGE, LAYERS, BUFFERS)
        self._pages = manager.page_allocator
        bundle = PAGE_BYTES * LAYERS * BUFFERS

        def told(used: int, ahead: int) -> None:
            limit = segment.read().limit_bytes if segment.path.exists() else blocks * bundle  # type: ignore[union-attr]
            segment.path.write_bytes(struct.pack("=qqq", limit, used * bundle, ahead * bundle))

        self._pages.told = told
        told(self._pages.in_use, 0)
        return FakePool(manager, blocks)

    def write_and_read(self, blocks: list[int]) -> None: ...

    def free_bytes(self) -> int:
        pages = self._pages.in_use + len(self._pages.ahead)
        return _PLAYED_DEVICE_BYTES - pages * PAGE_BYTES * LAYERS * BUFFERS


class CudaDevice:
    """kvcached's own allocator, pool and manager."""

    def pool(self, blocks: int, segment: KvSegment) -> Any:
        import torch
        from kvcached.integration.vllm import interfaces, patches
        from vllm.v1.core import block_pool

        self._torch = torch
        torch.cuda.set_device(0)
        interfaces.init_kvcached(is_worker=True, device="cuda:0")
        self._tensors = interfaces.alloc_kv_cache(
            (BUFFERS, blocks, PER_BLOCK, HEADS, WIDTH), PER_BLOCK, torch.float16, "cuda:0", LAYERS
        )
        assert patches.ElasticBlockPoolPatch().apply(block_pool)
        cell_bytes = HEADS * WIDTH * torch.float16.itemsize
        pool = block_pool.ElasticBlockPool(
            blocks, PER_BLOCK, cell_bytes, LAYERS, True, num_kv_buffers=BUFFERS
        )
        pool.kv_cache_manager._wait_post_init()
        # CUDA loads a kernel's code at its first launch: not while memory is compared.
        self.write_and_read([0])
        return pool

    def write_and_read(self, blocks: list[int]) -> None:
        places = self._torch.tensor(blocks, device="cuda:0")
        for number, layer in enumerate(self._tensors, start=1):
            layer[:, places] = number
            if not bool((layer[:, places] == number).all()):
                raise RuntimeError("KV reads back other than it was written")
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        self._torch.cuda.synchronize()
        return int(self._torch.cuda.mem_get_info(0)[0])


class Commands:
    def __init__(self, name: str) -> None:
        self._device = FakeDevice() if name == "fake" else CudaDevice()
        self._segment = KvSegment(os.environ[SEGMENT_VARIABLE])
        self._held: list[Any] = []

    def start(self, blocks: str) -> dict[str, Any]:
        self._pool = self._device.pool(int(blocks), self._segment)
        self._shared = KvcachedLimit(self._pool, tokens_per_block=PER_BLOCK, segment=self._segment)
        manager = self._pool.kv_cache_manager
        return {
            "blocks_per_page": manager.page_size // manager.block_mem_size,
            "bundle_bytes": manager.page_size * LAYERS * BUFFERS,
        }

    def take(self, count: str) -> dict[str, Any]:
        taken = self._pool.get_new_blocks(int(count))
        self._device.write_and_read([block.block_id for block in taken])
        self._held += taken
        return {}

    def cache(self, count: str) -> dict[str, Any]:
        blocks = self._pool.get_new_blocks(int(count))
        request = SimpleNamespace(block_hashes=[os.urandom(32) for _ in blocks])
        self._pool.cache_full_blocks(request, blocks, 0, len(blocks), PER_BLOCK)
        self._pool.free_blocks(blocks)
        return {}

    def give(self) -> dict[str, Any]:
        self._pool.free_blocks(self._held)
        self._held = []
        return {}

    def keep(self, tokens: str) -> dict[str, Any]:
        return {"missing": self._shared.keep_within(None if tokens == "all" else int(tokens))}

    def say(self) -> dict[str, Any]:
        return {
            "free_bytes": self._device.free_bytes(),
            "tokens_total": self._shared.tokens_total,
            "tokens_withheld": self._shared.tokens_withheld,
        }


def main() -> None:
    commands = Commands(sys.argv[1])
    answer_lines(commands)
    # kvcached's threads end with the process and not before.
    os._exit(0)


if __name__ == "__main__":
    main()
