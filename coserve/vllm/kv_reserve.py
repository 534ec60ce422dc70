"""Keeps the guest's KV within its budget by taking blocks out of vLLM's block pool.

Withheld blocks are allocated to no request. vLLM's pool hands out free blocks first and then the
oldest cached prefixes, whose entries it drops, so prefixes are evicted before requests. If the
worker can (consent level `page`), the blocks' memory returns to the operating system as well.
"""

from collections.abc import Callable
from typing import Any


class KvReserve:
    """Block reserve of one engine. Used by the engine loop's thread only."""

    def __init__(
        self,
        pool: Any,
        *,
        tokens_per_block: int,
        give_back: Callable[[list[int], int], None] | None = None,
    ) -> None:
        """`give_back(blocks, total)` returns the blocks' memory; None keeps it (level `static`)."""
        self._pool = pool
        self._tokens_per_block = tokens_per_block
        self._give_back = give_back
        self._withheld: list[Any] = []
        # vLLM's null block is left out: it is never free and never allocated.
        self._blocks = pool.num_gpu_blocks - 1

    @property
    def tokens_total(self) -> int:
        return self._blocks * self._tokens_per_block

    @property
    def blocks_usable(self) -> int:
        """Blocks that are not withheld."""
        return self._blocks - len(self._withheld)

    @property
    def tokens_withheld(self) -> int:
        return len(self._withheld) * self._tokens_per_block

    @property
    def tokens_held(self) -> int:
        """Tokens held by requests and kept prefixes; merely cached prefixes count as free."""
        free = self._pool.get_num_free_blocks()
        return (self._blocks - free - len(self._withheld)) * self._tokens_per_block

    def give_back_unused(self) -> None:
        """Return the unused memory of a fresh engine: its cache starts as resident zeroed memory,
        all of which the first shrink would otherwise have to return at once."""
        if self._give_back is None:
            return
        unused = self._pool.get_new_blocks(self._pool.get_num_free_blocks())
        self._give_back([block.block_id for block in unused], self._pool.num_gpu_blocks)
        self._pool.free_blocks(unused)

    def keep_within(self, budget_tokens: int | None) -> int:
        """Withhold all blocks above the budget (None: none). Returns the tokens still missing,
        which requests hold."""
        kept = self._blocks
        if budget_tokens is not None:
            kept = min(self._blocks, budget_tokens // self._tokens_per_block)
        missing = self._blocks - kept - len(self._withheld)
        if missing < 0:
            self._pool.free_blocks(self._withheld[missing:])
            del self._withheld[missing:]
            return 0
        taken = self._pool.get_new_blocks(min(missing, self._pool.get_num_free_blocks()))
        self._withheld += taken
        if taken and self._give_back is not None:
            self._give_back([block.block_id for block in taken], self._pool.num_gpu_blocks)
        return (missing - len(taken)) * self._tokens_per_block

    def released(self, act: Callable[[], bool]) -> bool:
        """Run an action of vLLM that needs every block free, such as dropping all prefixes."""
        withheld, self._withheld = self._withheld, []
        self._pool.free_blocks(withheld)
        try:
            return act()
        finally:
            self._withhold_again(withheld)

    def _withhold_again(self, before: list[Any]) -> None:
        """Withhold as many blocks as before, possibly others, since the blocks in use have
        changed.
        """
        count = min(len(before), self._pool.get_num_free_blocks())
        self._withheld = self._pool.get_new_blocks(count)
        new = {block.block_id for block in self._withheld} - {block.block_id for block in before}
        if new and self._give_back is not None:
            self._give_back(sorted(new), self._pool.num_gpu_blocks)
