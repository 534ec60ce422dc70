"""Status of jobs and nodes, for people and dashboards."""

from harvester.contracts.ids import JobId
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.wire import JobStatus
from scheduler.rollmux.permits.job_permit import NO_EPOCH, PermitStage


def statuses(service: PhaseService) -> tuple[JobStatus, ...]:
    return tuple(_status(service, job) for job in service.jobs)


def _status(service: PhaseService, job: JobId) -> JobStatus:
    permit, plan = service.policy.permit(job), service.plan_of(job)
    if permit is None:
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
