"""Status of jobs and nodes, for people and dashboards."""

from harvester.contracts.ids import JobId
from scheduler.rollmux.control.desk import PhaseService
from scheduler.rollmux.control.wire import JobStatus
from scheduler.rollmux.permits.standing import NO_EPOCH, PermitStage


def statuses(desk: PhaseService) -> tuple[JobStatus, ...]:
    return tuple(_status(desk, job) for job in desk.jobs)


def _status(desk: PhaseService, job: JobId) -> JobStatus:
    standing, plan = desk.policy.standing(job), desk.plan_of(job)
    if standing is None:
        # Submitted, and without a place or on its way to one.
        return JobStatus(
            job=job,
            stage=PermitStage.APART,
            kind=None,
            epoch=NO_EPOCH,
            nodes=(),
            awaits=(),
            complete_ratio=0.0,
            tokens=0,
            warned=False,
            failures=0,
            plan=plan,
        )
    return JobStatus(
        job=job,
        stage=standing.stage,
        kind=standing.kind,
        epoch=standing.epoch,
        nodes=standing.nodes,
        awaits=standing.awaits,
        complete_ratio=standing.complete_ratio,
        tokens=standing.tokens,
        warned=standing.warned_s is not None,
        failures=standing.failures,
        loaded=standing.loaded,
        unload=standing.unload,
        plan=plan,
    )
