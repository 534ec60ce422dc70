"""The directories of a store as they were last listed, and what their indexes say, each read once.

The receiver decides when to forget: a restarted trainer, or a repair, writes under the same names.
"""

from concurrent.futures import Executor
from contextlib import suppress

from harvester.contracts.errors import RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.layout.names import Kind, VersionRef
from weightsync.reading.store import Store
from weightsync.receive.plan import PlanStep, likely_refs

MAX_REMEMBERED_STEPS = 256
_COMPOSED_FROM = 4
"""Versions from which on a server is asked to compose them: as many as the shortest skip delta."""


class KnownSteps:
    """`pool` reads the indexes of a store over a network."""

    def __init__(self, store: Store, pool: Executor) -> None:
        self._store, self._pool = store, pool
        self.present: frozenset[VersionRef] = frozenset()
        """Every directory that has a version's name, and skip deltas that a server would make."""
        self._steps: dict[VersionRef, PlanStep] = {}

    def listed(self, current: WeightVersion | None, target: WeightVersion) -> WeightVersion | None:
        """List the store for a plan between these versions; returns the newest version."""
        latest, self.present = self._store.newest(target)
        is_behind = current is not None and target - current >= _COMPOSED_FROM
        if is_behind and self._store.source.composes:
            self.present |= {VersionRef(Kind.SKIP, target, current)}
        return latest

    def step(self, ref: VersionRef) -> PlanStep | None:
        """Manifest and size of a directory that was there when the store was listed, else None."""
        if ref not in self.present:
            return None
        if ref not in self._steps:
            if len(self._steps) >= MAX_REMEMBERED_STEPS:
                self._steps.clear()
            stamp = self._store.stamp(ref.version)
            try:
                manifest = self._store.manifest(ref)
            except Stale:
                if ref.kind is Kind.WEIGHT:
                    raise
                # An object store also lists directories that are still being written; a server
                # that has not composed a delta in time would be waited for each time.
                self.present -= {ref}
                return None
            self._steps[ref] = PlanStep(ref, manifest, self._store.size_bytes(ref, manifest), stamp)
        return self._steps[ref]

    def look_ahead(self, since: WeightVersion | None, target: WeightVersion) -> None:
        """Read a long chain's indexes in parallel: over a network each is a few round trips.
        `since`: None for the newest anchor."""
        anchors = (ref.version for ref in self.present if ref.kind is Kind.ANCHOR)
        start = since or max((v for v in anchors if v <= target), default=WeightVersion(0))
        chain = likely_refs(self.present, since=start, target=target)
        if self._store.is_remote and 1 < len(chain) < MAX_REMEMBERED_STEPS:
            list(self._pool.map(self._look_at, chain))

    def _look_at(self, ref: VersionRef) -> None:
        # Faults are reported where the plan reaches this directory.
        with suppress(RoseMuxError):
            self.step(ref)

    def forget(self, version: WeightVersion | None = None) -> None:
        """Read the index of a version again, or those of all."""
        if version is None:
            self._steps.clear()
        else:
            self._steps.pop(VersionRef(Kind.WEIGHT, version), None)
