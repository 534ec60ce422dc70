"""Publishing: a state dict becomes the next version of a store.

    publisher = Publisher("/weights/job-a")
    published = publisher.publish(model.state_dict())

The publisher compares with its own copy of what it published last, never with what a trainer says
has changed, and moves that copy only after the new version is in the store.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync import state_hash
from weightsync.bits import Bits, Layout, TensorSpec, bits_of, bytes_of, spec_of
from weightsync.codec import Encoded, Encoding, encode, encode_as, warm_up
from weightsync.manifest import (
    BLOCK_FORMAT,
    INDEX_FILE,
    Block,
    FileRecord,
    Manifest,
    encoded_manifest,
)
from weightsync.retention import superseded
from weightsync.shard import MAX_NAME_CHARS, ShardTensor, shard_chunks
from weightsync.store import Kind, VersionRef
from weightsync.store_writer import FileWriter, StoreWriter, write_durably

SHARD_FILE = "model-00001-of-00001.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one publish did."""

    version: WeightVersion
    state_hash: str
    bytes_sent: int
    """Size of the version that a receiver at the previous one takes."""
    bytes_dense: int
    """Size of all tensors."""
    bytes_anchor: int
    """Size of the anchor written beside it, 0 where none was due."""
    is_full: bool
    seconds: float


class Publisher:
    """Owns one store. Not thread-safe; one publisher per store, enforced by a lock.

    `anchor_every`: versions between full checkpoints. `keep_versions`: how many of the newest
    versions stay reachable. `encoding`: ROSEMUX takes the smallest encoding per tensor; XOR and
    OVERWRITE write what readers of the shared layout understand.
    """

    def __init__(
        self,
        store_dir: Path | str,
        *,
        anchor_every: int = 25,
        keep_versions: int = 50,
        encoding: Encoding = Encoding.ROSEMUX,
        threads: int = 2,
        clock: Clock | None = None,
        write: FileWriter = write_durably,
    ) -> None:
        if anchor_every < 1 or keep_versions < 1 or threads < 1:
            raise ConfigError("anchor_every, keep_versions and threads must be at least 1")
        if encoding is Encoding.DENSE:
            raise ConfigError("encoding: use rosemux, xor or overwrite (anchors are dense anyway)")
        self._anchor_every = anchor_every
        self._keep_versions = keep_versions
        if encoding is Encoding.ROSEMUX:
            warm_up()
        self._encoding = encoding
        self._clock = clock or MonotonicClock()
        self._writer = StoreWriter(Path(store_dir), write=write)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-publish")
        # An orphan newer than LATEST keeps its number: numbers are never used twice.
        numbers = (ref.version for ref in self._writer.store.refs())
        self._version = WeightVersion(max(numbers, default=0))
        self._full_versions = set(self._writer.store.full_versions())
        self._layout: Layout | None = None
        self._last: dict[str, Bits] = {}
        self._digests: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the store's lock back."""
        self._pool.shutdown()
        self._writer.close()

    def publish(self, state: Mapping[str, torch.Tensor]) -> Published:
        """Writes the next version; returns when it is durable and LATEST names it.

        Raises Unsupported for tensors that it cannot publish and Exhausted where the disk is full;
        the store and this publisher are then as they were.
        """
        started = self._clock.now()
        layout, new = _admitted(state)
        version = WeightVersion(self._version + 1)
        if layout == self._layout:
            changes = self._changes(new)
            digests = self._digests | self._digests_of(new, changes)
            sent = self._commit_delta(version, layout, changes, digests)
        else:
            changes = None
            digests = self._digests_of(new, new)
            sent = self._commit_full(Kind.WEIGHT, version, layout, new, digests)
        self._remember(version, layout, new, changes, digests)
        self._writer.point_latest(version)
        anchor = self._commit_anchor_when_due(version)
        self._prune()
        return Published(
            version=version,
            state_hash=state_hash.combined(digests, layout),
            bytes_sent=sent,
            bytes_dense=_size_bytes(layout),
            bytes_anchor=anchor,
            is_full=changes is None,
            seconds=self._clock.now() - started,
        )

    def _changes(self, new: Mapping[str, Bits]) -> dict[str, Encoded]:
        def change(name: str) -> Encoded | None:
            if self._encoding is Encoding.ROSEMUX:
                return encode(self._last[name], new[name])
            return encode_as(self._encoding, self._last[name], new[name])

        # Largest first, so that the pool does not end on one long tensor.
        names = sorted(new, key=lambda name: (-new[name].nbytes, name))
        found = zip(names, self._pool.map(change, names), strict=True)
        return {name: encoded for name, encoded in sorted(found) if encoded is not None}

    def _digests_of(self, new: Mapping[str, Bits], names: Iterable[str]) -> dict[str, str]:
        return state_hash.digests_of(names, new.__getitem__, self._pool)

    def _commit_delta(
        self,
        version: WeightVersion,
        layout: Layout,
        changes: Mapping[str, Encoded],
        digests: Mapping[str, str],
    ) -> int:
        tensors = {
            name: ShardTensor(TensorSpec("U8", (len(change.payload),)), change.payload)
            for name, change in changes.items()
        }
        odd = {n: c.encoding for n, c in changes.items() if c.encoding is not self._encoding}
        return self._commit(
            VersionRef(Kind.WEIGHT, version), layout, tensors, digests, self._encoding, odd
        )

    def _commit_full(
        self,
        kind: Kind,
        version: WeightVersion,
        layout: Layout,
        bits: Mapping[str, Bits],
        digests: Mapping[str, str],
    ) -> int:
        tensors = {name: ShardTensor(layout[name], bytes_of(bits[name]).data) for name in layout}
        return self._commit(VersionRef(kind, version), layout, tensors, digests, None, {})

    def _commit_anchor_when_due(self, version: WeightVersion) -> int:
        if self._layout is None or version - max(self._full_versions) < self._anchor_every:
            return 0
        size = self._commit_full(Kind.ANCHOR, version, self._layout, self._last, self._digests)
        self._full_versions.add(version)
        return size

    def _prune(self) -> None:
        doomed = superseded(
            self._writer.store.refs(),
            full_versions=self._full_versions,
            latest=self._version,
            keep_versions=self._keep_versions,
        )
        for ref in doomed:
            self._writer.remove(ref)
            self._full_versions.discard(ref.version)

    def _commit(
        self,
        ref: VersionRef,
        layout: Layout,
        tensors: Mapping[str, ShardTensor],
        digests: Mapping[str, str],
        delta_encoding: Encoding | None,
        odd: Mapping[str, Encoding],
    ) -> int:
        """One version directory; an unchanged state makes a version without shards."""
        checksums = {name: digests[name] for name in tensors}
        chunks = list(shard_chunks(tensors, checksums)) if tensors else []
        files = {SHARD_FILE: _record(chunks)} if tensors else {}
        manifest = Manifest(
            version=ref.version,
            base_version=None if delta_encoding is None else WeightVersion(ref.version - 1),
            delta_encoding=delta_encoding,
            checksum_format=state_hash.ALGORITHM,
            weight_map=dict.fromkeys(tensors, SHARD_FILE),
            block=Block(
                format=BLOCK_FORMAT,
                state_hash=state_hash.combined(digests, layout),
                bytes_dense=_size_bytes(layout),
                files=files,
                encodings=dict(odd),
            ),
        )
        contents: dict[str, Iterable[Any]] = {SHARD_FILE: chunks} if tensors else {}
        return self._writer.commit(ref, contents | {INDEX_FILE: [encoded_manifest(manifest)]})

    def _remember(
        self,
        version: WeightVersion,
        layout: Layout,
        new: Mapping[str, Bits],
        changes: Mapping[str, Encoded] | None,
        digests: dict[str, str],
    ) -> None:
        if changes is None:
            self._last = {name: bits.copy() for name, bits in new.items()}
            self._full_versions.add(version)
        else:
            for name in changes:
                np.copyto(self._last[name], new[name])
        self._version = version
        self._layout = layout
        self._digests = digests


def _admitted(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, TensorSpec], dict[str, Bits]]:
    """Specs and bits of a state dict, in name order."""
    if not state:
        raise ConfigError("an empty state dict: pass the model's parameters")
    layout: dict[str, TensorSpec] = {}
    bits: dict[str, Bits] = {}
    for name in sorted(state):
        tensor = state[name]
        if not 0 < len(name) <= MAX_NAME_CHARS or name == "__metadata__":
            raise Unsupported(f"tensor name {name[:80]!r}: 1 to {MAX_NAME_CHARS} characters")
        if ".lora_" in name:
            raise Unsupported(f"{name}: LoRA adapters cannot be published yet; merge them first")
        if hasattr(tensor, "full_tensor"):
            raise Unsupported(f"{name} is sharded: pass `tensor.full_tensor()` for now")
        layout[name] = spec_of(tensor)
        bits[name] = bits_of(tensor.detach().contiguous())
    return layout, bits


def _size_bytes(layout: Layout) -> int:
    return sum(spec.size_bytes for spec in layout.values())


def _record(chunks: list[Any]) -> FileRecord:
    whole = state_hash.new_digest()
    for chunk in chunks:
        whole.update(chunk)
    size = sum(memoryview(chunk).nbytes for chunk in chunks)
    return FileRecord(size, whole.hexdigest())
