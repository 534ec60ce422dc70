"""Status of a submitted job in the plan, for people and dashboards."""

from typing import Final

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.control.wire import PlanStatus

_LEAST_S: Final = 1e-3


def plan_status(cluster: ClusterPolicy, job: JobId, *, now: float) -> PlanStatus | None:
    """Status of a submitted job; None if unknown."""
    stay, facts = cluster.stays.get(job), cluster.planner.facts.get(job)
    if stay is None:
        return None
    rollout, training = cluster.machines(stay.at)
    slowdown = credit_s = None
    if facts is not None:
        slowdown = (now - facts.account.began_s) / max(facts.account.solo_s, _LEAST_S)
        credit_s = facts.account.credit_s(now)
    return PlanStatus(
        stage=stay.stage,
        group=stay.group or stay.to_group or "",
        rollout_nodes=rollout,
        training_nodes=training,
        moves_to=tuple(node for side in cluster.machines(stay.to) for node in side),
        reason=stay.reason,
        slo=stay.submission.slo,
        slowdown=slowdown,
        credit_s=credit_s,
        iterations=stay.iterations,
        moves=stay.moves,
        waits_s=max(0.0, (now if stay.placed_s is None else stay.placed_s) - stay.submitted_s),
    )
