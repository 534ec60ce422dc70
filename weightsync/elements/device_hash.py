"""`digest_of` tensors on the device where they lie, so that no weights travel to be checked.

Kernels (hash_kernels.py) take all whole blocks; up to 1088 bytes from the end of each tensor come
to the host, where the library's last steps are a few products. The device holds SCRATCH_BYTES and
two small tables for it, however large the state is.

A chain of blocks is walked by one program, which a GPU is slow at, so all chains walk side by side:
a state takes about as long as its largest tensor.
"""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from harvester.contracts.errors import Unsupported
from weightsync.elements import xxh3
from weightsync.elements.bits import bits_of
from weightsync.elements.state_hash import digest_of

_logger = logging.getLogger("rosemux.weightsync")

SCRATCH_BYTES = 64 << 20
"""Memory for the sums of blocks, in bytes: enough for a GiB of tensors at a time."""
_SUMS_BYTES = 64
_ALIGNED_BYTES = 16
_PROOF_BYTES = (xxh3.MIN_BYTES, 4 << 10, (3 << 20) + 5)
HOST = "cpu"

Int64s = npt.NDArray[np.int64]


def digests_on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """xxh3-128 of every tensor's bytes, as `digest_of` says it; all tensors lie on one device.

    Tensors on the host, below MIN_BYTES or at odd addresses are the library's, on the host. Raises
    Unsupported for a tensor that is not contiguous.
    """
    data = {name: _bytes(name, tensor) for name, tensor in tensors.items()}
    there = [name for name in data if _is_for_kernels(data[name])]
    digests = dict(zip(there, kernel_digests([data[name] for name in there]), strict=True))
    return {
        name: digests[name] if name in digests else digest_of(bits_of(data[name].cpu()))
        for name in tensors
    }


@cache
def is_proven(device: torch.device) -> bool:
    """Whether the kernels run on this device and agree with the library: seconds when first asked,
    as they are compiled then. False on the host."""
    if device.type == HOST:
        return False
    generator = np.random.default_rng(0)
    data = [generator.integers(0, 256, size, dtype=np.uint8) for size in _PROOF_BYTES]
    try:
        found = kernel_digests([torch.from_numpy(part).to(device) for part in data])
    except Exception as error:
        # No Triton, no C compiler for its launcher, or a GPU that Triton does not support.
        _logger.warning("weights of %s are hashed on the host: %r", device, error)
        return False
    if found != [digest_of(part) for part in data]:
        _logger.warning("weights of %s are hashed on the host: its kernels hash wrongly", device)
        return False
    return True


def kernel_digests(
    data: Sequence[torch.Tensor], *, scratch_bytes: int = SCRATCH_BYTES
) -> list[str]:
    """Digests by the kernels alone, of flat bytes on one device: each MIN_BYTES or more, on a
    multiple of 16."""
    if not data:
        return []
    sizes = np.array([part.numel() for part in data], dtype=np.int64)
    # The last block, whole or not, is taken differently.
    blocks = (sizes - 1) // xxh3.BLOCK_BYTES
    with torch.cuda.device_of(data[0]):  # type: ignore[no-untyped-call]
        states = _states(data, blocks, max(1, scratch_bytes // _SUMS_BYTES))
        starts = np.maximum(0, xxh3.BLOCK_BYTES * blocks - xxh3.STRIPE_BYTES)
        ends = torch.cat([part[start:] for part, start in zip(data, starts.tolist(), strict=True)])
        last = np.split(ends.cpu().numpy(), np.cumsum(sizes - starts)[:-1])
    digests = []
    for state, end, taken, size in zip(states, last, blocks, sizes, strict=True):
        start = xxh3.STRIPE_BYTES if taken else 0
        high, low = xxh3.finished_by_end(state, end, start, np.uint64(size))
        digests.append(f"{int(high):016x}{int(low):016x}")
    return digests


def _states(
    data: Sequence[torch.Tensor], blocks: Int64s, blocks_at_once: int
) -> npt.NDArray[np.uint64]:
    """The accumulators of each tensor after its whole blocks."""
    from weightsync.elements.hash_kernels import (
        BLOCKS_AT_ONCE,
        SPARE_BLOCKS,
        STEP_BLOCKS,
        chain_sums,
        sum_stripes,
    )

    device = data[0].device
    addresses = np.array([part.data_ptr() for part in data], dtype=np.int64)
    secret = torch.from_numpy(xxh3.SECRET_WORDS.copy()).to(device)
    states = torch.from_numpy(np.tile(xxh3.started(), (len(data), 1))).to(device)
    room = min(int(blocks.sum()), blocks_at_once) + SPARE_BLOCKS
    sums = torch.empty((room, 8), dtype=torch.uint64, device=device)
    done = np.zeros_like(blocks)
    while (done < blocks).any():
        shares = next_shares(blocks - done, blocks_at_once)
        taking = np.flatnonzero(shares)
        counts = shares[taking]
        starts = np.cumsum(counts) - counts
        behind = addresses[taking] + xxh3.BLOCK_BYTES * done[taking]
        tiles = torch.from_numpy(_tiles(behind, counts, starts, BLOCKS_AT_ONCE)).to(device)
        rows = torch.from_numpy(np.stack([starts, counts, taking], axis=1)).to(device)
        sum_stripes[(len(tiles),)](tiles, secret, sums, BLOCKS=BLOCKS_AT_ONCE, num_warps=4)
        chain_sums[(len(rows),)](rows, secret, sums, states, STEP=STEP_BLOCKS, num_warps=1)
        done += shares
    found: npt.NDArray[np.uint64] = states.cpu().numpy()
    return found


def next_shares(left: Int64s, blocks: int) -> Int64s:
    """Number of next blocks of each tensor, at most `blocks` in all.

    The tensors get equal numbers where possible, so that the longest chain walks alone as briefly
    as possible.
    """
    level = bisect_right(
        range(int(left.max()) + 1), blocks, key=lambda level: int(np.minimum(left, level).sum())
    )
    shares = np.minimum(left, max(1, level - 1))
    # Where there are more tensors than blocks to take, the later ones wait.
    shares[np.cumsum(shares) > blocks] = 0
    return shares


def _tiles(addresses: Int64s, counts: Int64s, starts: Int64s, blocks: int) -> Int64s:
    """A row of `sum_stripes` for every `blocks` blocks of each tensor."""
    tiles = -(-counts // blocks)
    of = np.repeat(np.arange(counts.size), tiles)
    before = blocks * (np.arange(of.size) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    columns = (
        addresses[of] + xxh3.BLOCK_BYTES * before,
        np.minimum(blocks, counts[of] - before),
        starts[of] + before,
    )
    return np.stack(columns, axis=1)


def _bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as flat bytes."""
    if not tensor.is_contiguous():
        raise Unsupported(f"{name} is not contiguous: call `.contiguous()` first")
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().view(-1).view(torch.uint8)


def _is_for_kernels(data: torch.Tensor) -> bool:
    is_large = data.numel() >= xxh3.MIN_BYTES
    return is_large and data.device.type != HOST and data.data_ptr() % _ALIGNED_BYTES == 0
