"""A job's declaration of its phases, and the settings of the permit policy."""

from math import inf
from typing import Annotated

import msgspec

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind

PHASES_MAX = 8
LEASED_TAIL_RATIO = 0.85
"""Completed share from which a rollout's tail may end on leases, where the job declares none."""
PHASE_NODES_MAX = 1024
ACCELERATORS_MAX = 64

Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]


class PermitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease_s: Seconds = 10.0
    """Time without a beat after which a holder has lost its permit, in s."""
    patience_s: Seconds = 0.25
    """Time for which a free node is kept for the first job until its worker asks, in s."""
    warn_s: Seconds = 30.0
    """Time from the warning about an overrun to the revocation of the permit, in s."""
    grace_s: Seconds = 30.0
    """Time from the revocation to the end of the permit, in s."""


class PhaseTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One phase of a job's cycle. A weight sync has no nodes and starts at once."""

    kind: PhaseKind
    nodes: tuple[NodeId, ...] = ()
    """All that the phase is pinned to; their permits are acquired together."""
    accelerators: int = 1
    """Accelerators of each node; a partly held node is shared with another job's tail."""
    max_s: float | None = None
    """Declared longest duration, until runs have shown a longer one; None: no watchdog."""
    least_accelerators: int = 0
    """Accelerators, over all nodes, on which the phase may begin while tails of others hold the
    rest; 0: it begins on all or not at all."""
    tail_ratio: float = 1.0
    """Completed share from which `tail_accelerators` suffice; 1: the phase keeps all to its end."""
    tail_accelerators: int = 1
    """Accelerators of the tail, over all nodes. 0: the tail goes to capacity outside these
    nodes."""
    learn_tail: bool = False
    """The two above hold until the job's own phases have shown how its responses complete."""

    @property
    def all_accelerators(self) -> int:
        return len(self.nodes) * self.accelerators


class JobTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    Phase = PhaseTerms
    job: JobId
    phases: tuple[PhaseTerms, ...]
    """Phases in the order of the cycle, each kind once."""

    def phase(self, kind: PhaseKind) -> PhaseTerms | None:
        for phase in self.phases:
            if phase.kind is kind:
                return phase
        return None

    def after(self, kind: PhaseKind) -> PhaseTerms:
        """The phase that follows `kind` in the cycle."""
        kinds = [phase.kind for phase in self.phases]
        return self.phases[(kinds.index(kind) + 1) % len(kinds)]


def leased_tail(phase: PhaseTerms) -> PhaseTerms:
    """The phase with a tail that may leave for leases; a declared tail stays as it is."""
    declared = phase.tail_ratio < 1.0 or phase.learn_tail
    if declared or phase.kind is not PhaseKind.ROLLOUT:
        return phase
    return msgspec.structs.replace(phase, tail_ratio=LEASED_TAIL_RATIO, tail_accelerators=0)


def terms_changes(before: JobTerms, after: JobTerms) -> str:
    """The differences in words, as "rollout: max_s was 5.0, is 50.0"."""
    words = []
    for kind in dict.fromkeys(one.kind for one in (*before.phases, *after.phases)):
        old, new = before.phase(kind), after.phase(kind)
        if old is None or new is None:
            words.append(f"{kind}: {'new' if old is None else 'gone'}")
            continue
        for name in PhaseTerms.__struct_fields__:
            was, now = (
                " ".join(value) if isinstance(value, tuple) else value
                for value in (getattr(old, name), getattr(new, name))
            )
            words += [f"{kind}: {name} was {was}, is {now}"] * (was != now)
    return "; ".join(words) or "the order of its phases"


def terms_fault(terms: JobTerms) -> str:
    """Why the terms cannot be met, in words; empty if they can."""
    kinds = [phase.kind for phase in terms.phases]
    if not 1 <= len(kinds) <= PHASES_MAX or len(set(kinds)) != len(kinds):
        return f"a job has 1 to {PHASES_MAX} phases, each kind once"
    for phase in terms.phases:
        nodes, whole = len(phase.nodes), phase.all_accelerators
        if phase.kind is PhaseKind.SYNC and nodes:
            return f"{phase.kind}: has no nodes"
        least = 0 if phase.kind is PhaseKind.SYNC else 1
        if not least <= nodes <= PHASE_NODES_MAX or len(set(phase.nodes)) != nodes:
            return f"{phase.kind}: 1 to {PHASE_NODES_MAX} nodes, each once"
        if not 1 <= phase.accelerators <= ACCELERATORS_MAX:
            return f"{phase.kind}: a node has 1 to {ACCELERATORS_MAX} accelerators"
        most = max(1, whole)
        if not 0 <= phase.least_accelerators <= most or not 0 <= phase.tail_accelerators <= most:
            return f"{phase.kind}: least_accelerators and tail_accelerators are at most {whole}"
        if not 0 < phase.tail_ratio <= 1:
            return f"{phase.kind}: tail_ratio is above 0 and at most 1"
        if phase.learn_tail and phase.tail_accelerators == 0:
            return f"{phase.kind}: learn_tail is for tails that stay on nodes of the phase"
        if phase.max_s is not None and not 0 < phase.max_s < inf:
            return f"{phase.kind}: max_s is a number above 0; leave it out for no bound"
    return ""
