"""The planner's forecast of each SLO, for the plan and for a job's alternatives."""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Final

from harvester.contracts.ids import JobId
from scheduler.model import Placement
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.scenarios import slowdowns, upper_bound
from scheduler.rollmux.plan.document import Alternative, SloForecast
from scheduler.rollmux.planner.group_table import GroupState
from scheduler.rollmux.planner.packing import Opening, OpeningKind
from scheduler.rollmux.planner.planner import GroupPlanner

_ALTERNATIVES_MAX: Final = 24


def slo_forecasts(planner: GroupPlanner, group: GroupState) -> tuple[SloForecast, ...]:
    """One forecast per job of the group, in the order of the group's jobs."""
    judge = planner.packer.judge
    roster = Roster.of(planner.packer.occupants(group))
    found = slowdowns(roster.jobs, roster.beliefs, judge.horizon, judge.rules)
    bounds = upper_bound(found, judge.quantile).tolist()
    means, spreads = found.mean(axis=0).tolist(), found.std(axis=0, ddof=1).tolist()
    return tuple(
        SloForecast(job=job, slo=slo, mean=mean, bound=bound, risk=_risk(slo, mean, spread))
        for job, slo, mean, bound, spread in zip(
            group.pinned, roster.slos.tolist(), means, bounds, spreads, strict=True
        )
    )


def alternatives(planner: GroupPlanner, job: JobId) -> tuple[Alternative, ...]:
    """Every other group and dedicated nodes, the cheapest first; the table stays as it is."""
    table, packer = planner.table, planner.packer
    home = table.groups[table.home[job]]
    before = table.committed_per_hour
    here = _company(home, home.pinned[job])
    packer.leave(job, stays_resident=True)
    spared = before - table.committed_per_hour
    found = [
        _judged(planner, opening, opening.delta_per_hour - spared)
        for opening in _elsewhere(planner, job)
        if opening.group is not home or _company(home, opening.placement) != here
    ]
    if home.pinned:
        found.append(_alone(planner.packer.isolated(job).delta_per_hour - spared))
    found += _closed(planner, job, spared)
    packer.put_back(job)
    found.sort(key=lambda one: (one.change_per_hour, one.kind, one.beside))
    return tuple(found[:_ALTERNATIVES_MAX])


def _company(group: GroupState, placement: Placement) -> tuple[frozenset[JobId], frozenset[JobId]]:
    """Jobs on the placement's rollout nodes and on its training nodes; equal sets mean equal
    placements."""
    others = [one for one in group.pinned.values() if one.job != placement.job]
    rollout, training = set(placement.rollout_nodes), set(placement.training_nodes)
    return (
        frozenset(one.job for one in others if rollout & set(one.rollout_nodes)),
        frozenset(one.job for one in others if training & set(one.training_nodes)),
    )


def _elsewhere(planner: GroupPlanner, job: JobId) -> Iterator[Opening]:
    """The first opening of every kind in every group: others differ by nodes alone."""
    for group in planner.table.groups.values():
        for kind in OpeningKind:
            if kind is not OpeningKind.NEW_GROUP:
                first = next(planner.packer.unjudged(group, job, kind), None)
                if first is not None:
                    yield first


def _judged(planner: GroupPlanner, opening: Opening, change_per_hour: float) -> Alternative:
    admitted = planner.packer.admits(opening)
    return Alternative(
        kind=opening.kind.value,
        beside=tuple(sorted(opening.group.pinned)),
        change_per_hour=change_per_hour,
        admitted=admitted,
        reason="" if admitted else _objection(planner, opening),
    )


def _objection(planner: GroupPlanner, opening: Opening) -> str:
    """The reason against the opening: the job whose SLO would not hold."""
    broken = [one for one in slo_forecasts(planner, opening.widened) if one.bound > one.slo]
    if not broken:
        return "too little room: a short forecast of the means already refuses it"
    worst = min(broken, key=lambda one: one.slack)
    return f"{worst.job} would be slowed {worst.bound:.2f} times, its SLO is {worst.slo:.2f}"


def _alone(change_per_hour: float) -> Alternative:
    return Alternative(
        kind=OpeningKind.NEW_GROUP.value,
        beside=(),
        change_per_hour=change_per_hour,
        admitted=True,
        reason="",
    )


def _closed(planner: GroupPlanner, job: JobId, spared: float) -> Iterator[Alternative]:
    """Groups with nodes that cannot take the job at all."""
    facts, limits = planner.facts[job], planner.packer.limits
    for group in planner.table.groups.values():
        direct = planner.packer.unjudged(group, job, OpeningKind.DIRECT)
        if not group.pinned or next(direct, None) is not None:
            continue
        if len(group.pinned) >= limits.group_jobs:
            reason = f"the group has {limits.group_jobs} jobs, which is the most"
        elif _short(planner, group, facts.spec.host_bytes):
            reason = "host memory: no node has room for its state"
        else:
            reason = "the group has fewer nodes than it needs"
        yield Alternative(
            kind=OpeningKind.DIRECT.value,
            beside=tuple(sorted(group.pinned)),
            change_per_hour=-spared,
            admitted=False,
            reason=reason,
        )


def _short(planner: GroupPlanner, group: GroupState, host_bytes: int) -> bool:
    return any(
        max(planner.table.resident.free_bytes(node, pool) for node in nodes) < host_bytes
        for pool, nodes in group.by_pool
    )


def _risk(slo: float, mean: float, spread: float) -> float:
    if spread <= 0.0:
        return float(mean > slo)
    return 1.0 - NormalDist(mean, spread).cdf(slo)
