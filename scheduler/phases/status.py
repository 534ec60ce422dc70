"""Who holds what and who waits, for people and dashboards."""

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.phases.desk import PermitDesk
from scheduler.policy.model import PhaseKind
from scheduler.policy.phases.standing import Stage


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId
    stage: Stage
    kind: PhaseKind | None
    epoch: Epoch
    nodes: tuple[NodeId, ...]
    awaits: tuple[NodeId, ...]
    complete_ratio: float
    tokens: int
    warned: bool
    failures: int


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
