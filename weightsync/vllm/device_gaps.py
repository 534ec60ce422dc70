"""Positions of changes, read by a device from what a delta stores of them: a piece at a time.

Takes gap streams (elements/scan.py) and gaps in groups (elements/groups.py). Every piece is of at
most CHANGES_AT_ONCE changes or bytes, so memory on the device does not grow with a delta. The host
counts bits where that says where a piece begins, and sends bytes as they are stored.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from weightsync.elements.bits import Bytes
from weightsync.elements.grouped import Gaps
from weightsync.elements.groups import GROUP, WORD_BYTES
from weightsync.elements.scan import GAP_ESCAPE

CHANGES_AT_ONCE = 1 << 20
_WORD_BITS = 8 * WORD_BYTES
_WORDS_AT_ONCE = CHANGES_AT_ONCE // _WORD_BITS

Words: TypeAlias = npt.NDArray[np.uint64]


def sent(data: Bytes, device: torch.device) -> torch.Tensor:
    """A copy on the device. From pinned memory, where there is one that copies by itself: the host
    goes on at once, and the allocator keeps the memory until the copy is done."""
    staging = torch.empty(data.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.copyto(staging.numpy(), data)
    return staging.to(device, non_blocking=True)


def bits_within(data: Bytes, first: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` bits from bit `first` on, each a byte; the lowest bit of a byte comes first."""
    skipped = first // 8
    held = sent(data[skipped : -(-(first + count) // 8)], device)
    return _bits(held)[first - 8 * skipped :][:count]


def stream_places(gaps: Bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Positions of the changes that a gap stream describes."""
    after = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, gaps.size, CHANGES_AT_ONCE):
        piece = sent(gaps[start : start + CHANGES_AT_ONCE], device)
        is_change = piece != GAP_ESCAPE
        # No byte runs over: an escape is no change.
        places = torch.cumsum(piece + is_change, 0, dtype=torch.int64).add_(after)
        after = places[-1].clone()
        yield places.sub_(1)[is_change]


def group_places(gaps: Gaps, low_bits: Bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Positions of the changes whose gaps are stored in groups."""
    after = torch.zeros((), dtype=torch.int64, device=device)
    for piece in group_gaps(gaps, low_bits, device):
        places = piece.add_(1).cumsum(0).add_(after)
        after = places[-1].clone()
        yield places.sub_(1)


def group_gaps(gaps: Gaps, low_bits: Bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Gaps, or codes, that lie in groups; `low_bits` of all groups there are."""
    kept = low_bits[gaps.first :][: -(-gaps.changes // GROUP)]
    planes_before = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])
    ones_up_to = np.cumsum(np.bitwise_count(gaps.highs.view("<u8")), dtype=np.int64)
    for first in range(0, gaps.changes, CHANGES_AT_ONCE):
        count = min(CHANGES_AT_ONCE, gaps.changes - first)
        groups = slice(first // GROUP, -(-(first + count) // GROUP))
        zeros = _zeros_before(gaps.highs, ones_up_to, first, count, device)
        rows = pad(zeros, (0, -count % GROUP)).view(-1, GROUP)
        low_planes = slice(planes_before[groups.start], planes_before[groups.stop])
        lows = gaps.lows[WORD_BYTES * low_planes.start : WORD_BYTES * low_planes.stop]
        yield _with_lows(rows, kept[groups], lows).view(-1)[:count]


def _zeros_before(
    highs: Bytes, ones_up_to: npt.NDArray[np.int64], first: int, count: int, device: torch.device
) -> torch.Tensor:
    """Zeros before each of `count` ones from the one with that number on.

    `ones_up_to`: how many there are up to the end of each word.
    """
    before = first - 1
    word = int(np.searchsorted(ones_up_to, before, side="right")) if first else 0
    stop = int(np.searchsorted(ones_up_to, before + count, side="right")) + 1
    found = []
    for start in range(word, stop, _WORDS_AT_ONCE):
        words = slice(start, min(stop, start + _WORDS_AT_ONCE))
        held = sent(highs[WORD_BYTES * words.start : WORD_BYTES * words.stop], device)
        found.append(torch.nonzero(_bits(held)).view(-1).add_(_WORD_BITS * start))
    ones = found[0] if len(found) == 1 else torch.cat(found)
    if not first:
        return torch.diff(ones[:count], prepend=ones.new_full((1,), -1)).sub_(1)
    skipped = before - (int(ones_up_to[word - 1]) if word else 0)
    return torch.diff(ones[skipped : skipped + 1 + count]).sub_(1)


def _with_lows(zeros: torch.Tensor, kept: Bytes, lows: Bytes) -> torch.Tensor:
    """Gaps of whole groups, from the unary parts and the planes of their low bits."""
    device, planes_of = zeros.device, sent(kept, zeros.device).long()
    starts = torch.cumsum(planes_of, 0) - planes_of
    planes = _bits(sent(lows, device)).view(-1, GROUP)
    gaps = zeros << planes_of[:, None]
    for plane in range(int(kept.max())):
        # Groups without this plane read another one and take nothing of it.
        there = planes[(starts + plane).clamp_(max=planes.shape[0] - 1)]
        there *= (planes_of > plane)[:, None]
        gaps |= there.long() << plane
    return gaps


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Each bit of bytes, the lowest first."""
    bit = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> bit) & 1).view(-1)
