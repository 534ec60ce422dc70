"""Hostile shard headers, with the digest of the damaged file in the index."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.weightsync.faults.fault import FaultClass, damaging
from benchmarks.weightsync.faults.manifests import DEEP
from benchmarks.weightsync.faults.payloads import forge
from benchmarks.weightsync.faults.template import NEWEST
from benchmarks.weightsync.faults.world import FaultWorld
from weightsync.encoding.codec import Encoding
from weightsync.layout.names import INDEX_FILE, Kind
from weightsync.layout.shard import shard_data, shard_header


def _tensor_names(world: FaultWorld) -> None:
    """Tensors that the base does not have, by names that would be paths."""
    name = world.rng.choice(("../../x", "/etc/x", "x" * 600, "layers.0", "nul\0"))
    old = "layers.0.scale"

    def renamed(header: dict[str, Any]) -> None:
        header[name] = header.pop(old)

    _edit_header(world, renamed)
    index = world.index(world.newest)
    fields = json.loads(index.read_bytes())
    fields["weight_map"][name] = fields["weight_map"].pop(old)
    index.write_text(json.dumps(fields))


def _header_field(*values: tuple[str, Any]) -> Callable[[FaultWorld], None]:
    def damage(world: FaultWorld) -> None:
        field, value = world.rng.choice(values)

        def edit(header: dict[str, Any]) -> None:
            names = sorted(name for name in header if name != "__metadata__")
            entry = header[world.rng.choice(names)]
            entry[field] = value(header) if callable(value) else value

        _edit_header(world, edit)

    return damage


def _edit_header(world: FaultWorld, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits a header of the newest delta or, for a joiner, of a full version; forges the digest."""
    kind, version = Kind.WEIGHT, world.newest
    if world.newest == NEWEST and world.rng.random() < 0.4:
        kind = Kind.ANCHOR
    shard = world.shard(version, kind)
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    try:
        edit(header)
    except KeyError:
        return _edit_header(world, edit)
    _write_header(shard, json.dumps(header).encode(), raw[8 + length :])
    return None


def _write_header(shard: Path, header: bytes, rest: bytes) -> None:
    shard.write_bytes(len(header).to_bytes(8, "little") + header + rest)
    forge(shard.parent / INDEX_FILE)


def _not_a_header(world: FaultWorld) -> None:
    shard = world.shard(world.newest)
    rest = shard.read_bytes()[-1000:]
    header = world.rng.choice(
        [
            b"",
            b"{}",
            b"[]",
            b"null",
            b"[" * DEEP,
            b'{"a":' * DEEP,
            b"{" + b'"a":{},' * 3 + b'"b":1}',
        ]
    )
    _write_header(shard, header, rest)
    if world.rng.random() < 0.4:
        length = world.rng.choice([1 << 62, (1 << 64) - 1, 33 << 20, 0])
        shard.write_bytes(length.to_bytes(8, "little") + header + rest)
        forge(world.index(world.newest))


def _duplicate_header_keys(world: FaultWorld) -> None:
    shard = world.shard(world.newest)
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = sorted(name for name in header if name != "__metadata__")
    if len(names) < 2:
        return _duplicate_header_keys(world)
    one, two = world.rng.sample(names, 2)
    text = raw[8 : 8 + length].decode().rstrip()
    doubled = f"{text[:-1]},{json.dumps(one)}:{json.dumps(header[two])}}}"
    _write_header(shard, doubled.encode(), raw[8 + length :])
    return None


def _packed_header(world: FaultWorld) -> None:
    """The header of many payloads is compressed; here it is of few, and wrong."""
    shard = world.shard(world.newest)
    data = np.frombuffer(shard.read_bytes(), dtype=np.uint8)
    header = shard_header(data)
    names = [*header.layout]
    payloads = [shard_data(data, header, name).tobytes() for name in names]
    table: dict[str, Any] = {
        "names": names,
        "sizes": [len(payload) for payload in payloads],
        "checksums": [header.metadata[name] for name in names],
    }
    field = world.rng.choice([*table])
    table[field] = world.rng.choice(
        [table[field][1:], table[field] * 2, [table[field][0]] * len(names), [-1] * len(names), 7]
    )
    raw = world.rng.choice(
        [
            json.dumps(table).encode(),
            zstandard.ZstdCompressor().compress(json.dumps(table).encode()),
            zstandard.ZstdCompressor().compress(bytes(1 << 30)),
            zstandard.ZstdCompressor().compress(b"[" * DEEP)[:-3],
            b"",
        ]
    )
    length = world.rng.choice([len(raw), len(raw), len(raw) + 1, 1 << 62])
    rest = length.to_bytes(8, "little") + raw + b"".join(payloads)
    entry = {"dtype": "U8", "shape": [len(rest)], "data_offsets": [0, len(rest)]}
    _write_header(shard, json.dumps({"rosemux.packed": entry}).encode(), rest)


HEADERS: tuple[FaultClass, ...] = (
    damaging("packed header that does not add up", _packed_header, encoding=Encoding.ROSEMUX),
    damaging("hostile tensor names", _tensor_names),
    damaging("no shard header: empty, deep, huge, not JSON", _not_a_header),
    damaging("shard header with duplicate keys", _duplicate_header_keys),
    damaging(
        "shard header with absurd shapes",
        _header_field(
            ("shape", [1 << 40, 1 << 40]),
            ("shape", [-1]),
            ("shape", [1] * 1000),
            ("shape", [1 << 62]),
            ("shape", [1 << 70]),
            ("shape", []),
            ("shape", [0]),
            ("dtype", "F64"),
            ("dtype", "F4_E2M1"),
            ("dtype", ""),
        ),
    ),
    damaging(
        "shard header with overlapping or outer offsets",
        _header_field(
            ("data_offsets", [0, 1 << 62]),
            ("data_offsets", [1 << 62, 1 << 63]),
            ("data_offsets", [-8, 0]),
            ("data_offsets", [100, 50]),
            ("data_offsets", [0]),
            ("data_offsets", lambda header: header["embed.weight"]["data_offsets"]),
            ("data_offsets", [0, 0]),
        ),
    ),
)
