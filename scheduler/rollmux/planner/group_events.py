"""Events and effects of the group planner."""

import msgspec

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import JobSpec, Node, PhaseKind, Placement
from scheduler.rollmux.beliefs.durations import Measured
from scheduler.rollmux.beliefs.tail import Completion


class JobArrived(msgspec.Struct, frozen=True, kw_only=True, tag="job_arrived"):
    job: JobSpec
    measured: dict[PhaseKind, Measured] = {}
    """Earlier measurements of its phases: they teach durations and earn no credit."""
    curve: tuple[Completion, ...] = ()
    """Declared completion curve of a rollout; empty: not known."""
    submitted_s: float | None = None
    """Time at which the job began to wait for a place; None: it did not wait."""


class PhaseMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="phase_ended"):
    job: JobId
    phase: PhaseKind
    solo_s: float
    """Duration alone on its nodes, in s: waiting, loading and narrowed nodes not counted."""
    measured: bool = True
    """False: `solo_s` is only an upper bound, and teaches nothing."""


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="job_ended"):
    """The job is done, or was given up."""

    job: JobId


class JobMoved(msgspec.Struct, frozen=True, kw_only=True, tag="job_moved"):
    """The job has left its old nodes."""

    job: JobId


class NodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="node_failed"):
    """The node is gone, with the current iteration of every job pinned to it."""

    node: NodeId


class ReviewDue(msgspec.Struct, frozen=True, kw_only=True, tag="review_due"):
    """Look for promises at risk and for nodes that could be spared."""


GroupEvent = JobArrived | PhaseMeasured | JobEnded | JobMoved | NodeFailed | ReviewDue


class AddNode(msgspec.Struct, frozen=True, kw_only=True, tag="add_node"):
    node: Node
    group: GroupId


class ReleaseNode(msgspec.Struct, frozen=True, kw_only=True, tag="release_node"):
    node: NodeId


class PlaceJob(msgspec.Struct, frozen=True, kw_only=True, tag="place_job"):
    group: GroupId
    placement: Placement
    reason: str


class MoveJob(msgspec.Struct, frozen=True, kw_only=True, tag="move_job"):
    """At the end of the job's present iteration; it stays resident on its old nodes until then.

    It loads on its new nodes as soon as their memory has room: another mover may still be there.
    The last one asked for holds.
    """

    group: GroupId
    placement: Placement
    reason: str


class RestartJob(msgspec.Struct, frozen=True, kw_only=True, tag="restart_job"):
    """At once and from its last checkpoint, because a node of its was lost.

    It stays resident where its old and new nodes are the same. A move that was asked for before is
    replaced by this.
    """

    group: GroupId
    placement: Placement
    reason: str


GroupEffect = AddNode | ReleaseNode | PlaceJob | MoveJob | RestartJob
