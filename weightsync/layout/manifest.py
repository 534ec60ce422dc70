"""The index file of one version: the shared Hugging Face layout plus a `rosemux` section.

`metadata` and `weight_map` are read and written by slime, miles and others; the `rosemux` section
adds the state hash, file digests, per-tensor encodings, the entries that are slices of a tensor,
and the base of an adapter. A version without the section is foreign: its tensors are verified by
their checksums alone. Never touches a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from sys import intern

import msgspec

from harvester.contracts.errors import UNDECODABLE, Corrupt, PeerProtocolError, Unsupported
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.elements.state_hash import ALGORITHM
from weightsync.encoding.codec import Encoding
from weightsync.layout.chunk_digests import fit
from weightsync.layout.index_summary import FileSummary, IndexMetadata
from weightsync.layout.names import MAX_INDEX_BYTES, MAX_VERSION
from weightsync.layout.slices import SliceRecord, Slicing
from weightsync.layout.tables import MAX_TABLE_BYTES, packed_table, plain_table

INDEX_FORMAT = 1
_PACKED_FROM_BYTES = 64 << 10


class FileRecord(FileSummary, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Size and xxh3-128 of one shard, and digests that verify a part of it."""

    chunk_bytes: int = 0
    """Length of all chunks but the last; 0 if chunks have no digests."""
    chunks: str = ""
    """xxh3-64 of each chunk in order, 16 hexadecimal digits each."""


class AdapterRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base that a version of adapter weights belongs to."""

    base_store: str
    base_version: int
    base_state_hash: str
    config: FileRecord
    """Record of the file adapter_config.json beside the index."""


def _always_written() -> dict[str, Encoding]:
    """Unlike `dict`, whose empty value would be omitted: an index always has `encodings`."""
    return {}


class IndexSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """RoseMux's additions to an index."""

    format: int
    state_hash: str
    bytes_dense: int
    files: dict[str, FileRecord]
    encodings: dict[str, Encoding] = msgspec.field(default_factory=_always_written)
    slices: dict[str, SliceRecord] = msgspec.field(default_factory=dict)
    adapter: AdapterRecord | None = None


class _Index(msgspec.Struct, frozen=True, omit_defaults=True):
    metadata: IndexMetadata
    weight_map: dict[str, str]
    rosemux: IndexSection | None = None
    checksums: dict[str, str] = msgspec.field(default_factory=dict)
    """Tensor checksums of a foreign version whose writer keeps them in its index."""
    stamp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version. `base_version` and `delta_encoding` are None for a full checkpoint."""

    version: WeightVersion
    base_version: WeightVersion | None
    delta_encoding: Encoding | None
    checksum_format: str
    weight_map: Mapping[str, str]
    """Tensor name to shard file name."""
    section: IndexSection | None
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Checksums of a foreign version's tensors that are not in its shards."""
    stamp: str = ""
    """Differs if another run wrote a foreign version of the same number; empty if unseen."""

    @property
    def is_full(self) -> bool:
        return self.delta_encoding is None

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.weight_map.values())))

    @property
    def state_hash(self) -> str | None:
        """The published state hash; None for a foreign version."""
        return self.section.state_hash if self.section else None

    @property
    def adapter(self) -> AdapterRecord | None:
        """The base of an adapter; None for whole models."""
        return self.section.adapter if self.section else None

    @property
    def slicing(self) -> Slicing:
        """The entries that are slices; only full checkpoints record them."""
        return Slicing(self.section.slices if self.section else {})

    def encoding_of(self, name: str) -> Encoding:
        """Encoding of one tensor of a delta. Raises ValueError for a full checkpoint."""
        if self.delta_encoding is None:
            raise ValueError(f"version {self.version} is a full checkpoint")
        if self.section is None:
            return self.delta_encoding
        return self.section.encodings.get(name, self.delta_encoding)


def encoded_manifest(manifest: Manifest) -> bytes:
    """Serialise the index of a version for publishing: compressed if it is large and no other
    system could read what it lists, and without chunk digests where it would be too large for
    readers with them; readers of a part then read whole shards. Raises Unsupported."""
    for version in (manifest, _without_chunks(manifest)):
        table = _table(version)
        if len(table) <= MAX_TABLE_BYTES:
            packs = _is_ours_alone(version) and len(table) > _PACKED_FROM_BYTES
            index = packed_table(table) if packs else msgspec.json.format(table, indent=1)
            if len(index) <= MAX_INDEX_BYTES:
                return index
    raise Unsupported(
        f"an index of {len(manifest.weight_map)} entries is larger than readers take: publish "
        "larger tensors (all experts of a layer as one), or from fewer ranks where they are slices"
    )


def _is_ours_alone(manifest: Manifest) -> bool:
    """Whether no other system could read what the version lists."""
    encoding = manifest.delta_encoding
    return bool(manifest.slicing.records) or (encoding is not None and encoding.is_ours)


def _without_chunks(manifest: Manifest) -> Manifest:
    """The same version without chunk digests, so that it is read whole."""
    section = manifest.section
    if section is None:
        return manifest
    files = {
        name: FileRecord(record.bytes, record.xxh3_128) for name, record in section.files.items()
    }
    return replace(manifest, section=msgspec.structs.replace(section, files=files))


def _table(manifest: Manifest) -> bytes:
    delta = not manifest.is_full
    base = manifest.base_version
    metadata = IndexMetadata(
        version=f"{manifest.version:06d}",
        base_version=None if base is None else f"{base:06d}",
        delta_encoding=manifest.delta_encoding,
        compression_format="zstd" if delta else None,
        checksum_format=manifest.checksum_format,
        total_size=manifest.section.bytes_dense if manifest.section and not delta else None,
    )
    return msgspec.json.encode(_Index(metadata, dict(manifest.weight_map), manifest.section))


def decoded_manifest(raw: bytes, *, expected: WeightVersion) -> Manifest:
    """Decode an index that was read from a store; raises Corrupt or Unsupported."""
    try:
        index = msgspec.json.decode(plain_table(raw), type=_Index)
        version = _version(index.metadata.version)
        base = index.metadata.base_version
        manifest = Manifest(
            version=version,
            base_version=None if base is None else _version(base),
            delta_encoding=_encoding(index.metadata.delta_encoding),
            checksum_format=index.metadata.checksum_format or ALGORITHM,
            # A receiver remembers the indexes of a chain, which repeat the same names.
            weight_map={intern(entry): shard for entry, shard in index.weight_map.items()},
            section=index.rosemux,
            checksums=index.checksums,
            stamp=index.stamp,
        )
        for shard in manifest.shards:
            checked_name(shard, what="shard")
    except (*UNDECODABLE, ValueError, RecursionError, PeerProtocolError) as error:
        raise Corrupt(f"index of version {expected}: {error}") from error
    _check(manifest, index.metadata.compression_format, expected)
    return manifest


def _check(manifest: Manifest, compression: str | None, expected: WeightVersion) -> None:
    what = f"index of version {expected}"
    if manifest.version != expected:
        raise Corrupt(f"{what} has version {manifest.version}")
    if manifest.is_full:
        if manifest.base_version is not None:
            raise Corrupt(f"{what}: a base version without a delta encoding")
    elif manifest.base_version is None or manifest.base_version >= manifest.version:
        raise Corrupt(f"{what}: base version {manifest.base_version}")
    elif compression != "zstd":
        raise Unsupported(f"{what}: compression {compression!r}; this reader knows zstd")
    section = manifest.section
    if section is not None:
        if section.format != INDEX_FORMAT:
            raise Unsupported(f"{what}: format {section.format}; this reader knows {INDEX_FORMAT}")
        if set(section.files) != set(manifest.shards):
            raise Corrupt(f"{what}: file records do not match the weight map")
        for shard, record in section.files.items():
            if not fit(record.chunks, size_bytes=record.bytes, chunk_bytes=record.chunk_bytes):
                raise Corrupt(f"{what}: chunks of {shard}: no digests of {record.bytes} bytes")


def _version(value: str | int) -> WeightVersion:
    version = int(value)
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version {value}")
    return WeightVersion(version)


def _encoding(name: str | None) -> Encoding | None:
    if name is None:
        return None
    if name not in frozenset(Encoding) - {Encoding.DENSE}:
        raise ValueError(f"delta_encoding {name!r} is not known to this reader")
    return Encoding(name)
