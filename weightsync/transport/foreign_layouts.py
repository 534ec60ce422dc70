"""Layouts of stores that other systems' trainers write, and how one tells them apart.

    slime, miles   weight_v000001/model.safetensors.index.json
    stitch         updates/weight_v000001/model.safetensors.index.json, and `latest` in force
    SkyRL          delta-00000001/manifest.json

All number their deltas from 1, on version 0: the Hugging Face checkpoint that the trainer started
from, which is not in the store. All write the index of a version last. Names alone decide, and for
`weight_v` directories, which RoseMux writes too, one index. Reads nothing.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from harvester.contracts.errors import UNDECODABLE, ConfigError, Corrupt, Unsupported
from weightsync.layout.names import INDEX_FILE, LATEST_FILE, named_ref
from weightsync.layout.tables import is_packed

UPDATES = "updates"
POINTER = "latest"
"""stitch's name of the version in force, `RUN/weight_v000007`."""
_OURS = re.compile(rf"{LATEST_FILE}\Z|anchor_v\d|\.publisher", re.ASCII)
_WEIGHT = re.compile(r"weight_v(\d{6,15})\Z", re.ASCII)
_DELTA = re.compile(r"delta-(\d{8,15})\Z", re.ASCII)
_POINTED = re.compile(r"((?:[^\s/]+/)*)weight_v(\d{6,15})\s*\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLayout:
    writer: str
    """The systems that write it, for messages."""
    below: str = ""
    """Directory of the versions, with its slash."""
    named: re.Pattern[str] = _WEIGHT
    directory: str = "weight_v{:06d}"
    """Format of a version's directory."""
    index: str = INDEX_FILE
    """File that completes a version."""
    pointer: str | None = None
    """File that says which version is in force; without it that is the newest complete one."""
    shared: Callable[[bytes, str], bytes] | None = None
    """Converts an index's bytes to the shared form, with a path for messages; None if equal."""

    def versions(self, names: Iterable[str]) -> list[int]:
        """Numbers of the versions, the newest first. Deltas begin with 1."""
        found = (self.named.match(name) for name in names)
        return sorted((n for match in found if match and (n := int(match[1]))), reverse=True)

    def path(self, version: int, file: str) -> str:
        return f"{self.below}{self.directory.format(version)}/{file}"


class _PayloadRecord(msgspec.Struct, frozen=True):
    name: str
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str = "xxh3-128"


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    base_version: int
    tensors: list[_PayloadRecord]


def _from_manifest(raw: bytes, path: str) -> bytes:
    """A manifest of SkyRL as an index of the shared layout; raises Corrupt or Unsupported."""
    try:
        manifest = msgspec.json.decode(raw, type=_Manifest)
    except UNDECODABLE as error:
        raise Corrupt(f"{path}: not a manifest of SkyRL: {error}") from error
    records = {record.name: record for record in manifest.tensors}
    algorithms = {record.checksum_algorithm for record in manifest.tensors} or {"xxh3-128"}
    if len(records) != len(manifest.tensors):
        raise Corrupt(f"{path}: a tensor is named twice")
    if len(algorithms) > 1:
        raise Unsupported(f"{path}: several checksum_algorithm: {', '.join(sorted(algorithms))}")
    for name, record in records.items():
        if record.payload_key != name:
            raise Unsupported(f"{path}: payload_key {record.payload_key!r} of tensor {name!r}")
    metadata = {
        "version": manifest.version,
        "base_version": manifest.base_version,
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": algorithms.pop(),
    }
    weight_map = {name: record.payload_file for name, record in records.items()}
    checksums = {name: record.checksum for name, record in records.items()}
    index = {"metadata": metadata, "weight_map": weight_map, "checksums": checksums}
    return msgspec.json.encode(index)


SLIME = ForeignLayout(writer="slime or miles")
STITCH = ForeignLayout(writer="stitch", below=f"{UPDATES}/", pointer=POINTER)
SKYRL = ForeignLayout(
    writer="SkyRL",
    named=_DELTA,
    directory="delta-{:08d}",
    index="manifest.json",
    shared=_from_manifest,
)


def is_ours(names: Iterable[str]) -> bool:
    """Whether only RoseMux's publisher, or a hook for its readers, writes one of these names."""
    return any(_OURS.match(name) for name in names)


def layout_of(
    names: frozenset[str], index_of: Callable[[str], bytes | None], *, store: str
) -> ForeignLayout | None:
    """The foreign layout of a store with these names; None if it is ours, or shows too little.

    `index_of` reads the index of one directory, None without one. Raises ConfigError for the names
    of several systems, Unsupported for full checkpoints that nothing marks as complete.
    """
    found = [SKYRL] if SKYRL.versions(names) else []
    if {UPDATES, POINTER} <= names:
        found.append(STITCH)
    weights = sorted(name for name in names if named_ref(name) is not None)
    indexes = ((name, index_of(name)) for name in weights)
    first = next(((name, raw) for name, raw in indexes if raw is not None), None)
    if first is not None and _is_foreign(*first, store=store):
        found.append(SLIME)
    if len(found) > 1:
        writers = " and ".join(layout.writer for layout in found)
        raise ConfigError(f"{store} has versions of {writers}: give each a directory of its own")
    return found[0] if found else None


class _IndexVersion(msgspec.Struct):
    version: msgspec.Raw = msgspec.Raw()


class _Signs(msgspec.Struct):
    """Decodes no more of an index: a server answers here for an index that a tenant wrote."""

    metadata: _IndexVersion | None = None
    rosemux: msgspec.Raw = msgspec.Raw()


def _is_foreign(directory: str, raw: bytes, *, store: str) -> bool:
    path = f"{store}/{directory}/{INDEX_FILE}"
    if is_packed(raw):
        return False
    try:
        index = msgspec.json.decode(raw, type=_Signs)
    except UNDECODABLE as error:
        raise Corrupt(f"{path}: not the index of a version: {error}") from error
    if index.rosemux:
        return False
    if index.metadata is None or not index.metadata.version:
        raise Unsupported(
            f"{path}: metadata has no `version`: nothing marks the full checkpoints of slime's and "
            "miles' full mode as complete; let the trainer write deltas"
        )
    return True


def kinds(names: frozenset[str]) -> tuple[bool, ...]:
    """Which systems' names are among these: another layout than before has others."""
    named = (any(p.match(name) for name in names) for p in (_OURS, _DELTA, _WEIGHT))
    return (*named, {UPDATES, POINTER} <= names)


def stamped(index: bytes, stamp: str) -> bytes:
    """An index with the stamp of its file; as it is if it cannot be read, which readers report."""
    try:
        fields = msgspec.json.decode(index, type=dict[str, msgspec.Raw])
    except UNDECODABLE:
        return index
    return msgspec.json.encode({**fields, "stamp": stamp})


def pointed(raw: bytes, *, path: str) -> tuple[str, int]:
    """Run and version that stitch's pointer names; raises Corrupt."""
    match = _POINTED.match(raw.decode("utf-8", errors="replace"))
    if match is None:
        raise Corrupt(f"{path} holds {raw[:80]!r}: expected RUN/weight_v000007")
    return match[1], int(match[2])
