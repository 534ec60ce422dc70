"""Messages between a job's process and the phase control. Every call may be repeated.

    place    JobTerms -> Admitted | Refused
    enter    Enter    -> Granted | Waiting | Refused      held open while it has to wait
    withdraw Withdraw -> Left
    beat     Beat     -> Orders | Ended
    leave    Leave    -> Left | Ended
    unloaded Unloaded -> Left | Ended
    forget   Forget   -> Left
    submit   Submission -> Placed | Queued | Refused      where the control plans: instead of place
    node     NodeReport -> Kept | Refused                 by an operator or a health check

The same records travel in one process, over a Unix socket and through a Ray actor; on the latter
two as JSON bytes. Durations are each side's own monotonic seconds. The epoch fences: a message
with an older one changes nothing and is answered `Ended`.
"""

from typing import Protocol

import msgspec

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import Epoch, JobId, NodeId, checked_name
from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.submission import Submission
from scheduler.rollmux.permits.events import Recall
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.terms import JobTerms

WAIT_MAX_S = 30.0
"""Longest time for which a call is held open."""


class Absent(Exhausted):
    """The control is absent. It cannot give the permit to another either: a holder goes on with
    it."""


class Enter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId
    kind: PhaseKind
    holder: str
    wait_s: float = 0.0


class Withdraw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId
    holder: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId
    epoch: Epoch
    complete_ratio: float = 0.0
    tokens: int = 0
    narrowed: bool = False
    """The tail runs on the nodes it was asked to keep."""
    recall: Recall | None = None
    """The tail asks for the nodes that it left."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId
    epoch: Epoch
    failed: str = ""
    loading_s: float = 0.0
    """Time of the phase spent on loading, offloading and in line, in s; no part of its solo
    time."""
    leased_s: float = 0.0
    """Time that leases saved, in s: the solo duration is longer by it."""
    stays_loaded: bool = False
    """The state is still on the accelerators; the control asks for them when another job starts."""


class Unloaded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job's state has left these nodes' accelerators.

    A process that has left a state loaded also says it of no node, several times in a lease: so it
    hears where it is to unload, and is known to live.
    """

    job: JobId
    holder: str
    nodes: tuple[NodeId, ...] = ()


class Forget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: JobId


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag="admitted"):
    lease_s: float


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted", omit_defaults=True):
    epoch: Epoch
    nodes: tuple[NodeId, ...]
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly held nodes; the tail of another job has the others."""
    lease_s: float
    """Length of the lease, in s: call at least three times within it."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    ahead: int
    """Jobs that come before."""


class CallRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    reason: str
    retry_after_s: float | None = None
    """Delay before the next request, in s; None: a repetition will not help."""
    unknown: bool = False
    """The job has to be placed first."""


class Orders(msgspec.Struct, frozen=True, kw_only=True, tag="orders"):
    """All that holds for the permit now, so that a lost reply loses nothing."""

    stage: PermitStage
    nodes: tuple[NodeId, ...]
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly held nodes."""
    keep: tuple[NodeId, ...] = ()
    """While `stage` is narrowing: bring the tail together on these."""
    keep_accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly kept nodes."""
    warned: bool = False
    """The phase takes longer than it declared."""
    ends_in_s: float | None = None
    """While revoked: end the phase within this."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    reason: str


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left", omit_defaults=True):
    move: "MoveOrder | None" = None
    """The iteration is over, and the job goes on elsewhere."""
    unload: tuple[NodeId, ...] = ()
    """Nodes that the job's state has to leave now: another job is to start there."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """The report about a node was accepted."""


class PlanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job's place and progress."""

    stage: PlacementStage
    group: str
    rollout_nodes: tuple[NodeId, ...]
    training_nodes: tuple[NodeId, ...]
    moves_to: tuple[NodeId, ...]
    """Next nodes, from its iteration's end, or once they have room."""
    reason: str
    slo: float
    slowdown: float | None
    """Time since its placement over what its phases and its first load would have taken alone."""
    credit_s: float | None
    """Delay that it can still absorb; below 0 its promise would be broken if it ended now."""
    iterations: int
    moves: int
    waits_s: float
    """Time that it has waited for a place, in s."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one job, for people and dashboards; no call's answer."""

    job: JobId
    stage: PermitStage
    kind: PhaseKind | None
    epoch: Epoch
    nodes: tuple[NodeId, ...]
    awaits: tuple[NodeId, ...]
    complete_ratio: float
    tokens: int
    warned: bool
    failures: int
    loaded: tuple[NodeId, ...] = ()
    """Nodes with its state on their accelerators, without a permit."""
    unload: tuple[NodeId, ...] = ()
    """Nodes in `loaded` that it was asked to clear, for another job to start there."""
    plan: "PlanStatus | None" = None
    """Set by a planning control."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node has failed, or is there again."""

    node: NodeId
    failed: bool


class MoveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The job's next place. When it requests its next phase, its old nodes are free of it."""

    rollout_nodes: tuple[NodeId, ...]
    training_nodes: tuple[NodeId, ...]
    reason: str


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    group: str
    rollout_nodes: tuple[NodeId, ...]
    """Empty while a failed one has no replacement; the same of the others."""
    training_nodes: tuple[NodeId, ...]
    reason: str
    lease_s: float
    harvesting: bool = False
    """Its rollouts may use leases."""


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag="queued"):
    """Known, and without a place for now: it gets one by itself; ask again to hear of it."""

    reason: str
    ahead: int
    """Jobs that wait longer."""


EnterReply = Granted | Waiting | CallRefused
BeatReply = Orders | Ended
LeaveReply = Left | Ended
PlaceReply = Admitted | CallRefused
SubmitReply = Placed | Queued | CallRefused
ReportReply = Kept | CallRefused
Call = JobTerms | Enter | Withdraw | Beat | Leave | Unloaded | Forget | Submission | NodeReport
Reply = Admitted | Granted | Waiting | CallRefused | Orders | Ended | Left | Kept | Placed | Queued

CallKind = (
    type[JobTerms]
    | type[Enter]
    | type[Withdraw]
    | type[Beat]
    | type[Leave]
    | type[Unloaded]
    | type[Forget]
    | type[Submission]
    | type[NodeReport]
)
CALLS: dict[str, CallKind] = {
    "place": JobTerms,
    "enter": Enter,
    "withdraw": Withdraw,
    "beat": Beat,
    "leave": Leave,
    "unloaded": Unloaded,
    "forget": Forget,
    "submit": Submission,
    "node": NodeReport,
}
_REPLY: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class Transport(Protocol):
    """A job process's connection to the control. Calls block; each may be repeated.

    Raises Absent without a control, Exhausted without an answer in time.
    """

    def call(self, name: str, message: Call) -> Reply: ...

    def jobs(self) -> tuple[JobStatus, ...]:
        """Status of every job."""
        ...


def decoded_call(name: str, body: bytes) -> Call:
    """Decodes a call. Raises PeerProtocolError for an unknown call, a wrong body or an invalid
    name."""
    kind = CALLS.get(name)
    if kind is None:
        raise PeerProtocolError(f"no call {name[:80]!r}; there are {', '.join(CALLS)}")
    try:
        call: Call = msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"{name}: {error}") from error
    return checked(call)


def checked(call: Call) -> Call:
    """Checks that every name is valid; returns the call. Raises PeerProtocolError otherwise."""
    if isinstance(call, NodeReport):
        checked_name(call.node, what="node")
        return call
    checked_name(call.job, what="job")
    if isinstance(call, Submission):
        checked_name(call.tenant, what="tenant")
    if isinstance(call, Enter | Withdraw | Unloaded):
        checked_name(call.holder, what="holder")
    nodes = call.nodes if isinstance(call, Unloaded) else ()
    if isinstance(call, JobTerms):
        nodes = tuple(node for phase in call.phases for node in phase.nodes)
    for node in nodes:
        checked_name(node, what="node")
    return call


def decoded_reply(body: bytes) -> Reply:
    """Raises PeerProtocolError where it is none."""
    try:
        return _REPLY.decode(body)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"the phase control said {body[:200]!r}: {error}") from error
