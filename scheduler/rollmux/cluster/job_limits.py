"""Limits of a job's declaration, to a control and in a file, and the terms of its placement."""

from itertools import pairwise
from typing import Final

from harvester.contracts.ids import NodeId
from scheduler.model import Completion, JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.beliefs.tail import best_tail, tail_accelerators
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms, leased_tail

GB: Final = 10**9
JOB_NODES_MAX: Final = 8
"""Nodes of one pool per job."""
SECONDS_MIN: Final = 1e-3
SECONDS_MAX: Final = 1e7
BYTES_MAX: Final = 10**15
SLO_MAX: Final = 100.0
SEEN_MAX: Final = 1000
CURVE_MAX: Final = 64
KINDS: Final = (PhaseKind.ROLLOUT, PhaseKind.TRAINING)
"""Phases of every planned job, in the order of its iteration; a weight sync may follow."""


def permit_terms(
    spec: JobSpec,
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
        for one in spec.phases
        if sides[one.kind] or one.kind is PhaseKind.SYNC
    )
    if leases and spec.harvesting:
        phases = tuple(map(leased_tail, phases))
    return JobTerms(job=spec.job, phases=phases) if rollout or training else None


def _phase_terms(
    one: PhaseSpec, nodes: tuple[NodeId, ...], accelerators: int, tail_ratio: float | None
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


def spec_fault(given: JobSpec) -> str:
    """Why no placement can be given so, in words; empty if one can. NaN is within no bounds."""
    if tuple(one.kind for one in given.phases) not in (KINDS, (*KINDS, PhaseKind.SYNC)):
        return "a planned job has a rollout and a training phase, then a sync or none"
    if not 1.0 <= given.slo <= SLO_MAX:
        return f"slo is 1 to {SLO_MAX:g}"
    if not 0 <= given.host_bytes <= BYTES_MAX:
        return f"host_bytes is 0 to {BYTES_MAX}"
    for one in given.phases:
        if not SECONDS_MIN <= one.max_s <= SECONDS_MAX:
            return f"{one.kind}: max_s is {SECONDS_MIN:g} to {SECONDS_MAX:g}"
        if one.mean_s is not None and not SECONDS_MIN <= one.mean_s <= one.max_s:
            return f"{one.kind}: mean_s is {SECONDS_MIN:g} to max_s"
        if not 0.0 <= one.cv <= 1.0 or not 1 <= one.seen <= SEEN_MAX:
            return f"{one.kind}: cv is 0 to 1 and seen 1 to {SEEN_MAX}"
        if not _rises(one.curve) or (one.curve and one.kind is not PhaseKind.ROLLOUT):
            return f"{one.kind}: curve is a rollout's, from 0 to 1 and at most {CURVE_MAX} points"
        if one.kind is PhaseKind.SYNC:
            if one.nodes != 0:
                return f"{one.kind}: holds no node, nodes is 0"
            continue
        if not 1 <= one.nodes <= JOB_NODES_MAX:
            return f"{one.kind}: nodes is 1 to {JOB_NODES_MAX}"
    return ""


def _rises(curve: tuple[Completion, ...]) -> bool:
    inside = all(0.0 <= each <= 1.0 for point in curve for each in point)
    rising = all(a <= b for one, two in pairwise(curve) for a, b in zip(one, two, strict=True))
    return inside and rising and len(curve) <= CURVE_MAX
