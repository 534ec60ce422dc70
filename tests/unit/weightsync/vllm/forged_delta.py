"""Stores whose deltas are wrong where no digest shows it."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits, TensorSpec
from weightsync.encoding.codec import encode
from weightsync.layout.manifest import FileRecord, Manifest, decoded_manifest, encoded_manifest
from weightsync.layout.names import INDEX_FILE, Kind, VersionRef
from weightsync.layout.shard import shard_chunks, shard_data, shard_header


def _index(store: Path, version: WeightVersion) -> tuple[Path, Manifest]:
    index = store / VersionRef(Kind.WEIGHT, version).directory / INDEX_FILE
    return index, decoded_manifest(index.read_bytes(), expected=version)


def forge_delta(store: Path, version: WeightVersion, entry: str, old: Bits, new: Bits) -> None:
    """A delta's payload of one entry leads from `old` to `new`; the file's digest is made again."""
    index, manifest = _index(store, version)
    shard = index.parent / manifest.weight_map[entry]
    data = np.fromfile(shard, np.uint8)
    header = shard_header(data)
    encoded = encode(old, new)
    assert encoded is not None
    payloads = {name: shard_data(data, header, name).tobytes() for name in header.layout}
    payloads[entry] = bytes(encoded.payload)
    layout = {name: TensorSpec("U8", (len(payload),)) for name, payload in payloads.items()}
    chunks = shard_chunks(layout, payloads.__getitem__, header.metadata, sums=header.sums)
    whole = b"".join(bytes(chunk) for chunk in chunks)
    shard.write_bytes(whole)
    section = manifest.section
    assert section is not None
    record = FileRecord(len(whole), xxhash.xxh3_128_hexdigest(whole))
    encodings = {**section.encodings, entry: encoded.encoding}
    files = {**section.files, shard.name: record}
    section = msgspec.structs.replace(section, files=files, encodings=encodings)
    index.write_bytes(encoded_manifest(replace(manifest, section=section)))


def leave_out(store: Path, version: WeightVersion, base: WeightVersion) -> None:
    """The delta of a version claims an older base, so that those between are left out."""
    index, manifest = _index(store, version)
    index.write_bytes(encoded_manifest(replace(manifest, base_version=base)))
