"""What a job declares to a planning control, and the terms of permits that a place gives."""

from collections.abc import Iterator
from typing import Final

import msgspec

from harvester.contracts.ids import JobId, NodeId, TenantId
from scheduler.policy.model import Job, Phase, PhaseKind, Placement
from scheduler.policy.phases.terms import JobTerms, PhaseTerms, leased_tail

NODES_MAX: Final = 8
"""Of one pool; what `rosemux plan` takes too."""
SECONDS_MAX: Final = 1e7
BYTES_MAX: Final = 10**15
SLO_MAX: Final = 100.0
SEEN_MAX: Final = 1000
KINDS: Final = (PhaseKind.ROLLOUT, PhaseKind.TRAINING)
"""Of every planned job, in the order of its iteration."""


class DeclaredPhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which nodes the phase gets is the planner's answer."""

    kind: PhaseKind
    max_s: float
    """With every response at its token limit; longer phases are warned of."""
    nodes: int = 1
    mean_s: float | None = None
    """Measured alone on its nodes before; None: nothing is known but `max_s`."""
    cv: float = 0.1
    seen: int = 40
    """Phases that `mean_s` is of."""
    least_nodes: int = 0
    tail_ratio: float = 1.0
    tail_nodes: int = 1
    learn_tail: bool = False
    """These four as in `PhaseTerms`. A plan does not count on tails that leave nodes."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId
    phases: tuple[DeclaredPhase, ...]
    """Rollout, then training."""
    slo: float
    """Tolerated slow-down: time in company over time alone, from the placement on."""
    host_bytes: int
    """State that stays resident in host memory of every node of the job."""
    tenant: TenantId = TenantId("default")
    harvesting: bool = False
    """Its rollouts use leases where the control allows them; no plan counts on one."""

    @property
    def as_job(self) -> Job:
        """As the planner knows it."""
        return Job(
            job=self.job,
            tenant=self.tenant,
            phases=tuple(
                Phase(kind=one.kind, mean_s=one.max_s, max_s=one.max_s, nodes=one.nodes)
                for one in self.phases
            ),
            host_bytes_per_node=self.host_bytes,
            slowdown_slo=self.slo,
        )

    def terms(
        self, rollout: tuple[NodeId, ...], training: tuple[NodeId, ...], *, leases: bool = False
    ) -> JobTerms | None:
        """On nodes that there are; a phase without is left out. None where neither has any.

        `leases`: the rollout's tail may leave for them, if the job harvests.
        """
        phases = tuple(
            PhaseTerms(
                kind=one.kind,
                nodes=nodes,
                max_s=one.max_s,
                least_nodes=one.least_nodes,
                tail_ratio=one.tail_ratio,
                tail_nodes=one.tail_nodes,
                learn_tail=one.learn_tail,
            )
            for one, nodes in zip(self.phases, (rollout, training), strict=True)
            if nodes
        )
        if leases and self.harvesting:
            phases = tuple(map(leased_tail, phases))
        return JobTerms(job=self.job, phases=phases) if phases else None


def submission_fault(given: Submission) -> str:
    """Why no place can be given so, in words; empty if one can. NaN is within no bounds."""
    if tuple(one.kind for one in given.phases) != KINDS:
        return "a planned job has a rollout and a training phase, in this order"
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
        if not 1 <= one.nodes <= NODES_MAX:
            return f"{one.kind}: nodes is 1 to {NODES_MAX}"
        if not 0 <= one.least_nodes <= one.nodes or not 0 <= one.tail_nodes <= one.nodes:
            return f"{one.kind}: least_nodes and tail_nodes are at most {one.nodes}"
        if not 0.0 < one.tail_ratio <= 1.0:
            return f"{one.kind}: tail_ratio is above 0 and at most 1"
        if one.learn_tail and one.tail_nodes == 0:
            return f"{one.kind}: learn_tail is for tails that stay on nodes of the phase"
    return ""


def measured(phase: DeclaredPhase) -> Iterator[float]:
    """Durations of the declared mean and variation; an odd last one is the mean itself."""
    if phase.mean_s is None:
        return
    sides = [1.0, -1.0] * (phase.seen // 2) + [0.0] * (phase.seen % 2)
    for side in sides:
        yield phase.mean_s * max(0.01, 1.0 + side * phase.cv)


def nodes_of(placement: Placement) -> tuple[NodeId, ...]:
    return (*placement.rollout_nodes, *placement.training_nodes)
