"""Reasons for moves as text: the endangered job, and the jobs that move with it."""

from collections.abc import Sequence

from harvester.contracts.ids import JobId
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.forecast.scenarios import ROUNDING
from scheduler.rollmux.planner.relocation import Move


def together(move: Move, moves: Sequence[Move]) -> str:
    """Names of the other jobs that move for the same reason; empty if none does."""
    others: list[JobId] = sorted(one.job for one in moves if one.job != move.job)
    return f", together with {', '.join(others)}" if others else ""


def endangered(jobs: Sequence[JobFacts], roster: Roster, judge: Judge, *, now: float) -> str:
    """Text on jobs that the roster's judge does not admit, with forecasts of the endangered ones.

    `jobs` in the roster's order.
    """
    limits, bounds = roster.slos.tolist(), judge.bounds(roster).tolist()
    alone = [limit < 1.0 for limit in limits]
    said = [_crowded(jobs[at], now) for at in range(len(jobs)) if alone[at] and _shares(roster, at)]
    over = {at: bounds[at] - max(1.0, limits[at]) for at in range(len(jobs)) if not alone[at]}
    # A short look at the means may have rejected a roster that the whole forecast finds close.
    least = ROUNDING if said else min(ROUNDING, max(over.values()) - ROUNDING)
    said += [_slowed(jobs[at], limits[at], bounds[at]) for at in over if over[at] > least]
    return "; ".join(said)


def _shares(roster: Roster, at: int) -> bool:
    """Whether another job is on one of the job's nodes."""
    nodes = roster.jobs["rollout_nodes"] | roster.jobs["training_nodes"]
    return any(nodes[at] & other for number, other in enumerate(nodes) if number != at)


def _crowded(facts: JobFacts, now: float) -> str:
    return (
        f"the promise to {facts.job.job} was at risk: its credit of "
        f"{facts.settled_credit_s(now):.0f} s absorbs no surprise beside others"
    )


def _slowed(facts: JobFacts, limit: float, bound: float) -> str:
    return (
        f"the promise to {facts.job.job} was at risk: forecast slow-down {bound:.2f}, at most "
        f"{limit:.2f} keeps its SLO of {facts.account.slo:.2f}"
    )
