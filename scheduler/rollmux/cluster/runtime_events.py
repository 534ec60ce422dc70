"""Events and effects of the runtime, and the policy that shells of the phase control drive.

A job's process imports these, and not the planner with its compiled forecasts.
"""

from typing import Any, ClassVar, Protocol

import msgspec

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import JobSpec, Placement
from scheduler.rollmux.permits.events import PermitCall, PermitEffect, PermitEvent, StrictStruct
from scheduler.rollmux.permits.job_permit import JobPermit
from scheduler.rollmux.planner.group_effects import PlacementDecision


class Submit(StrictStruct, frozen=True, kw_only=True, tag="submit"):
    """Repeated by a known job's process that restarts, or that has left its old nodes."""

    spec: JobSpec
    holder: str = ""
    """Process of the job; empty: an operator submits the job, or asks where it is."""


class NodeReport(StrictStruct, frozen=True, kw_only=True, tag="node"):
    """A node has failed or is back, as reported by an operator or a health check."""

    node: NodeId
    failed: bool


Call = PermitCall | Submit | NodeReport
RuntimeEvent = PermitEvent | Submit | NodeReport


class PlanJob(Placement, frozen=True, kw_only=True, tag="plan_job"):
    """Target placement of a job, with the reason. A move takes effect at its iteration's end.

    Here and in the other effects, the nodes of a pool are empty while one has failed and no other
    is free.
    """

    decision: PlacementDecision
    group: GroupId
    beside: tuple[JobId, ...] = ()
    """Jobs that share some of these nodes, as far as is planned."""
    reason: str


class SettleJob(Placement, frozen=True, kw_only=True, tag="settle_job"):
    """The job's phases run on these nodes from now on: it has arrived, or a node was replaced."""

    group: GroupId


class QueueJob(msgspec.Struct, frozen=True, kw_only=True, tag="queue_job"):
    """The job finds no placement for now, and why."""

    job: JobId
    reason: str


class OrderMove(Placement, frozen=True, kw_only=True, tag="order_move"):
    """The job's iteration is over: it leaves its nodes and goes on at the given ones.

    It has left the old nodes when it requests its next phase.
    """

    reason: str


class CloseJob(msgspec.Struct, frozen=True, kw_only=True, tag="close_job"):
    """The job has left; its slow-down at the end of its last phase."""

    job: JobId
    slowdown: float
    slo: float
    iterations: int
    moves: int

    @property
    def kept(self) -> bool:
        """Whether the job kept its SLO."""
        return self.slowdown <= self.slo


PlanEffect = PlanJob | SettleJob | QueueJob | OrderMove | CloseJob
RuntimeEffect = PermitEffect | PlanEffect


class PhasePolicy(Protocol):
    NAME: ClassVar[str]

    @property
    def config(self) -> msgspec.Struct: ...

    @property
    def counters(self) -> tuple[int, int]:
        """Last epoch and last ticket; neither is ever given again."""
        ...

    @property
    def jobs(self) -> tuple[JobId, ...]: ...

    def permit(self, job: JobId) -> JobPermit | None: ...

    def ahead(self, job: JobId, *, now: float) -> int: ...

    def due_s(self) -> float: ...

    def observe(self, event: Any, *, now: float) -> tuple[RuntimeEffect, ...]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, snapshot: dict[str, Any]) -> None: ...
