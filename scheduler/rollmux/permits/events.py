"""Events and effects of the permit policy."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.terms import JobTerms


class JobPlaced(msgspec.Struct, frozen=True, kw_only=True, tag="job_placed"):
    """A new job and its terms, or new terms of a known job; a permit in use outlives them."""

    terms: JobTerms


class JobLeft(msgspec.Struct, frozen=True, kw_only=True, tag="job_left"):
    job: JobId
    for_good: bool = True
    """False: the job gets other nodes, and the knowledge about it stays."""


class PhaseRequested(msgspec.Struct, frozen=True, kw_only=True, tag="phase_requested"):
    """A worker waits for its job's permit; repeated for as long as it waits."""

    job: JobId
    kind: PhaseKind
    holder: str
    """Process of the job; differs after a restart."""


class PhaseWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="phase_withdrawn"):
    """The worker that asked waits no more; a permit that it has not heard of ends too."""

    job: JobId
    holder: str


class HolderHeard(msgspec.Struct, frozen=True, kw_only=True, tag="holder_heard"):
    """A holder lives, and how far its phase is."""

    job: JobId
    epoch: Epoch
    complete_ratio: float = 0.0
    tokens: int = 0


class PhaseNarrowed(msgspec.Struct, frozen=True, kw_only=True, tag="phase_narrowed"):
    """The tail runs on the kept nodes; the rest is empty."""

    job: JobId
    epoch: Epoch


class Recall(StrEnum):
    """The manner in which a tail that has left its nodes gets them back."""

    WHEN_FREE = "when_free"
    """Only if no other job holds them or waits for them."""
    IN_LINE = "in_line"
    """In its turn, from the end of the line."""


class TailRecalled(msgspec.Struct, frozen=True, kw_only=True, tag="tail_recalled"):
    """The tail shall end on the job's own nodes; repeated until it may."""

    job: JobId
    epoch: Epoch
    recall: Recall


class PhaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="phase_ended"):
    """The phase is done and its state is out of the nodes."""

    job: JobId
    epoch: Epoch
    failed: str = ""
    """Why it did not complete; empty if it did."""
    loading_s: float = 0.0
    """Time spent on loading, offloading and moving its tail, in s; not part of its solo
    duration."""
    leased_s: float = 0.0
    """Time that leases have saved, in s."""
    stays_loaded: bool = False
    """Its state is still on the nodes' accelerators, until another job is to start there."""


class NodesUnloaded(msgspec.Struct, frozen=True, kw_only=True, tag="nodes_unloaded"):
    """The job's state has left these nodes' accelerators."""

    job: JobId
    nodes: tuple[NodeId, ...]


class ControlResumed(msgspec.Struct, frozen=True, kw_only=True, tag="control_resumed"):
    """No worker could be heard until now: a restart, or a pause of the control itself."""


class TimeElapsed(msgspec.Struct, frozen=True, kw_only=True, tag="time_passed"):
    pass


PermitEvent = (
    JobPlaced
    | JobLeft
    | PhaseRequested
    | PhaseWithdrawn
    | HolderHeard
    | PhaseNarrowed
    | TailRecalled
    | PhaseEnded
    | NodesUnloaded
    | ControlResumed
    | TimeElapsed
)


class PermitEndReason(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """The phase reported its own failure."""
    SILENT = "silent"
    """The holder was not heard for a lease."""
    OVERRAN = "overran"
    """Asked to end for its length, and not completed since."""
    LEFT = "left"
    WITHDRAWN = "withdrawn"


class AdmitJob(msgspec.Struct, frozen=True, kw_only=True, tag="admit_job"):
    """These terms are in force from the job's next place in a line on."""

    job: JobId


class EnqueuePhase(msgspec.Struct, frozen=True, kw_only=True, tag="enqueue_phase"):
    """The job takes this place in the line of each of these nodes, instead of any earlier one."""

    job: JobId
    kind: PhaseKind
    ticket: int
    nodes: tuple[NodeId, ...]


class DropPlace(msgspec.Struct, frozen=True, kw_only=True, tag="drop_place"):
    """The job stands in no line any more; when it asks again, it is last."""

    job: JobId


class GrantPermit(msgspec.Struct, frozen=True, kw_only=True, tag="grant_permit"):
    job: JobId
    kind: PhaseKind
    epoch: Epoch
    nodes: tuple[NodeId, ...]
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly held nodes, shared with another job's tail."""
    holder: str
    reason: str


class WidenPermit(msgspec.Struct, frozen=True, kw_only=True, tag="widen_permit"):
    """A tail has left, or came back; the phase has these nodes too, or has them whole."""

    job: JobId
    epoch: Epoch
    nodes: tuple[NodeId, ...]


class NarrowPhase(msgspec.Struct, frozen=True, kw_only=True, tag="narrow_phase"):
    """Another job waits: bring the tail together on `keep` and report when the rest is empty."""

    job: JobId
    epoch: Epoch
    keep: tuple[NodeId, ...]
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly kept nodes."""
    reason: str


class FreeNodes(msgspec.Struct, frozen=True, kw_only=True, tag="free_nodes"):
    """A tail has left these nodes, or a part of each."""

    job: JobId
    epoch: Epoch
    nodes: tuple[NodeId, ...]


class UnloadNodes(msgspec.Struct, frozen=True, kw_only=True, tag="unload_nodes"):
    """Another job is to start there: take the state off the accelerators, and report it."""

    job: JobId
    nodes: tuple[NodeId, ...]


class WarnHolder(msgspec.Struct, frozen=True, kw_only=True, tag="warn_holder"):
    job: JobId
    epoch: Epoch
    reason: str


class RevokePermit(msgspec.Struct, frozen=True, kw_only=True, tag="revoke_permit"):
    """End the phase within `grace_s`; then the permit ends by itself."""

    job: JobId
    epoch: Epoch
    grace_s: float
    reason: str


class EndPermit(msgspec.Struct, frozen=True, kw_only=True, tag="end_permit"):
    job: JobId
    kind: PhaseKind
    epoch: Epoch
    ended: PermitEndReason
    reason: str
    solo_s: float = 0.0
    """Duration of the phase's work so far, alone on its own nodes, in s."""
    measured: bool = True
    """False: `solo_s` is only an upper bound, since the tail was away on leases."""
    loading_s: float = 0.0
    """Loading time beside it, in s, as the holder reported."""


class FailJob(msgspec.Struct, frozen=True, kw_only=True, tag="fail_job"):
    """The job has lost its place; it comes again from its last checkpoint, as if it were new."""

    job: JobId
    reason: str


class RemoveJob(msgspec.Struct, frozen=True, kw_only=True, tag="remove_job"):
    job: JobId


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The event changed nothing."""

    job: JobId
    reason: str
    unknown: bool = False
    """The job has to be submitted again first: it hears where it is."""


PermitEffect = (
    AdmitJob
    | EnqueuePhase
    | DropPlace
    | GrantPermit
    | WidenPermit
    | NarrowPhase
    | FreeNodes
    | UnloadNodes
    | WarnHolder
    | RevokePermit
    | EndPermit
    | FailJob
    | RemoveJob
    | Refuse
)
