"""Asks holders to make room for those who wait: long tails, and phases that overran.

Without a waiter nobody is asked: to move a tail costs seconds, to end a phase costs its job a step.
Changes the standings that it asks of, and answers what to tell their holders.
"""

from harvester.contracts.ids import NodeId
from scheduler.policy.phases.book import PermitBook
from scheduler.policy.phases.completion import tail_of
from scheduler.policy.phases.events import NarrowPhase, RevokePermit
from scheduler.policy.phases.standing import Stage, Standing, Trigger
from scheduler.policy.phases.terms import PermitsConfig, PhaseTerms
from scheduler.policy.phases.watchdog import Verdict, verdict


def make_room(
    book: PermitBook, config: PermitsConfig, touched: tuple[NodeId, ...], *, now: float
) -> list[NarrowPhase | RevokePermit]:
    """On the nodes where something has changed."""
    asked: list[NarrowPhase | RevokePermit] = []
    for standing in book.holders(touched):
        phase = None if standing.kind is None else standing.terms.phase(standing.kind)
        if phase is None or not book.wanted(standing, now):
            continue
        if verdict(standing, config, wanted=True, now=now) is Verdict.OBSTRUCTS:
            asked.append(revoke(book, config, standing, now=now))
        elif standing.stage is Stage.RUNNING and _has_a_tail(standing, phase):
            asked.append(_narrow(book, standing, phase, now))
    return asked


def revoke(
    book: PermitBook, config: PermitsConfig, standing: Standing, *, now: float
) -> RevokePermit:
    standing.move(Trigger.REVOKED)
    standing.revoked_s = now
    book.leave_lines(standing)
    return RevokePermit(
        job=standing.job,
        epoch=standing.epoch,
        grace_s=config.grace_s,
        reason=f"runs for {now - standing.started_s:.1f} s, and others wait",
    )


def _has_a_tail(standing: Standing, phase: PhaseTerms) -> bool:
    ratio, count = tail_of(phase, standing.curves.get(phase.kind))
    ripe = ratio < 1.0 and standing.complete_ratio >= ratio
    return ripe and len(standing.nodes) > count


def _narrow(book: PermitBook, standing: Standing, phase: PhaseTerms, now: float) -> NarrowPhase:
    standing.move(Trigger.ASKED_TO_NARROW)
    book.leave_lines(standing)
    # Kept are the nodes that the fewest wait for.
    order = sorted(standing.nodes, key=lambda node: (len(book.waiting_at(node, now)), node))
    _, count = tail_of(phase, standing.curves.get(phase.kind))
    kept = set(order[:count])
    standing.keep = tuple(node for node in standing.nodes if node in kept)
    reason = f"{standing.complete_ratio:.0%} complete, and others wait"
    return NarrowPhase(job=standing.job, epoch=standing.epoch, keep=standing.keep, reason=reason)
