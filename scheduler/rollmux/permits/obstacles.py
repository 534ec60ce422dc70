"""Asks jobs to make room for one that waits: tails, states left loaded, phases that overran.

A tail is asked to move, and a state to leave accelerators, only where that lets a job start at
once: either costs seconds. To end a phase costs its job a step, so an overrun is ended only where
another job waits. Updates the permits concerned and returns the effects for their holders.
"""

from typing import Final, NamedTuple

from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.permits.completion import TailMove, tail_of
from scheduler.rollmux.permits.events import NarrowPhase, RevokePermit, UnloadNodes
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage, PermitTrigger
from scheduler.rollmux.permits.permit_table import PermitTable
from scheduler.rollmux.permits.terms import PermitsConfig, PhaseTerms
from scheduler.rollmux.permits.watchdog import WatchdogVerdict, verdict


class MovableTail(NamedTuple):
    holder: JobPermit
    phase: PhaseTerms
    keeps: dict[NodeId, int]
    """Accelerators, of the nodes on which it keeps any."""


class Obstacles(NamedTuple):
    tails: list[MovableTail]
    loaded: dict[JobId, tuple[NodeId, ...]]
    """Nodes on whose accelerators a job's state was left, by job."""


NOTHING: Final = Obstacles([], {})


def make_room(
    table: PermitTable, config: PermitsConfig, touched: tuple[NodeId, ...], *, now: float
) -> list[NarrowPhase | RevokePermit | UnloadNodes]:
    """Makes room on the nodes that have changed."""
    asked: list[NarrowPhase | RevokePermit | UnloadNodes] = []
    waiting = [each for each in table.in_line(touched) if table.waits(each, now)]
    if not waiting:
        return asked
    for permit in table.holders(touched):
        if permit.warned_s is None or not table.is_requested(permit, now):
            continue
        if verdict(permit, config, requested=True, now=now) is WatchdogVerdict.OBSTRUCTS:
            asked.append(revoke(table, config, permit, now=now))
    for permit in waiting:
        tails, loaded = _obstacles(table, permit, now)
        asked += [_narrow(table, tail, now) for tail in tails]
        asked += [_unload(table.jobs[job], nodes) for job, nodes in loaded.items()]
    return asked


def revoke(
    table: PermitTable, config: PermitsConfig, permit: JobPermit, *, now: float
) -> RevokePermit:
    permit.move(PermitTrigger.REVOKED)
    permit.revoked_s = now
    table.leave_lines(permit)
    return RevokePermit(
        job=permit.job,
        epoch=permit.epoch,
        grace_s=config.grace_s,
        reason=f"runs for {now - permit.started_s:.1f} s, and others wait",
    )


def _obstacles(table: PermitTable, waiter: JobPermit, now: float) -> Obstacles:
    """The obstacles, if they alone keep a waiting job from its start; else nothing."""
    phase = waiter.phase
    if phase is None or not all(table.is_first(waiter, node, now) for node in waiter.awaits):
        return NOTHING
    tails: dict[JobId, MovableTail] = {}
    loaded: dict[JobId, tuple[NodeId, ...]] = {}
    found = 0
    for node in waiter.awaits:
        job = table.on(node)
        if job is None:
            found += table.free_accelerators(node, per_node=phase.accelerators)
            if (other := table.in_the_way(waiter, node)) is waiter:
                loaded[other.job] = other.loaded
            elif other is not None:
                loaded[other.job] = (*loaded.get(other.job, ()), node)
        elif not table.under_tail(node):
            tail = tails.get(job) or _movable_tail(table, table.jobs[job], now)
            if tail is None:
                return NOTHING
            tails[job] = tail
            found += max(0, phase.accelerators - tail.keeps.get(node, 0))
    starts = found == phase.all_accelerators or found >= phase.least_accelerators > 0
    return Obstacles([*tails.values()], loaded) if starts else NOTHING


def _unload(other: JobPermit, nodes: tuple[NodeId, ...]) -> UnloadNodes:
    other.unload = tuple(dict.fromkeys((*other.unload, *nodes)))
    return UnloadNodes(job=other.job, nodes=nodes)


def _movable_tail(table: PermitTable, holder: JobPermit, now: float) -> MovableTail | None:
    """The tail that may leave; None before the phase's tail, or beside another job's tail."""
    phase = holder.phase
    if phase is None or holder.stage is not PermitStage.RUNNING or not holder.in_tail:
        return None
    curve = holder.curves.get(phase.kind)
    if phase.learn_tail and curve is not None and curve.stays and holder.course is not None:
        return None
    _, count = tail_of(phase, curve)
    alone = not holder.accelerators and not any(map(table.has_tail, holder.nodes))
    if not alone or count >= len(holder.nodes) * phase.accelerators:
        return None
    # Accelerators are kept first on the nodes with the fewest waiting jobs.
    order = sorted(holder.nodes, key=lambda node: (len(table.waiting_at(node, now)), node))
    return MovableTail(holder, phase, _spread(order, count, per_node=phase.accelerators))


def _spread(nodes: list[NodeId], accelerators: int, *, per_node: int) -> dict[NodeId, int]:
    """Distributes `accelerators` evenly over the nodes, the remainder to the first ones."""
    each, rest = divmod(accelerators, len(nodes))
    counts = ((node, each + (at < rest)) for at, node in enumerate(nodes))
    return {node: min(count, per_node) for node, count in counts if count}


def _narrow(table: PermitTable, tail: MovableTail, now: float) -> NarrowPhase:
    holder, phase, keeps = tail
    holder.work_until(now)
    holder.move(PermitTrigger.ASKED_TO_NARROW)
    if holder.course is not None and keeps:
        holder.tail = TailMove(course=holder.course, asked_s=holder.worked_s)
    table.leave_lines(holder)
    holder.keep = tuple(node for node in holder.nodes if node in keeps)
    holder.keep_accelerators = {
        node: tuple(range(keeps[node])) for node in holder.keep if keeps[node] < phase.accelerators
    }
    return NarrowPhase(
        job=holder.job,
        epoch=holder.epoch,
        keep=holder.keep,
        accelerators=holder.keep_accelerators,
        reason=f"{holder.complete_ratio:.0%} complete, and others wait",
    )
