"""Accelerators that a permit covers, and what a phase gets done on them.

A phase works at the share of its accelerators that it holds; its tail needs only the share that it
keeps and works at its own speed anywhere. So a scheduler that sees permits only knows what a phase
would have taken alone.
"""

from collections.abc import Sequence

from harvester.contracts.ids import NodeId
from scheduler.rollmux.permits.completion import tail_of
from scheduler.rollmux.permits.standing import JobPermit, PermitStage
from scheduler.rollmux.permits.terms import PhaseTerms

Parts = dict[NodeId, tuple[int, ...]]


def spread(nodes: Sequence[NodeId], accelerators: int, *, per_node: int) -> dict[NodeId, int]:
    """Distributes `accelerators` evenly over the nodes, the remainder to the first ones."""
    each, rest = divmod(accelerators, len(nodes))
    counts = ((node, each + (at < rest)) for at, node in enumerate(nodes))
    return {node: min(count, per_node) for node, count in counts if count}


def held(standing: JobPermit, phase: PhaseTerms) -> int:
    """Accelerators that its permit covers."""
    parts = standing.accelerators
    if not parts:
        return len(standing.nodes) * phase.accelerators
    return sum(len(parts[node]) if node in parts else phase.accelerators for node in standing.nodes)


def work_until(standing: JobPermit, *, now: float) -> None:
    """Brings `worked_s` up to now; before anything changes that its speed depends on."""
    passed_s = max(0.0, now - standing.worked_at_s)
    standing.worked_s += passed_s * speed(standing)
    standing.worked_at_s = now


def in_tail(standing: JobPermit, phase: PhaseTerms) -> bool:
    """Whether the completed share has reached the start of its tail."""
    ratio, _ = tail_of(phase, standing.curves.get(phase.kind))
    return ratio < 1.0 and standing.complete_ratio >= ratio


def speed(standing: JobPermit) -> float:
    """Seconds that the phase would have taken alone, in one second as its permit is now."""
    if (not standing.accelerators and not standing.awaits) or standing.stage is PermitStage.TAILING:
        return 1.0
    phase = None if standing.kind is None else standing.terms.phase(standing.kind)
    if phase is None:
        return 1.0
    return 1.0 if in_tail(standing, phase) else held(standing, phase) / phase.all_accelerators
