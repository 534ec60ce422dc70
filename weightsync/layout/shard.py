"""Writes and reads one safetensors file without a framework.

numpy has no bfloat16, and a delta shard must be checked before use, so the format's header is
handled here: 8 bytes of length, a JSON object of dtype, shape and offsets, then the data. A large
header of a delta is packed: the file then has a single tensor, which consists of 8 bytes of length,
a compressed table of names, sizes and checksums, and the payloads. The sums of the tensors that the
entries become (box_sums.py) are one string of its metadata. Never opens a file: it takes and
returns bytes.
"""

import base64
import binascii
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec

from harvester.contracts.errors import UNDECODABLE, Corrupt, Unsupported
from weightsync.elements.bits import PAIRED, Bytes, Layout, TensorSpec, checked_spec, shared_spec
from weightsync.layout.tables import packed_table, plain_table

MAX_HEADER_BYTES = 32 << 20
MAX_NAME_CHARS = 512
_ENTRY_BYTES = 272
"""Bound on all but the name of a tensor in a header: dtype, eight dimensions, offsets, checksum and
sum."""
_LENGTH_BYTES = 8
_PACKED = "rosemux.packed"
_PACKED_ABOVE = 256
"""Payloads up to which a header stays as any reader of safetensors knows it."""
_METADATA = "__metadata__"
_SUMS = "rosemux.sums"
"""Key of all sums in the metadata: base64 of eight bytes each, least significant first, in the
order of the sorted names. An older reader passes over it."""
_SUM_BYTES = 8
RESERVED_NAMES = frozenset({_PACKED, _METADATA, _SUMS})
_JOINED_BYTES = 64 << 10


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    def spec(self, *, what: str) -> TensorSpec:
        """Raises Unsupported or Corrupt, naming `what`."""
        shape = tuple(self.shape)
        if self.dtype == PAIRED:
            # Headers count the numbers, specs their pairs.
            if not shape or shape[-1] % 2:
                raise Unsupported(f"{what}: {PAIRED} of shape {shape} splits a byte between rows")
            shape = (*shape[:-1], shape[-1] // 2)
        return checked_spec(self.dtype, shape, what=what)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packed header: of each payload in order."""

    names: list[str]
    sizes: list[Annotated[int, msgspec.Meta(ge=0)]]
    checksums: list[str]


_entry = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """Tensors of a shard and their offsets, which count from the first byte of the file."""

    layout: Layout
    offsets: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, str]
    sums: Mapping[str, int] = field(default_factory=dict)
    """Sum of each tensor that an entry is or leads to; empty if the writer gave none."""

    def size_bytes(self, name: str) -> int:
        begin, end = self.offsets[name]
        return end - begin


def header_room(name: str) -> int:
    """Bytes of a header that are enough for a tensor and its checksum."""
    return 2 * len(msgspec.json.encode(name)) + _ENTRY_BYTES


def shard_layouts(layout: Layout, limit_bytes: int) -> Iterator[dict[str, TensorSpec]]:
    """Tensors of each file, in order: up to `limit_bytes`, or one larger tensor, within a header of
    MAX_HEADER_BYTES."""
    shard: dict[str, TensorSpec] = {}
    left_bytes, left_header = limit_bytes, MAX_HEADER_BYTES
    for name, spec in layout.items():
        room = header_room(name)
        if shard and (spec.size_bytes > left_bytes or room > left_header):
            yield shard
            shard, left_bytes, left_header = {}, limit_bytes, MAX_HEADER_BYTES
        shard[name] = spec
        left_bytes -= spec.size_bytes
        left_header -= room
    if shard:
        yield shard


def widest_first(layout: Layout) -> Layout:
    """The tensors in such an order that each begins at a multiple of its element."""
    return dict(sorted(layout.items(), key=lambda part: (-part[1].width_bytes, part[0])))


def shard_chunks(
    layout: Layout,
    read: Callable[[str], Any],
    metadata: Mapping[str, str],
    *,
    sums: Mapping[str, int] | None = None,
    may_pack: bool = False,
) -> Iterator[Any]:
    """The file's bytes, as buffers to write in order; calls `read` for one tensor after another.

    `sums`: of all tensors, or None. With `may_pack`, the header of many payloads is packed, which
    only this module reads; `metadata` then has the checksum of each.
    """
    packs = may_pack and len(layout) > _PACKED_ABOVE
    summed = {_SUMS: _encoded_sums(layout, sums)} if sums else {}
    if packs:
        yield _packed_head(layout, metadata, summed)
    else:
        yield _head(layout, {**metadata, **summed})
    yield from _joined(map(read, layout))


def _encoded_sums(layout: Layout, sums: Mapping[str, int]) -> str:
    words = b"".join(sums[name].to_bytes(_SUM_BYTES, "little") for name in sorted(layout))
    return base64.b64encode(words).decode()


def _decoded_sums(layout: Layout, encoded: str) -> dict[str, int]:
    try:
        words = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Corrupt(f"sums in a header: {error}") from error
    if len(words) != _SUM_BYTES * len(layout):
        raise Corrupt(f"sums of {len(words)} bytes in a header of {len(layout)} tensors")
    return {
        name: int.from_bytes(words[_SUM_BYTES * i : _SUM_BYTES * (i + 1)], "little")
        for i, name in enumerate(sorted(layout))
    }


def _packed_head(
    layout: Layout, checksums: Mapping[str, str], metadata: Mapping[str, str]
) -> bytes:
    sizes = [spec.size_bytes for spec in layout.values()]
    table = _Table([*layout], sizes, [checksums[name] for name in layout])
    packed = packed_table(msgspec.json.encode(table))
    size_bytes = _LENGTH_BYTES + len(packed) + sum(sizes)
    head = _head({_PACKED: shared_spec("U8", (size_bytes,))}, metadata)
    return head + len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


def _joined(buffers: Iterable[Any]) -> Iterator[Any]:
    """Join small buffers: hashing and writing each takes longer than copying it."""
    run: list[Any] = []
    run_bytes = 0
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        if run and run_bytes + size > _JOINED_BYTES:
            yield b"".join(run)
            run, run_bytes = [], 0
        if size > _JOINED_BYTES:
            yield buffer
        else:
            run.append(buffer)
            run_bytes += size
    if run:
        yield b"".join(run)


def _head(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, spec in layout.items():
        shape = list(spec.shape)
        if spec.dtype == PAIRED:
            shape[-1] *= 2
        header[name] = _Entry(spec.dtype, shape, (at, at + spec.size_bytes))
        at += spec.size_bytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def _parsed_header(raw: bytes | bytearray, *, file_bytes: int) -> ShardHeader:
    """Parse the header `raw` of a file of `file_bytes` bytes; raises Corrupt if it is invalid."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop(_METADATA, b"{}"), type=dict[str, str])
        entries = {name: _entry.decode(value) for name, value in fields.items()}
    except UNDECODABLE as error:
        raise Corrupt(f"safetensors header: {error}") from error
    start = _LENGTH_BYTES + len(raw)
    layout: dict[str, TensorSpec] = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        _check_name(name)
        spec = entry.spec(what=f"tensor {name!r}")
        begin, end = (start + offset for offset in entry.data_offsets)
        if not start <= begin <= end <= file_bytes or end - begin != spec.size_bytes:
            raise Corrupt(f"tensor {name!r}: bytes {begin} to {end} of a file of {file_bytes}")
        layout[name] = spec
        offsets[name] = (begin, end)
    _check_filled(raw, offsets, file_bytes)
    return ShardHeader(layout, offsets, metadata)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise Corrupt(f"tensor name of {len(name)} characters")


def _unpacked_header(raw: bytes | bytearray, *, start: int, file_bytes: int) -> ShardHeader:
    try:
        plain = plain_table(bytes(raw), limit_bytes=MAX_HEADER_BYTES)
        table = msgspec.json.decode(plain, type=_Table)
    except UNDECODABLE as error:
        raise Corrupt(f"packed header: {error}") from error
    if not len(table.names) == len(table.sizes) == len(table.checksums) == len({*table.names}):
        raise Corrupt("packed header: names, sizes and checksums do not match")
    layout: dict[str, TensorSpec] = {}
    offsets: dict[str, tuple[int, int]] = {}
    at = start
    for name, size in zip(table.names, table.sizes, strict=True):
        _check_name(name)
        layout[name] = shared_spec("U8", (size,))
        offsets[name] = (at, at + size)
        at += size
    if at != file_bytes:
        raise Corrupt(f"packed header: payloads end at byte {at} of a file of {file_bytes}")
    return ShardHeader(layout, offsets, dict(zip(table.names, table.checksums, strict=True)))


def _check_filled(
    raw: bytes | bytearray, offsets: Mapping[str, tuple[int, int]], file_bytes: int
) -> None:
    """Raises Corrupt unless the tensors fill the file, as safetensors' own reader demands. A name
    that occurs twice counts with its last entry, so that the bytes of the first are a gap."""
    at = _LENGTH_BYTES + len(raw)
    for begin, end in sorted(offsets.values()):
        if begin != at:
            break
        at = end
    else:
        if at == file_bytes:
            return
    names = Counter(name for name, _ in json.loads(raw, object_pairs_hook=list))
    twice = next((f": {name!r} is named twice" for name in names if names[name] > 1), "")
    raise Corrupt(f"safetensors header: tensors leave a gap or overlap at byte {at}{twice}")


def read_header(
    read: Callable[[int, int], bytes | bytearray], *, file_bytes: int, what: str
) -> ShardHeader:
    """The header of the file `what`, or the packed one in it. `read` gives the bytes between two
    offsets; raises Corrupt."""

    def at(start: int) -> bytes | bytearray:
        """The bytes behind the length that lies at `start`."""
        begin = start + _LENGTH_BYTES
        prefix = read(start, min(begin, file_bytes))
        length = int.from_bytes(prefix, "little")
        if len(prefix) != _LENGTH_BYTES or length > MAX_HEADER_BYTES:
            raise Corrupt(f"not a safetensors file: header of {length} bytes")
        if begin + length > file_bytes:
            raise Corrupt(f"{what}: a header of {length} bytes in {file_bytes}")
        return read(begin, begin + length)

    header = _parsed_header(at(0), file_bytes=file_bytes)
    metadata = dict(header.metadata)
    summed = metadata.pop(_SUMS, None)
    if header.layout.keys() != {_PACKED}:
        return _with_sums(replace(header, metadata=metadata), summed)
    start = header.offsets[_PACKED][0]
    table = at(start)
    start += _LENGTH_BYTES + len(table)
    return _with_sums(_unpacked_header(table, start=start, file_bytes=file_bytes), summed)


def _with_sums(header: ShardHeader, summed: str | None) -> ShardHeader:
    return header if summed is None else replace(header, sums=_decoded_sums(header.layout, summed))


def shard_header(data: Bytes) -> ShardHeader:
    """The header of a whole file in memory."""
    return read_header(
        lambda start, stop: data[start:stop].tobytes(), file_bytes=data.size, what="safetensors"
    )


def shard_data(data: Bytes, header: ShardHeader, name: str) -> Bytes:
    """One tensor's bytes, sharing memory with the file's."""
    begin, end = header.offsets[name]
    return data[begin:end]
