"""The `classes` layout of a delta: changes coded by the exponents that they change (classes.py).

A quarter smaller than other layouts, and of use only to a holder of the whole tensor before the
change: it can be neither cut nor added to another. After the elements of the tensor: a byte of step
key, a byte of classes in use, then for each class its bound, its low bits of gaps and of fars in a
byte each, and a varint of its codes' bytes; then the codes.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from harvester.contracts.errors import Corrupt
from weightsync.elements import xxh3
from weightsync.elements.bits import TILE_BYTES, Bits, Bytes, bytes_of
from weightsync.elements.classes import (
    CLASSES,
    CODE_BYTES,
    MOST_LOW_BITS,
    PADDING_BYTES,
    Tables,
    Words,
    apply_classes,
    count_keys,
    find_changes,
    write_codes,
)
from weightsync.elements.group_writing import low_bits_for
from weightsync.elements.state_hash import digest_from
from weightsync.encoding.sparse import FORMAT
from weightsync.encoding.varint import PayloadReader, varint

IN_CLASSES = 3
"""Layout number of a payload that holds classes."""
WIDTHS_BYTES = frozenset({2, 4})
_KEYS = 256
_MOST_ELEMENTS = (1 << 32) - 1
"""A gap takes 32 bits at most."""
_CLASS_BITS = 32.0
"""The least cost of a class."""
_SAMPLED_STEPS = 1 << 16


@dataclass(frozen=True, slots=True)
class ClassesDelta:
    """The changes of a payload, whose positions take the old elements to know."""

    elements: int
    codes: Bytes
    tables: Tables

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        """See delta.py."""
        data, sums = bytes_of(bits), xxh3.started()
        apply_classes(bits, data, self.codes, self.tables, sums, hashed)
        return digest_from(sums, data) if hashed else ""


def decode_classes(reader: PayloadReader, elements: int, width: int) -> ClassesDelta:
    """Check a payload's tables; raises Corrupt. Codes that belong to no state change elements at
    random, which its hash shows."""
    step_key, classes = reader.take(2)
    if width not in WIDTHS_BYTES or elements > _MOST_ELEMENTS or not 0 < classes <= CLASSES:
        raise Corrupt(f"rosemux classes: {classes} of {elements} elements of {width} bytes")
    table = np.zeros((3, CLASSES), np.uint8)
    sizes = np.zeros(CLASSES + 1, np.int64)
    for number in range(classes):
        table[:, number] = np.frombuffer(reader.take(3), np.uint8)
        sizes[number + 1] = reader.number(at_most=1 << 40)
    bounds, gap_bits, far_bits = table
    if bounds[classes - 1] or (np.diff(bounds.astype(int)[:classes]) >= 0).any():
        raise Corrupt(f"rosemux classes: bounds {bounds[:classes].tolist()} do not fall to 0")
    if max(gap_bits.max(), far_bits.max()) > MOST_LOW_BITS:
        raise Corrupt(f"rosemux classes: codes of more than {MOST_LOW_BITS} low bits")
    starts = np.cumsum(sizes)
    packed = np.frombuffer(reader.take(int(starts[-1])), np.uint8)
    codes = np.concatenate([packed, np.zeros(PADDING_BYTES, np.uint8)])
    begins = np.where(sizes[1:] > 0, starts[:-1], codes.size).astype(np.uint64)
    return ClassesDelta(
        elements, codes, Tables(bounds, gap_bits, far_bits, begins, np.uint64(step_key))
    )


def classes_payload(old: Bits, new: Bits, digest: str = "") -> bytes:
    """The changes of a tensor of WIDTHS_BYTES; empty if there are none, or if `new`, which may be a
    trainer's live memory, changes meanwhile or from the state of `digest`, where it is given."""
    elements, changed = np.zeros(_KEYS, np.uint64), np.zeros(_KEYS, np.uint64)
    count_keys(old, new, elements, changed)
    if old.size > _MOST_ELEMENTS or not changed.any():
        return b""
    bounds = _bounds(elements.astype(float), changed.astype(float))
    ends, stops = np.zeros(CLASSES, np.uint64), np.zeros(CLASSES, np.uint64)
    in_class = np.add.reduceat(changed[::-1], 255 - _uppers(bounds)).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(in_class)])
    ends[: bounds.size], stops[: bounds.size] = starts[:-1], starts[1:]
    gaps, steps = np.empty(starts[-1], np.uint64), np.empty(starts[-1], np.uint64)
    after, passed = np.zeros(CLASSES, np.uint64), np.zeros(2 * CLASSES, np.uint64)
    table = np.zeros(CLASSES, np.uint8)
    table[: bounds.size] = bounds
    # Hashed and compared from one private copy, so that the changes lead to the hashed state.
    held, found = np.empty(TILE_BYTES // new.itemsize, new.dtype), xxhash.xxh3_128()
    for start in range(0, new.size, held.size):
        part = held[: new.size - start]
        np.copyto(part, new[start : start + held.size])
        found.update(bytes_of(part).data)
        before = old[start : start + held.size]
        if not find_changes(before, part, table, gaps, steps, ends, stops, after, passed):
            return b""
    if (ends != stops).any() or digest not in {"", found.hexdigest()}:
        return b""
    after = passed[:CLASSES] - after
    step_key = _step_key(steps)
    head = [bytes((FORMAT, IN_CLASSES, old.itemsize)), varint(old.size)]
    head.append(bytes((step_key, bounds.size)))
    made = []
    for number, bound in enumerate(bounds.tolist()):
        mine = slice(starts[number], starts[number + 1])
        gap_bits, far_bits, codes = _codes(gaps[mine], steps[mine], after[number], step_key)
        head += [bytes((bound, gap_bits, far_bits)), varint(len(codes))]
        made.append(codes)
    return b"".join([*head, *made])


def _codes(gaps: Words, steps: Words, after: np.uint64, step_key: int) -> tuple[int, int, bytes]:
    """(low bits of gaps, of fars, codes) of one class."""
    if not gaps.size:
        return 0, 0, b""
    fars = np.count_nonzero(steps >> np.uint64(9) != 1)
    gap_bits = np.uint64(low_bits_for(gaps.sum() + after, np.uint64(gaps.size + 1)))
    far_bits = np.uint64(low_bits_for(np.uint64(gaps.size - fars), np.uint64(fars + 1)))
    # Zeroed by the system as they are written to: the codes take a tenth of this memory.
    codes = np.zeros(CODE_BYTES * (gaps.size + 1) + PADDING_BYTES, np.uint8)
    size_bits = write_codes(gaps, steps, after, gap_bits, far_bits, np.uint64(step_key), codes)
    return int(gap_bits), int(far_bits), codes[: (size_bits + 7) // 8].tobytes()


def _step_key(steps: Words) -> int:
    """The key at which steps take no low bits, for the mean of the changes by several units."""
    steps = steps[:: 1 + steps.size // _SAMPLED_STEPS]
    magnitudes, keys = steps >> np.uint64(9), (steps >> np.uint64(1)) & np.uint64(255)
    far = magnitudes > 2
    if not far.any():
        return 0
    doublings = np.log2(magnitudes[far].astype(float)) + keys[far].astype(float)
    return int(np.clip(round(float(doublings.mean()) - 0.5), 0, 255))


def _uppers(bounds: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The greatest key of each class."""
    return np.concatenate([[255], bounds[:-1].astype(np.int64) - 1])


def _bounds(elements: npt.NDArray[np.float64], changed: npt.NDArray[np.float64]) -> Bytes:
    """Least keys of at most CLASSES classes, falling to 0, for which an independent change mask has
    the least entropy."""
    elements = np.maximum(elements, changed)
    keys = np.flatnonzero(elements)[::-1]
    total, hit = (np.concatenate([[0], np.cumsum(of[keys])]) for of in (elements, changed))
    ours = total[None, :] - total[:, None], hit[None, :] - hit[:, None]
    costs = np.full(ours[0].shape, np.inf)
    upper = np.triu_indices(total.size, 1)
    costs[upper] = _mask_bits(ours[0][upper], ours[1][upper]) + _CLASS_BITS
    least = costs[0]
    choices = []
    ends = [least[-1]]
    for _ in range(CLASSES - 1):
        through = least[:, None] + costs
        choices.append(through.argmin(axis=0))
        least = through.min(axis=0)
        ends.append(least[-1])
    at, first = keys.size, []
    for choice in reversed(choices[: int(np.argmin(ends))]):
        at = int(choice[at])
        first.append(at)
    return np.array([*(keys[i - 1] for i in reversed(first)), 0], np.uint8)


def _mask_bits(
    elements: npt.NDArray[np.float64], changed: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Entropy of which elements changed."""
    unchanged = elements - changed
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = changed * np.log2(elements / changed), unchanged * np.log2(elements / unchanged)
    entropy: npt.NDArray[np.float64] = np.nan_to_num(bits[0]) + np.nan_to_num(bits[1])
    return entropy
