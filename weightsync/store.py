"""A store of weight versions in one directory, as readers see it.

    LATEST                     name of the newest version, replaced atomically
    weight_v000007/            one version: a delta on its base, or a full checkpoint
        model.safetensors.index.json   model-00001-of-00001.safetensors   READY
    anchor_v000025/            the same state as weight_v000025, as a full checkpoint

Readers believe a directory of ours only when READY is in it. Never writes anything.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.bits import Bytes, Layout, TensorSpec
from weightsync.manifest import INDEX_FILE, MAX_INDEX_BYTES, Manifest, decoded_manifest
from weightsync.shard import header_length, parsed_header
from weightsync.state_hash import file_digest

LATEST_FILE = "LATEST"
READY_FILE = "READY"
_DIRECTORY = re.compile(r"(weight|anchor)_v(\d{6,15})\Z")
_MAX_LATEST_BYTES = 64


class Kind(StrEnum):
    WEIGHT = "weight"
    ANCHOR = "anchor"


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One directory of a store."""

    kind: Kind
    version: WeightVersion

    @property
    def directory(self) -> str:
        return f"{self.kind}_v{self.version:06d}"


class Store:
    """Reads one store directory. Raises ConfigError where there is none."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(f"no weight store at {root}: publish a version there first")
        self.root = root

    def latest(self) -> WeightVersion | None:
        """The newest published version; None before the first one."""
        try:
            raw = _read_bounded(self.root / LATEST_FILE, _MAX_LATEST_BYTES)
        except FileNotFoundError:
            return None
        match = _DIRECTORY.match(raw.decode("ascii", errors="replace").strip())
        if match is None or match[1] != Kind.WEIGHT:
            raise Corrupt(f"{self.root / LATEST_FILE} holds {raw!r}")
        return WeightVersion(int(match[2]))

    def refs(self) -> frozenset[VersionRef]:
        """Every directory that has a version's name, finished or not."""
        matches = (_DIRECTORY.match(entry.name) for entry in self.root.iterdir())
        return frozenset(
            VersionRef(Kind(match[1]), WeightVersion(int(match[2]))) for match in matches if match
        )

    def has(self, ref: VersionRef) -> bool:
        """Whether the directory is there, finished or not."""
        return (self.root / ref.directory).is_dir()

    def manifest(self, ref: VersionRef) -> Manifest:
        """The index of one version; raises Stale where it is gone, Corrupt where it is broken."""
        directory = self.root / ref.directory
        try:
            raw = _read_bounded(directory / INDEX_FILE, MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise Stale(f"{directory} is gone or was never finished") from error
        manifest = decoded_manifest(raw, expected=ref.version)
        if manifest.block is not None and not (directory / READY_FILE).is_file():
            raise Corrupt(f"{directory} has no {READY_FILE}: its publisher did not finish it")
        if ref.kind is Kind.ANCHOR and not manifest.is_full:
            raise Corrupt(f"{directory} is not a full checkpoint")
        return manifest

    def full_versions(self) -> frozenset[WeightVersion]:
        """Versions that need no other one; unreadable directories are left out."""

        def is_full(ref: VersionRef) -> bool:
            try:
                return self.manifest(ref).is_full
            except RoseMuxError:
                return False

        return frozenset(ref.version for ref in self.refs() if is_full(ref))

    def size_bytes(self, ref: VersionRef, manifest: Manifest) -> int:
        """What a receiver reads to take this version."""
        directory = self.root / ref.directory
        try:
            return sum((directory / shard).stat().st_size for shard in manifest.shards)
        except OSError as error:
            raise Corrupt(f"{directory}: a shard is missing or no file: {error}") from error

    def layout(self, ref: VersionRef, manifest: Manifest) -> Layout:
        """Names and specs of a full version, from its shards' headers alone."""
        merged: dict[str, TensorSpec] = {}
        for shard in manifest.shards:
            merged.update(self._shard_layout(self.root / ref.directory / shard))
        if set(merged) != set(manifest.weight_map):
            raise Corrupt(f"{ref.directory}: shards and weight map name different tensors")
        return merged

    def read_shard(self, ref: VersionRef, manifest: Manifest, shard: str) -> Bytes:
        """A whole shard in fresh memory, checked against its record; raises Corrupt."""
        path = self.root / ref.directory / shard
        record = manifest.block.files[shard] if manifest.block else None
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if record and record.bytes != size:
                    raise Corrupt(f"{path}: {size} bytes where {record.bytes} were published")
                data = np.empty(size, dtype=np.uint8)
                if file.readinto(data.data) != size:
                    raise Corrupt(f"{path}: it shrank while it was read")
        except OSError as error:
            raise Corrupt(f"{path} is missing or no file: {error}") from error
        if record and file_digest(data) != record.xxh3_128:
            raise Corrupt(f"{path}: its digest is not the published one")
        return data

    def _shard_layout(self, path: Path) -> Layout:
        try:
            with path.open("rb") as file:
                length = header_length(file.read(8))
                return parsed_header(file.read(length), file_bytes=path.stat().st_size).layout
        except OSError as error:
            raise Corrupt(f"{path} is missing or no file: {error}") from error


def _read_bounded(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    if len(raw) > limit_bytes:
        raise Corrupt(f"{path} is over the limit of {limit_bytes} bytes")
    return raw
