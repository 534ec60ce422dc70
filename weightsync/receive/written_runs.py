"""Which trainer's run the versions written here are of: a run that begins anew reuses numbers.

RoseMux's versions have a hash of the whole state; another trainer's have only a stamp.
"""

from contextlib import suppress

from harvester.contracts.errors import Corrupt, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.layout.manifest import Manifest
from weightsync.layout.names import Kind, VersionRef
from weightsync.reading.store import Store
from weightsync.receive.known_steps import KnownSteps
from weightsync.receive.plan import PullPlan

BROKEN = (Corrupt, Unsupported, Stale)
"""Faults of one way to a version; faults that all ways share, or that may pass, are not listed."""


class WrittenRuns:
    """Belongs to the receiver that writes."""

    def __init__(self, store: Store, steps: KnownSteps) -> None:
        self._store, self._steps = store, steps
        self._last: tuple[WeightVersion | None, str | None] = None, None
        """The version that was written last or is held, and its state hash as its store gave it."""
        self._stamps: dict[WeightVersion, str] = {}
        """Stamp of every version that was written here; empty for ours, and where none is seen."""

    def wrote(self, plan: PullPlan) -> None:
        self._stamps |= {step.ref.version: step.manifest.stamp for step in plan.steps}
        self.adopt(plan.target, plan.manifest.state_hash)

    def adopt(self, version: WeightVersion, state_hash: str | None) -> None:
        """The holder has this version, which another receiver wrote."""
        self._last = version, state_hash

    def has_other(self, held: WeightVersion | None) -> bool:
        """Whether the store has another run's version under the number of the held one, if that
        was written last."""
        if held is None or held != self._last[0]:
            return False
        known = self._stamps.get(held)
        with suppress(*BROKEN):
            found = self._store.manifest(VersionRef(Kind.WEIGHT, held))
            is_ours = found.section is not None
            return found.state_hash != self._last[1] if is_ours else _differs(found, known)
        return bool(known)

    def was_replaced(
        self,
        version: WeightVersion,
        target: WeightVersion,
        known: str | None = None,
        *,
        is_partial: bool,
    ) -> bool:
        """Whether the store's version under this number may differ from the one stamped `known`, by
        default the one written here. `is_partial`: the holder has a part of it."""
        known = self._stamps.get(version) if known is None else known
        with suppress(*BROKEN):
            # A relay may have only the anchor, or a skip delta, of the target in an outage.
            here = (ref for ref in self._steps.present if ref.version == target)
            ref = max(here, key=lambda ref: ref.kind, default=VersionRef(Kind.WEIGHT, target))
            step = self._steps.step(ref)
            manifest = step.manifest if step else self._store.manifest(ref)
            if manifest.section is not None:
                if is_partial:
                    # No digest shows that a delta of another run was applied to a part.
                    return bool(known) or not self._is_in_store(version)
                # A later version needs no look: deltas of another run fail their state hash.
                is_last = self._last[0] == version == target
                return bool(known) or (is_last and self._last[1] != manifest.state_hash)
        try:
            return _differs(self._store.manifest(VersionRef(Kind.WEIGHT, version)), known)
        except Stale:
            # A missing version was pruned: another run would have written its own.
            return not known or target <= version
        except (Corrupt, Unsupported):
            return True

    def _is_in_store(self, version: WeightVersion) -> bool:
        """Whether the store is seen to have the state that was written last under this number."""
        here = (ref for ref in self._steps.present if ref.version == version)
        with suppress(*BROKEN):
            for ref in sorted(here, key=lambda ref: ref.kind is not Kind.WEIGHT):
                return self._store.manifest(ref).state_hash == self._last[1]
        return False


def _differs(found: Manifest, known: str | None) -> bool:
    return bool(known) if found.section is not None else found.stamp not in {"", known}
