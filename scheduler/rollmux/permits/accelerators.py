"""Accelerators that a permit covers, and the progress of a phase on them.

A phase works at the share of its accelerators that it holds; its tail needs only the share that it
keeps and works at its own speed anywhere. So a scheduler that sees permits only knows what a phase
would have taken alone.
"""

from collections.abc import Sequence

from harvester.contracts.ids import NodeId
from scheduler.rollmux.permits.completion import tail_of
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.permits.terms import PhaseTerms


def spread(nodes: Sequence[NodeId], accelerators: int, *, per_node: int) -> dict[NodeId, int]:
    """Distributes `accelerators` evenly over the nodes, the remainder to the first ones."""
    each, rest = divmod(accelerators, len(nodes))
    counts = ((node, each + (at < rest)) for at, node in enumerate(nodes))
    return {node: min(count, per_node) for node, count in counts if count}


def held(permit: JobPermit, phase: PhaseTerms) -> int:
    """Accelerators that its permit covers."""
    parts = permit.accelerators
    if not parts:
        return len(permit.nodes) * phase.accelerators
    return sum(len(parts[node]) if node in parts else phase.accelerators for node in permit.nodes)


def work_until(permit: JobPermit, *, now: float) -> None:
    """Brings `worked_s` up to now; before anything changes that its speed depends on."""
    passed_s = max(0.0, now - permit.worked_at_s)
    permit.worked_s += passed_s * speed(permit)
    permit.worked_at_s = now


def in_tail(permit: JobPermit, phase: PhaseTerms) -> bool:
    """Whether the completed share has reached the start of its tail."""
    ratio, _ = tail_of(phase, permit.curves.get(phase.kind))
    return ratio < 1.0 and permit.complete_ratio >= ratio


def speed(permit: JobPermit) -> float:
    """Seconds that the phase would have taken alone, in one second as its permit is now."""
    if (not permit.accelerators and not permit.awaits) or permit.stage is PermitStage.TAILING:
        return 1.0
    phase = permit.phase
    if phase is None:
        return 1.0
    return 1.0 if in_tail(permit, phase) else held(permit, phase) / phase.all_accelerators
