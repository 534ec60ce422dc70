"""Status of jobs, for people and dashboards."""

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.wire import JobStatus, PlanStatus
from scheduler.rollmux.permits.job_permit import PermitStage


def statuses(service: PhaseService) -> tuple[JobStatus, ...]:
    return tuple(_status(service, job) for job in service.jobs)


def _status(service: PhaseService, job: JobId) -> JobStatus:
    permit, plan = service.policy.permit(job), service.plan_of(job)
    if permit is None:
        # Submitted, and without a placement or on its way to one.
        return JobStatus(job=job, stage=PermitStage.APART, plan=plan)
    return JobStatus(
        job=job,
        stage=permit.stage,
        kind=permit.kind,
        epoch=permit.epoch,
        nodes=permit.nodes,
        awaits=permit.awaits,
        complete_ratio=permit.complete_ratio,
        tokens=permit.tokens,
        warned=permit.warned_s is not None,
        failures=permit.failures,
        loaded=permit.loaded,
        unload=permit.unload,
        plan=plan,
    )


def plan_status(cluster: ClusterPolicy, job: JobId, *, now: float) -> PlanStatus | None:
    """Status of a submitted job; None if unknown."""
    placed, facts = cluster.placements.get(job), cluster.planner.facts.get(job)
    if placed is None:
        return None
    rollout, training = cluster.machines(placed.at)
    waited_until_s = now if placed.placed_s is None else placed.placed_s
    slowdown = credit_s = None
    # Before its first iteration has ended, both would compare the elapsed time with a cold start.
    if facts is not None and placed.iterations:
        slowdown, credit_s = facts.settled_slowdown(now), facts.settled_credit_s(now)
    return PlanStatus(
        job=job,
        stage=placed.stage,
        group=placed.group or placed.to_group or "",
        rollout_nodes=rollout,
        training_nodes=training,
        moves_to=tuple(node for side in cluster.machines(placed.to) for node in side),
        reason=placed.reason,
        slo=placed.spec.slo,
        slowdown=slowdown,
        credit_s=credit_s,
        iterations=placed.iterations,
        moves=placed.moves,
        waits_s=max(0.0, waited_until_s - placed.submitted_s),
    )
