"""The `groups` layout of a delta: what `sparse` says, made to be read while it is applied.

Gaps are entropy-coded by themselves (groups.py), so nothing is unpacked before the loop that changes
a tensor but the few differences of more than one unit. Decides when that is worth it: where changes
have a structure that a compressor finds, `sparse` stays much smaller.

Behind the elements of the tensor: varints small, far, words of highs, far ones, bytes of wide codes;
streams low bits of both, signs (a word a group), codes; then as they are lows, highs, far lows, far
highs, wide codes.
"""

import numpy as np

from harvester.contracts.errors import Corrupt
from weightsync.elements import groups
from weightsync.elements.bits import Bytes
from weightsync.elements.grouped import CODE_ESCAPE, write_codes
from weightsync.elements.groups import GROUP, MAX_LOW_BITS, WORD_BYTES, Groups
from weightsync.elements.scan import GAP_ESCAPE
from weightsync.encoding.delta import GroupedDelta
from weightsync.encoding.sparse import SparseStreams
from weightsync.encoding.stream import pack_stream, unpack_stream
from weightsync.encoding.varint import PayloadReader, varint

GROUPS = 2
"""The layout of a payload that holds groups."""
_LEAST_CHANGES = 1024
"""Fewer are unpacked in no time."""
_WIDE_SHARE = 1 / 16
"""Of the differences may take more than a byte; more are smaller in planes."""
_SAMPLE_BYTES = 8 << 10
_WORTH_RATIO = 1.04
"""How much larger gaps in groups may be than compressed ones."""


def grouped_payload(head: bytes, elements: int, found: SparseStreams) -> bytes | None:
    """`head` and the changes in groups, or None where `sparse` is the better layout for them."""
    if found.changed < _LEAST_CHANGES or not _is_worth_it(found.gaps, elements):
        return None
    codes = np.empty(found.far, dtype=np.uint8)
    width = found.far_planes.shape[0]
    wide = np.empty(width * int(found.far * _WIDE_SHARE), dtype=np.uint8)
    wide_bytes = write_codes(found.far_planes, codes, wide)
    if wide_bytes < 0:
        return None
    small = _grouped(found.gaps, found.small, elements)
    far = _grouped(found.far_gaps, found.far, elements)
    signs = np.zeros(WORD_BYTES * small.low_bits.size, dtype=np.uint8)
    signs[: found.signs.size] = found.signs
    numbers = (
        found.small,
        found.far,
        small.highs.size // WORD_BYTES,
        far.highs.size // WORD_BYTES,
        wide_bytes,
    )
    low_bits = np.concatenate([small.low_bits, far.low_bits])
    return b"".join(
        [
            head,
            *map(varint, numbers),
            *map(_stream, (low_bits, signs, codes)),
            *(part.data for part in (small.lows, small.highs, far.lows, far.highs)),
            wide[:wide_bytes].data,
        ]
    )


def decode_grouped(reader: PayloadReader, elements: int, width: int) -> GroupedDelta:
    """What `head` was followed by; raises Corrupt."""
    small_count = reader.number(at_most=elements)
    far_count = reader.number(at_most=elements - small_count)
    most_words = (elements + small_count + far_count) // 64 + 1
    small_words, far_words = (reader.number(at_most=most_words) for _ in range(2))
    wide_bytes = reader.number(at_most=width * far_count)
    small_groups, far_groups = (-(-count // GROUP) for count in (small_count, far_count))
    low_bits = _read(reader, small_groups + far_groups)
    signs = _read(reader, WORD_BYTES * small_groups)
    codes = _read(reader, far_count)
    if low_bits.size and int(low_bits.max()) > MAX_LOW_BITS:
        raise Corrupt(f"rosemux groups: {low_bits.max()} low bits, more than {MAX_LOW_BITS}")
    small = _taken(reader, small_count, low_bits[:small_groups], small_words)
    far = _taken(reader, far_count, low_bits[small_groups:], far_words)
    wide = _bytes(reader, wide_bytes)
    if width * np.count_nonzero(codes == CODE_ESCAPE) != wide_bytes:
        raise Corrupt(f"rosemux groups: {wide_bytes} bytes are not the wide differences")
    for what, gaps in (("changes", small), ("far changes", far)):
        end = groups.groups_end(gaps)
        if not 0 <= end <= elements:
            raise Corrupt(f"rosemux groups: {what} up to {end} in {elements} elements")
    return GroupedDelta(elements, small, signs, far, codes, wide)


def _is_worth_it(gaps: Bytes, elements: int) -> bool:
    """Whether gaps from the middle of a stream are about as small in groups as compressed."""
    start = max(0, gaps.size - _SAMPLE_BYTES) // 2
    sample = gaps[start : start + _SAMPLE_BYTES]
    changes = np.flatnonzero(sample != GAP_ESCAPE)
    if changes.size == 0:
        return False
    sample = sample[: changes[-1] + 1]
    made = _grouped(sample, changes.size, elements)
    made_bytes = made.lows.size + made.highs.size
    return made_bytes <= _WORTH_RATIO * len(pack_stream(sample))


def _grouped(gaps: Bytes, changes: int, elements: int) -> Groups:
    count = -(-changes // GROUP)
    low_bits = np.empty(count, dtype=np.uint8)
    lows = np.empty(WORD_BYTES * MAX_LOW_BITS * count, dtype=np.uint8)
    highs = np.empty(groups.highs_room(changes, elements), dtype=np.uint8)
    low_bytes, high_bytes = groups.write_groups(gaps, changes, low_bits, lows, highs)
    return Groups(changes, low_bits, lows[:low_bytes], highs[:high_bytes])


def _taken(reader: PayloadReader, changes: int, low_bits: Bytes, words: int) -> Groups:
    lows = _bytes(reader, WORD_BYTES * int(low_bits.sum()))
    return Groups(changes, low_bits, lows, _bytes(reader, WORD_BYTES * words))


def _stream(raw: Bytes) -> bytes:
    packed = pack_stream(raw)
    return varint(len(packed)) + packed


def _read(reader: PayloadReader, raw_length: int) -> Bytes:
    packed = reader.take(reader.number(at_most=raw_length))
    return unpack_stream(packed, raw_length)


def _bytes(reader: PayloadReader, length: int) -> Bytes:
    return np.frombuffer(reader.take(length), dtype=np.uint8)
