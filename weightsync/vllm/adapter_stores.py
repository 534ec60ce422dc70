"""Versions of LoRA adapters in host memory, exact and hashed, on their way into an engine.

An adapter is small: the version in force is kept, the next one is made beside it while the engine
runs, and handed over whole as the files that PEFT writes. Which adapter an engine may take, and
when, adapted_weights.py decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits, Layout, bytes_of
from weightsync.encoding.delta import apply_all
from weightsync.layout.adapter import FULL_SHARD_FILE, MAX_CONFIG_BYTES, Base, checked_config
from weightsync.layout.manifest import AdapterRecord, Manifest
from weightsync.layout.names import CONFIG_FILE, Kind, VersionRef
from weightsync.layout.shard import shard_chunks
from weightsync.reading.store import Store
from weightsync.receive.staged import Applied, Staged, check_state
from weightsync.receiver import Receiver
from weightsync.transport.location import StoreRoot
from weightsync.vllm.paced_pool import Pace, PacedPool

THREADS = 2
MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCopy:
    """One version of an adapter, with immutable bits."""

    store: str
    record: AdapterRecord
    config: Mapping[str, Any]
    layout: Layout
    bits: Mapping[str, Bits]
    applied: Applied

    def write_to(self, directory: Path) -> None:
        """Writes what PEFT's `save_pretrained` would."""
        layout = dict(sorted(self.layout.items(), key=lambda part: (-part[1].width_bytes, part[0])))
        chunks = shard_chunks(layout, lambda n: bytes_of(self.bits[n]).data, {"format": "pt"})
        with (directory / FULL_SHARD_FILE).open("wb") as file:
            file.writelines(chunks)
        (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(dict(self.config)))


class AdapterStores:
    """Reads adapters of all stores under a root. `manifest` and `copied` may run in two threads."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._clock = MonotonicClock()
        self._pool = PacedPool(THREADS)
        self._stores: dict[str, Store] = {}
        self._receivers: dict[str, Receiver] = {}
        self._manifests: dict[tuple[str, WeightVersion], Manifest] = {}

    def paced_by(self, pace: Pace) -> None:
        """See EngineWeights."""
        self._pool.pace = pace

    def known(self, store: str, version: WeightVersion) -> Manifest | None:
        """The index of a version, if it was read before."""
        return self._manifests.get((store, version))

    def manifest(self, store: str, version: WeightVersion) -> Manifest | None:
        """The index of a version, cached; None if it cannot be read, which the load reports."""
        if (found := self.known(store, version)) is None:
            try:
                found = self._read_manifest(store, version)
            except RoseMuxError:
                return None
            if len(self._manifests) >= MAX_REMEMBERED:
                self._manifests.clear()
            self._manifests[store, version] = found
        return found

    def copied(self, store: str, version: WeightVersion, held: AdapterCopy | None) -> AdapterCopy:
        """Copies a version, by deltas from `held` where that is cheaper. Raises Receiver's errors,
        and ConfigError for whole models."""
        receiver = self._receiver(store)
        manifest = self._read_manifest(store, version)
        record = manifest.adapter
        if record is None:
            raise ConfigError(f"version {version} of {store} is no adapter but a whole model")
        receiver.base = Base(
            store=record.base_store,
            version=WeightVersion(record.base_version),
            state_hash=record.base_state_hash,
        )
        staged = receiver.prepare(held.applied.version if held else None, version)
        started = self._clock.now()
        try:
            bits, found = self._advanced(held, staged)
        except Corrupt:
            if staged.full is not None:
                raise
            staged = receiver.prepare(None, version)
            bits, found = self._advanced(None, staged)
        applied = staged.applied(found, seconds=self._clock.now() - started)
        ref = self._ref(store, version)
        raw = self._store(store).small_file(ref, CONFIG_FILE, MAX_CONFIG_BYTES)
        return AdapterCopy(
            store=store,
            record=record,
            config=checked_config(raw, record, where=f"{store}/{ref.directory}"),
            layout=staged.layout,
            bits=bits,
            applied=applied,
        )

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        for store in self._stores.values():
            store.close()
        self._receivers.clear()
        self._stores.clear()

    def _advanced(self, held: AdapterCopy | None, staged: Staged) -> tuple[Mapping[str, Bits], str]:
        """The bits of a version and their hash; raises Corrupt where it is not the published one"""
        if staged.full is not None:
            # The staged memory is released after this.
            bits = {name: found.copy() for name, found in staged.full.items()}
        elif held is None or held.layout != staged.layout:
            raise Corrupt(f"version {staged.plan.target} has other tensors than its base")
        else:
            bits = {n: b.copy() if n in staged.deltas else b for n, b in held.bits.items()}
            for name, deltas in staged.deltas.items():
                apply_all(deltas, bits[name])
        return bits, check_state(staged.expected, staged.layout, bits.__getitem__, self._pool)

    def _read_manifest(self, store: str, version: WeightVersion) -> Manifest:
        return self._store(store).manifest(self._ref(store, version))

    def _ref(self, store: str, version: WeightVersion) -> VersionRef:
        """An anchor may outlive the delta to the same version."""
        refs = self._store(store).refs()
        named = (VersionRef(kind, version) for kind in (Kind.WEIGHT, Kind.ANCHOR))
        found = next((ref for ref in named if ref in refs), None)
        if found is None:
            raise Stale(f"version {version} of {store} is not there (any more)")
        return found

    def _store(self, name: str) -> Store:
        if name not in self._stores:
            self._stores[name] = Store(self._root.store(name))
        return self._stores[name]

    def _receiver(self, store: str) -> Receiver:
        if store not in self._receivers:
            self._receivers[store] = Receiver(self._root.store(store), work_pool=self._pool)
        return self._receivers[store]
