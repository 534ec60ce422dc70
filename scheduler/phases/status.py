"""Who holds what and who waits, for people and dashboards."""

from scheduler.phases.desk import PermitDesk
from scheduler.phases.wire import JobStatus


def statuses(desk: PermitDesk) -> tuple[JobStatus, ...]:
    standings = (desk.policy.standing(job) for job in desk.policy.jobs)
    return tuple(
        JobStatus(
            job=each.job,
            stage=each.stage,
            kind=each.kind,
            epoch=each.epoch,
            nodes=each.nodes,
            awaits=each.awaits,
            complete_ratio=each.complete_ratio,
            tokens=each.tokens,
            warned=each.warned_s is not None,
            failures=each.failures,
        )
        for each in standings
        if each is not None
    )
