"""Versions of LoRA adapters in host memory, exact and hashed, on their way into an engine.

An adapter is small: the version in force is kept, the next one is made beside it while the engine
runs, and handed over whole as the files that PEFT writes. Which adapter an engine may take, and
when, adapted_weights.py decides.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harvester.contracts.errors import ConfigError, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits, Layout, bits_of, bytes_of, zero_tensor
from weightsync.layout.adapter import FULL_SHARD_FILE, MAX_CONFIG_BYTES, base_of, checked_config
from weightsync.layout.manifest import AdapterRecord, Manifest
from weightsync.layout.names import CONFIG_FILE, Kind, VersionRef
from weightsync.layout.shard import shard_chunks, widest_first
from weightsync.reading.store import Store
from weightsync.receive.staged import Applied
from weightsync.receive.target import HostTarget
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
    stamp: str
    """See `Staged`."""

    def write_to(self, directory: Path) -> None:
        """Writes what PEFT's `save_pretrained` would."""
        layout = widest_first(self.layout)
        chunks = shard_chunks(layout, lambda n: bytes_of(self.bits[n]).data, {"format": "pt"})
        with (directory / FULL_SHARD_FILE).open("wb") as file:
            file.writelines(chunks)
        (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(dict(self.config)))


class _HostCopy(HostTarget):
    """An ApplyTarget over memory of its own, which begins with these bits, else with zeros."""

    def __init__(self, layout: Layout, bits: Mapping[str, Bits]) -> None:
        self._layout = layout
        self.copies = {
            name: bits[name].copy() if name in bits else bits_of(zero_tensor(spec))
            for name, spec in layout.items()
        }

    def bits(self, name: str) -> Bits:
        return self.copies[name]


class AdapterStores:
    """Reads adapters of all stores under a root. `manifest` and `copied` may run in two threads."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._pool = PacedPool(THREADS)
        self._open: dict[str, tuple[Store, Receiver]] = {}
        self._manifests: dict[tuple[str, WeightVersion], tuple[Manifest, str]] = {}
        """Manifests of versions between their first staging and the end of their load, each with
        the `Store.stamp` before it was read."""

    def paced_by(self, pace: Pace) -> None:
        """See EngineWeights."""
        self._pool.pace = pace

    def known(self, store: str, version: WeightVersion) -> Manifest | None:
        """The index of a version, if it was read for this update."""
        found, _ = self._manifests.get((store, version), (None, ""))
        return found

    def has_other(self, store: str, version: WeightVersion, state_hash: str | None) -> bool:
        """Whether the index that was read for this update is not of the expected state, or was
        replaced since: another run may have published this number."""
        if (version_read := self._manifests.get((store, version))) is None:
            return False
        manifest, stamp = version_read
        if state_hash not in {None, manifest.state_hash}:
            return True
        opened, _ = self._opened(store)
        if opened.stamp(version) in {"", stamp}:
            return False
        # Some file systems give a file another number at each look.
        with suppress(RoseMuxError):
            return opened.manifest(VersionRef(Kind.WEIGHT, version)) != manifest
        return True

    def manifest(self, store: str, version: WeightVersion) -> Manifest | None:
        """The index of a version, cached; None if it cannot be read, which the load reports."""
        if (found := self.known(store, version)) is None:
            try:
                stamp = self._opened(store)[0].stamp(version)
                found = self._read_manifest(store, version)
            except RoseMuxError:
                return None
            if len(self._manifests) >= MAX_REMEMBERED:
                self._manifests.clear()
            self._manifests[store, version] = found, stamp
        return found

    def forget(self, store: str, version: WeightVersion) -> None:
        """The version's update is over: another run may publish one of its number."""
        self._manifests.pop((store, version), None)

    def copied(
        self,
        store: str,
        version: WeightVersion,
        held: AdapterCopy | None,
        *,
        check: Callable[[str | None], None] = lambda _state_hash: None,
    ) -> AdapterCopy:
        """Copies a version, by deltas from `held` where that is cheaper; `check` as in
        `Receiver.prepare`. Raises Receiver's errors, and ConfigError for whole models."""
        opened, receiver = self._opened(store)
        manifest = self._read_manifest(store, version)
        record = manifest.adapter
        if record is None:
            raise ConfigError(f"version {version} of {store} is no adapter but a whole model")
        receiver.base = base_of(record)
        staged = receiver.prepare(held.applied.version if held else None, version, check=check)
        if staged.full is None and (held is None or held.layout != staged.layout):
            staged = receiver.prepare(None, version, check=check)
        copy = _HostCopy(staged.layout, held.bits if held and staged.full is None else {})
        applied = receiver.settle(staged, copy)
        ref = self._ref(store, version)
        raw = opened.small_file(ref, CONFIG_FILE, MAX_CONFIG_BYTES)
        return AdapterCopy(
            store=store,
            record=record,
            config=checked_config(raw, record, where=f"{store}/{ref.directory}"),
            layout=staged.layout,
            bits=copy.copies,
            applied=applied,
            stamp=staged.stamp,
        )

    def receiver(self, store: str) -> Receiver:
        """The receiver of a store. Raises ConfigError."""
        return self._opened(store)[1]

    def close(self) -> None:
        for _, receiver in self._open.values():
            receiver.close()
        self._open.clear()

    def _read_manifest(self, store: str, version: WeightVersion) -> Manifest:
        return self._opened(store)[0].manifest(self._ref(store, version))

    def _ref(self, store: str, version: WeightVersion) -> VersionRef:
        """An anchor may outlive the delta to the same version."""
        refs = self._opened(store)[0].refs()
        named = (VersionRef(kind, version) for kind in (Kind.WEIGHT, Kind.ANCHOR))
        found = next((ref for ref in named if ref in refs), None)
        if found is None:
            raise Stale(f"version {version} of {store} is not there (any more)")
        return found

    def _opened(self, name: str) -> tuple[Store, Receiver]:
        """A store and its receiver, which read one source."""
        if name not in self._open:
            source = self._root.store(name)
            opened = Store(source), Receiver(source, work_pool=self._pool)
            # Another thread may have opened it meanwhile.
            self._open.setdefault(name, opened)
        return self._open[name]
