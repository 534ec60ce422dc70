"""xxh3's sums as Triton kernels: everything of the hash that reads all bytes.

    sum_stripes     adds up the 16 stripes of each block, all blocks side by side
    chain_sums   takes the sums of a tensor's blocks one after another, all tensors side by side

A scramble stands between two blocks and depends on all before it, so the chain of a tensor cannot
be cut; it reads a sixteenth of the bytes. Both hold under Triton's interpreter too, which counts
with numpy: no `range` over a number that only the device knows.

Words are 64 bits, the lowest byte first. Imports Triton, which an environment may lack.
"""

import triton
import triton.language as tl

from weightsync.elements import xxh3

BLOCKS_AT_ONCE = 32
"""Blocks per program of `sum_stripes`: two words per thread, which loads 16 bytes at a time."""
STEP_BLOCKS = 16
"""Sums that `chain_sums` loads ahead while it processes the previous ones, to hide latency."""
SPARE_BLOCKS = STEP_BLOCKS
"""Sums after the last one, which `chain_sums` loads and never uses."""
_SCRAMBLE_WORD: tl.constexpr = tl.constexpr(xxh3.SCRAMBLE_WORD)
_SCRAMBLE_PRIME: tl.constexpr = tl.constexpr(xxh3.SCRAMBLE_PRIME)


@triton.jit  # type: ignore[untyped-decorator]
def sum_stripes(tiles: tl.tensor, secret: tl.tensor, sums: tl.tensor, BLOCKS: tl.constexpr) -> None:
    """Eight words for every block. A tile is (address of its first block, on a multiple of 16;
    blocks, up to BLOCKS; number of its first block in `sums`)."""
    tile = tiles + 3 * tl.program_id(0)
    data = tl.multiple_of(tl.load(tile).to(tl.pointer_type(tl.uint64), bitcast=True), 16)
    blocks = tl.load(tile + 1)
    block = tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, 8)[None, :]
    products = tl.zeros((BLOCKS, 8), tl.uint64)
    plain = tl.zeros((BLOCKS, 8), tl.uint64)
    for stripe in tl.static_range(16):
        words = tl.load(data + (128 * block + 8 * stripe + lane), mask=block < blocks, other=0)
        keyed = words ^ tl.load(secret + stripe + lane)
        products += (keyed & 0xFFFFFFFF) * (keyed >> 32)
        plain += words
    # A word is added to the lane beside its own.
    even, odd = tl.split(tl.reshape(plain, (BLOCKS, 4, 2)))
    swapped = tl.reshape(tl.join(odd, even), (BLOCKS, 8))
    at = sums + (8 * (tl.load(tile + 2) + block) + lane)
    tl.store(at, products + swapped, mask=block < blocks)


@triton.jit  # type: ignore[untyped-decorator]
def chain_sums(
    rows: tl.tensor, secret: tl.tensor, sums: tl.tensor, states: tl.tensor, STEP: tl.constexpr
) -> None:
    """Brings states forward. A row is (number of its first block in `sums`, blocks, number of its
    eight words in `states`)."""
    row = rows + 3 * tl.program_id(0)
    lane = tl.arange(0, 8)
    at = sums + (8 * tl.load(row) + lane)
    left = tl.load(row + 1)
    place = states + (8 * tl.load(row + 2) + lane)
    key = tl.load(secret + _SCRAMBLE_WORD + lane)
    state = tl.load(place)
    taken = _loaded(at, STEP)
    while left >= STEP:
        ahead = _loaded(at + 8 * STEP, STEP)
        for block in tl.static_range(STEP):
            state = _scrambled(state + taken[block], key)
        taken = ahead
        at += 8 * STEP
        left -= STEP
    while left > 0:
        state = _scrambled(state + tl.load(at), key)
        at += 8
        left -= 1
    tl.store(place, state)


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(at: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    found: tl.tuple = ()
    for block in tl.static_range(STEP):
        found = found + (tl.load(at + 8 * block),)  # noqa: RUF005 - Triton unpacks no tuples
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _scrambled(state: tl.tensor, key: tl.tensor) -> tl.tensor:
    return (state ^ (state >> 47) ^ key) * _SCRAMBLE_PRIME
