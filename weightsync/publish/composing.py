"""Composes consecutive deltas of a store into one, a skip delta.

A publisher writes the result into its store (skip_deltas.py); a weight server sends it to the
reader that asked for it. Reads deltas alone, never the tensors that they change.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np

from harvester.contracts.errors import Exhausted, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.elements.batches import BATCH_BYTES, spread
from weightsync.elements.bits import Layout
from weightsync.encoding.codec import Encoded, Encoding, composed
from weightsync.layout.adapter import MAX_CONFIG_BYTES
from weightsync.layout.manifest import IndexSection, Manifest, encoded_manifest
from weightsync.layout.names import CONFIG_FILE, INDEX_FILE, READY_FILE, Kind, VersionRef
from weightsync.publish.agreement import Shard, version_manifest
from weightsync.publish.delta_shards import ShardFiles
from weightsync.publish.store_writer import DeltaDraft
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.reading.spool import Spool, StagedFile
from weightsync.reading.store import Store
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.source import StoreSource

BUDGET_BYTES = 64 << 20
"""Half of it for a skip delta that waits in memory; a larger one waits in a file."""
_MOST_OF_DENSE = 0.5
"""Size of the deltas that one skip delta is made of, over the model's: they wait in a file."""
_SMALL_BYTES = 64 << 20
_MAX_PAYLOADS = 1 << 19
"""A payload takes some 50 us of the interpreter, which the trainer shares."""
_SHARD_BYTES = 32 << 20
_MOST_THREADS = 8
"""A server composes on half of its cores, since a store is often beside its trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipDelta:
    ref: VersionRef
    section: IndexSection
    """The section of the version that it leads to."""
    shards: Sequence[Shard]
    files: Mapping[str, StagedFile]

    def manifest(self, names: Mapping[str, str]) -> Manifest:
        """The index; `names`: the final name of each file."""
        section = msgspec.structs.replace(self.section, slices={})
        version, base = self.ref.version, self.ref.base
        return version_manifest(version, base, Encoding.ROSEMUX, section, self.shards, names)


class SpoolDraft(DeltaDraft):
    """Keeps the files of one skip delta in memory or a file, in `directory` or TMPDIR."""

    def __init__(self, directory: Path | None = None) -> None:
        self.files: dict[str, StagedFile] = {}
        self._directory = directory
        self._spool = self.spool_beside()

    def spool_beside(self) -> Spool:
        return Spool(MemoryBudget(BUDGET_BYTES), self._directory)

    def write(self, file: str, chunks: Iterable[Any]) -> int:
        parts = [np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks]
        staged, at = self._spool.stage(sum(part.size for part in parts)), 0
        for part in parts:
            staged.write(at, part)
            at += part.size
        self.files[file] = staged
        return at


def composed_files(source: StoreSource, ref: VersionRef, until: Event) -> Mapping[str, StagedFile]:
    """The files of a skip delta that the store does not have, by name, in memory or TMPDIR.

    Raises the errors of `composed_skip`; Stale too for a version without a full checkpoint.
    """
    store, draft = Store(source), SpoolDraft()
    layout = _layout(store, ref.version)
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    skip = composed_skip(
        store, ref, layout, draft, shard_bytes=_SHARD_BYTES, threads=threads, until=until
    )
    index = encoded_manifest(skip.manifest({file: file for file in skip.files}))
    draft.write(INDEX_FILE, [index])
    draft.write(READY_FILE, [])
    if skip.section.adapter is not None:
        version = VersionRef(Kind.WEIGHT, ref.version)
        draft.write(CONFIG_FILE, [store.small_file(version, CONFIG_FILE, MAX_CONFIG_BYTES)])
    return draft.files


def _layout(store: Store, version: WeightVersion) -> Layout:
    """The entries of a version, from the newest full checkpoint that it builds on."""
    anchors = {ref.version for ref in store.refs() if ref.kind is Kind.ANCHOR}
    at: WeightVersion | None = version
    while at:
        ref = VersionRef(Kind.ANCHOR if at in anchors else Kind.WEIGHT, at)
        manifest = store.manifest(ref)
        if manifest.is_full:
            return store.layout(ref, manifest)
        at = manifest.base_version
    raise Stale(f"version {version} leads to no full checkpoint")


def composed_skip(
    store: Store,
    ref: VersionRef,
    layout: Layout,
    draft: SpoolDraft,
    *,
    shard_bytes: int,
    threads: int = 1,
    until: Event,
) -> SkipDelta:
    """Compose the deltas between the two versions of `ref` into files of `draft`, beside which the
    deltas wait meanwhile; `layout` is of the versions' entries.

    Raises Exhausted if they are too large or the event is set, Stale if they do not lead from the
    one to the other, Corrupt, and Unsupported for deltas that do not add up.
    """
    chain = _chain(store, ref.base or WeightVersion(0), ref.version)
    section = chain[-1][1].section
    if section is None:
        raise Unsupported(f"{ref.directory}: version {ref.version} was written by another system")
    changes, digests, sums = _payloads(store, chain, draft.spool_beside(), until)
    sizes = {entry: layout[entry].size_bytes for entry in changes}
    files = ShardFiles(draft, rank=0, limit_bytes=shard_bytes, may_pack=True)

    def summed(entry: str) -> Encoded | None:
        _check_open(until)
        parts = ((encoding, file.read(span).data) for encoding, file, span in changes[entry])
        return composed(parts, layout[entry], digests[entry])

    # As many tensors as keep the threads busy: the heap never has all of the delta.
    limit_bytes = (threads + 1) * max((BATCH_BYTES, *sizes.values()))
    with ThreadPoolExecutor(threads, thread_name_prefix="weight-compose") as pool:
        found = spread(pool, summed, [*sizes], sizes.__getitem__, limit_bytes=limit_bytes)
        for entry, delta in zip(sizes, found, strict=True):
            if delta is not None:
                files.add(entry, delta, sums.get(entry))
    return SkipDelta(ref=ref, section=section, shards=files.finish(), files={**draft.files})


def _payloads(
    store: Store, chain: list[tuple[VersionRef, Manifest]], spool: Spool, until: Event
) -> tuple[dict[str, list[tuple[Encoding, StagedFile, ByteSpan]]], dict[str, str], dict[str, int]]:
    """Places of each entry's payloads, in the chain's order, and the last digest and sum."""
    changes: dict[str, list[tuple[Encoding, StagedFile, ByteSpan]]] = {}
    digests: dict[str, str] = {}
    sums: dict[str, int] = {}
    for ref, manifest in chain:
        for shard in manifest.shards:
            _check_open(until)
            copy = store.shard(ref, manifest, shard, spool, lent_bytes=BUDGET_BYTES)
            copy.fetch()
            header = copy.header()
            digests |= header.metadata
            for entry in header.layout.keys() - header.sums.keys():
                sums.pop(entry, None)
            sums |= header.sums
            for entry in header.layout:
                span = ByteSpan(*header.offsets[entry])
                change = (manifest.encoding_of(entry), copy.staged, span)
                changes.setdefault(entry, []).append(change)
    return changes, digests, sums


def _check_open(until: Event) -> None:
    if until.is_set():
        raise Exhausted("closed before it was finished")


def _chain(
    store: Store, base: WeightVersion, version: WeightVersion
) -> list[tuple[VersionRef, Manifest]]:
    chain: list[tuple[VersionRef, Manifest]] = []
    at: WeightVersion | None = version
    left_bytes, left_payloads = math.inf, _MAX_PAYLOADS
    while at is not None and at > base:
        ref = VersionRef(Kind.WEIGHT, at)
        manifest = store.manifest(ref)
        if not chain and manifest.section is not None:
            left_bytes = max(_SMALL_BYTES, _MOST_OF_DENSE * manifest.section.bytes_dense)
        if (encoding := manifest.delta_encoding) not in (None, Encoding.ROSEMUX):
            raise Unsupported(f"{ref.directory}: changes by {encoding} do not add up")
        chain.append((ref, manifest))
        left_bytes -= store.size_bytes(ref, manifest)
        left_payloads -= len(manifest.weight_map)
        if left_bytes < 0 or left_payloads < 0:
            raise Exhausted(f"the deltas from version {at} to {version} are too large")
        at = manifest.base_version
    if at != base:
        raise Stale(f"the deltas of version {version} do not lead back to version {base}")
    return chain[::-1]
