"""A job's declaration to a planning control, and the permit terms for its placement."""

from itertools import pairwise
from typing import Final

import msgspec

from harvester.contracts.ids import JobId, NodeId, TenantId
from scheduler.model import JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.beliefs.durations import Measured
from scheduler.rollmux.beliefs.tail import Completion, best_tail, tail_accelerators
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms, leased_tail

NODES_MAX: Final = 8
"""Nodes of one pool per job; the limit of `rosemux plan` too."""
SECONDS_MAX: Final = 1e7
BYTES_MAX: Final = 10**15
SLO_MAX: Final = 100.0
SEEN_MAX: Final = 1000
CURVE_MAX: Final = 64
KINDS: Final = (PhaseKind.ROLLOUT, PhaseKind.TRAINING)
"""Phases of every planned job, in the order of its iteration; a weight sync may follow."""


class DeclaredPhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One declared phase. The planner chooses its nodes; a weight sync has `nodes` 0."""

    kind: PhaseKind
    max_s: float
    """Longest duration, with every response at its token limit, in s; longer phases cause a
    warning."""
    nodes: int = 1
    mean_s: float | None = None
    """Measured alone on its nodes before; None: nothing is known but `max_s`."""
    cv: float = 0.1
    seen: int = 40
    """Phases that `mean_s` is of."""
    divisible: bool = True
    """Whether a rollout's engines may begin on the accelerators beside another job's tail, and
    gather their own tail on a part of them; if not, it waits until such a tail has ended."""
    curve: tuple[Completion, ...] = ()
    """Completion curve of a rollout; empty: unknown until its own was seen."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId
    phases: tuple[DeclaredPhase, ...]
    """Rollout, training, and a weight sync where it takes time between two iterations."""
    slo: float
    """Tolerated slow-down: time in company over time alone, from the placement on."""
    host_bytes: int
    """State that stays resident in host memory of every node of the job."""
    tenant: TenantId = TenantId("default")
    harvesting: bool = False
    """Its rollouts use leases where the control allows them; no plan counts on one."""

    @property
    def as_job(self) -> JobSpec:
        """The job in the planner's model."""
        return JobSpec(
            job=self.job,
            tenant=self.tenant,
            phases=tuple(
                PhaseSpec(
                    kind=one.kind,
                    mean_s=one.max_s,
                    max_s=one.max_s,
                    nodes=one.nodes,
                    divisible=one.divisible,
                )
                for one in self.phases
            ),
            host_bytes_per_node=self.host_bytes,
            slowdown_slo=self.slo,
        )

    @property
    def measured(self) -> dict[PhaseKind, Measured]:
        """Earlier measurements of its phases."""
        return {
            one.kind: Measured(mean_s=one.mean_s, cv=one.cv, seen=one.seen)
            for one in self.phases
            if one.mean_s is not None
        }

    def terms(
        self,
        rollout: tuple[NodeId, ...],
        training: tuple[NodeId, ...],
        *,
        accelerators: int,
        tail_ratio: float | None = None,
        leases: bool = False,
    ) -> JobTerms | None:
        """Permit terms on the given nodes; a rollout node has `accelerators` accelerators.

        A phase without nodes is left out; None if both have none. A rollout's tail leaves at
        `tail_ratio` complete, or by its completion curve: as declared at first, then as observed.
        `leases`: the tail of a job that harvests and is not divisible may leave for them.
        """
        sides = {PhaseKind.ROLLOUT: rollout, PhaseKind.TRAINING: training, PhaseKind.SYNC: ()}
        phases = tuple(
            _phase_terms(one, sides[one.kind], accelerators, tail_ratio)
            for one in self.phases
            if sides[one.kind] or one.kind is PhaseKind.SYNC
        )
        if leases and self.harvesting:
            phases = tuple(map(leased_tail, phases))
        return JobTerms(job=self.job, phases=phases) if rollout or training else None


def _phase_terms(
    one: DeclaredPhase, nodes: tuple[NodeId, ...], accelerators: int, tail_ratio: float | None
) -> PhaseTerms:
    if one.kind is not PhaseKind.ROLLOUT or not one.divisible:
        return PhaseTerms(kind=one.kind, nodes=nodes, max_s=one.max_s)
    count = len(nodes) * accelerators
    leaves_at = best_tail(one.curve, accelerators=count)[0] if tail_ratio is None else tail_ratio
    return PhaseTerms(
        kind=one.kind,
        nodes=nodes,
        accelerators=accelerators,
        max_s=one.max_s,
        least_accelerators=1,
        tail_ratio=leaves_at,
        tail_accelerators=tail_accelerators(leaves_at, count),
        learn_tail=tail_ratio is None,
    )


def submission_fault(given: Submission) -> str:
    """Why no placement can be given so, in words; empty if one can. NaN is within no bounds."""
    if tuple(one.kind for one in given.phases) not in (KINDS, (*KINDS, PhaseKind.SYNC)):
        return "a planned job has a rollout and a training phase, then a sync or none"
    if not 1.0 <= given.slo <= SLO_MAX:
        return f"slo is 1 to {SLO_MAX:g}"
    if not 0 <= given.host_bytes <= BYTES_MAX:
        return f"host_bytes is 0 to {BYTES_MAX}"
    for one in given.phases:
        if not 0.0 < one.max_s <= SECONDS_MAX:
            return f"{one.kind}: max_s is above 0 and at most {SECONDS_MAX:g}"
        if one.mean_s is not None and not 0.0 < one.mean_s <= one.max_s:
            return f"{one.kind}: mean_s is above 0 and at most max_s"
        if not 0.0 <= one.cv <= 1.0 or not 1 <= one.seen <= SEEN_MAX:
            return f"{one.kind}: cv is 0 to 1 and seen 1 to {SEEN_MAX}"
        if not _rises(one.curve) or (one.curve and one.kind is not PhaseKind.ROLLOUT):
            return f"{one.kind}: curve is a rollout's, from 0 to 1 and at most {CURVE_MAX} points"
        if one.kind is PhaseKind.SYNC:
            if one.nodes != 0:
                return f"{one.kind}: holds no node, nodes is 0"
            continue
        if not 1 <= one.nodes <= NODES_MAX:
            return f"{one.kind}: nodes is 1 to {NODES_MAX}"
    return ""


def _rises(curve: tuple[Completion, ...]) -> bool:
    inside = all(0.0 <= each <= 1.0 for point in curve for each in point)
    rising = all(a <= b for one, two in pairwise(curve) for a, b in zip(one, two, strict=True))
    return inside and rising and len(curve) <= CURVE_MAX
