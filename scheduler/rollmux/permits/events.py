"""Calls of jobs' processes, which are the events of the permit policy, and its effects.

A call may be repeated, and its epoch fences: an older one changes nothing.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.terms import JobTerms

AtLeastZero = msgspec.Meta(ge=0)
Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a job's process or an operator; its tag names it on the wire and in the journal."""


class Register(StrictStruct, frozen=True, kw_only=True, tag="register"):
    """A new job and its terms, or new terms of a known job; a permit in use outlives them."""

    terms: JobTerms


class Enter(StrictStruct, frozen=True, kw_only=True, tag="enter"):
    """A worker waits for its job's permit; repeated for as long as it waits."""

    job: JobId
    kind: PhaseKind
    holder: str
    """Process of the job; differs after a restart."""
    wait_s: Annotated[float, AtLeastZero] = 0.0
    """Time for which the call may be held open, in s."""


class Withdraw(StrictStruct, frozen=True, kw_only=True, tag="withdraw"):
    """The worker that asked waits no more; a permit that it has not received ends too."""

    job: JobId
    holder: str


class Recall(StrEnum):
    """The manner in which a tail that has left its nodes gets them back."""

    WHEN_FREE = "when_free"
    """Only if no other job holds them or waits for them."""
    IN_LINE = "in_line"
    """First come, first served, from the end of the line."""


class Beat(StrictStruct, frozen=True, kw_only=True, tag="beat"):
    """Shows that the holder lives, and reports its phase's progress."""

    job: JobId
    epoch: Epoch
    complete_ratio: Ratio = 0.0
    tokens: Annotated[int, AtLeastZero] = 0
    narrowed: bool = False
    """The tail runs on the nodes it was asked to keep; the rest is empty."""
    recall: Recall | None = None
    """The tail asks for the nodes that it left; repeated until it has them."""


class Leave(StrictStruct, frozen=True, kw_only=True, tag="leave"):
    """The phase is over and its state is out of the nodes, or stays loaded."""

    job: JobId
    epoch: Epoch
    failed: str = ""
    """Why it did not complete; empty if it did."""
    loading_s: Annotated[float, AtLeastZero] = 0.0
    """Time spent on loading, offloading, moving its tail and waiting, in s; excluded from its solo
    duration."""
    leased_s: Annotated[float, AtLeastZero] = 0.0
    """Time that leases saved, in s: the solo duration is longer by it."""
    stays_loaded: bool = False
    """The state is still on the accelerators; the control asks for them when another job starts."""
    released_s: Annotated[float, AtLeastZero] = 0.0
    """Part of `loading_s` after the phase's work, in s."""


class Unloaded(StrictStruct, frozen=True, kw_only=True, tag="unloaded"):
    """The job's state has left these nodes' accelerators.

    A process with loaded states also sends it without nodes, several times in each `lease_s`: the
    reply names the nodes to unload, and the call shows that the process lives.
    """

    job: JobId
    holder: str
    nodes: tuple[NodeId, ...] = ()


class Forget(StrictStruct, frozen=True, kw_only=True, tag="forget"):
    """The job is over, and gives up its place for good."""

    job: JobId


class ControlResumed(msgspec.Struct, frozen=True, kw_only=True, tag="control_resumed"):
    """No worker could be heard until now: a restart, or a pause of the control itself."""


class TimeElapsed(msgspec.Struct, frozen=True, kw_only=True, tag="time_elapsed"):
    pass


PermitCall = Register | Enter | Withdraw | Beat | Leave | Unloaded | Forget
PermitEvent = PermitCall | ControlResumed | TimeElapsed


class PermitEndReason(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """The phase reported its own failure."""
    SILENT = "silent"
    """The holder sent no beat for `lease_s`."""
    OVERRAN = "overran"
    """Revoked because it overran, and not completed within `grace_s`."""
    LEFT = "left"
    WITHDRAWN = "withdrawn"


class AdmitJob(msgspec.Struct, frozen=True, kw_only=True, tag="admit_job"):
    """The job's terms are in force; a held permit keeps its nodes to its end."""

    job: JobId


class EnqueuePhase(msgspec.Struct, frozen=True, kw_only=True, tag="enqueue_phase"):
    """The job takes this place in the line of each of these nodes, instead of any earlier one."""

    job: JobId
    kind: PhaseKind
    ticket: int
    nodes: tuple[NodeId, ...]


class DropPlace(msgspec.Struct, frozen=True, kw_only=True, tag="drop_place"):
    """The job leaves all lines; its next request is last."""

    job: JobId
    forgotten: bool = False
    """The policy has forgotten the job."""


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
    """Bring the tail together on `keep`, as another job waits; report when the rest is empty."""

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
    """Take the state off the accelerators, as another job is to start there; report it."""

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
    earlier_lost_s: float = 0.0
    """Time, in s, that earlier phases' moved tails had lost and that was counted as work alone."""


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The event changed nothing."""

    job: JobId
    reason: str
    unknown: bool = False
    """The control does not know the job; submit it again to learn its placement."""


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
    | Refuse
)
