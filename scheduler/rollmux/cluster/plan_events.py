"""Events and effects of the cluster policy: decisions, and events of the permit policy."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.beliefs.tail import Completion
from scheduler.rollmux.cluster.submission import Submission
from scheduler.rollmux.permits.events import JobLeft, JobPlaced


class JobSubmitted(msgspec.Struct, frozen=True, kw_only=True, tag="job_submitted"):
    """Sent for a known job too, when its process restarts."""

    submission: Submission


class PhaseAsked(msgspec.Struct, frozen=True, kw_only=True, tag="phase_asked"):
    """A worker requests a permit. A job notified of a move has left its old nodes by then."""

    job: JobId
    kind: PhaseKind


class PhaseBegan(msgspec.Struct, frozen=True, kw_only=True, tag="phase_began"):
    job: JobId


class PhaseDone(msgspec.Struct, frozen=True, kw_only=True, tag="phase_done"):
    job: JobId
    kind: PhaseKind
    solo_s: float
    """Duration alone on its nodes, in s: without waiting and loading."""
    measured: bool = True
    """False: `solo_s` is only an upper bound, and teaches nothing."""
    loading_s: float = 0.0
    """Loading time beside it, in s."""
    curve: tuple[Completion, ...] = ()
    """Completion curve of the job's phases of this kind, once enough of them were seen."""


class PhaseLost(msgspec.Struct, frozen=True, kw_only=True, tag="phase_lost"):
    """A permit ended and its phase is not done: the job goes back to its last checkpoint."""

    job: JobId
    overran: PhaseKind | None = None
    """The phase, where it was ended for its length."""
    at_least_s: float = 0.0
    """Lower bound of the lost phase's duration alone on its nodes, in s."""


class JobGone(msgspec.Struct, frozen=True, kw_only=True, tag="job_gone"):
    """The job is done, was given up, or its process was silent for too long."""

    job: JobId


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="node_lost"):
    node: NodeId


class NodeBack(msgspec.Struct, frozen=True, kw_only=True, tag="node_back"):
    node: NodeId


class PlanReviewed(msgspec.Struct, frozen=True, kw_only=True, tag="plan_reviewed"):
    """Time to look for endangered SLOs, nodes to release and room for waiting jobs."""


class ClusterResumed(msgspec.Struct, frozen=True, kw_only=True, tag="cluster_resumed"):
    """The control restarted: permits are brought to the plan where they differ."""


ClusterEvent = (
    JobSubmitted
    | PhaseAsked
    | PhaseBegan
    | PhaseDone
    | PhaseLost
    | JobGone
    | NodeLost
    | NodeBack
    | PlanReviewed
    | ClusterResumed
)


class PlacementDecision(StrEnum):
    PLACED = "placed"
    MOVED = "moved"
    RESTARTED = "restarted"
    """Restart because a node failed."""


class PlanJob(msgspec.Struct, frozen=True, kw_only=True, tag="plan_job"):
    """The target place of a job, with the reason. A move takes effect at its iteration's end."""

    decision: PlacementDecision
    job: JobId
    group: GroupId
    rollout_nodes: tuple[NodeId, ...]
    """Empty while one of them has failed and no other is free; the same of the others."""
    training_nodes: tuple[NodeId, ...]
    beside: tuple[JobId, ...] = ()
    """Jobs that share some of these nodes, as far as is planned."""
    reason: str


class SettleJob(msgspec.Struct, frozen=True, kw_only=True, tag="settle_job"):
    """The job's phases run on these nodes from now on: it has arrived, or a node was replaced."""

    job: JobId
    group: GroupId
    rollout_nodes: tuple[NodeId, ...]
    training_nodes: tuple[NodeId, ...]


class QueueJob(msgspec.Struct, frozen=True, kw_only=True, tag="queue_job"):
    """The job finds no place for now, and why."""

    job: JobId
    reason: str


class TellMove(msgspec.Struct, frozen=True, kw_only=True, tag="tell_move"):
    """Its iteration is over: the job leaves its nodes and goes on there."""

    job: JobId
    rollout_nodes: tuple[NodeId, ...]
    training_nodes: tuple[NodeId, ...]
    reason: str


class CloseJob(msgspec.Struct, frozen=True, kw_only=True, tag="close_job"):
    """The job is gone; how it fared by its last phase that ended."""

    job: JobId
    slowdown: float
    slo: float
    iterations: int
    moves: int

    @property
    def kept(self) -> bool:
        """Whether the job kept its SLO."""
        return self.slowdown <= self.slo


PlanEffect = PlanJob | SettleJob | QueueJob | TellMove | CloseJob
ClusterEffect = JobPlaced | JobLeft | PlanEffect
