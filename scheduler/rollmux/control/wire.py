"""Calls between a job's process and the phase control, and the replies. Each may be repeated.

    Register   -> Accepted | CallRefused
    Enter      -> Granted | Waiting | CallRefused      held open while it has to wait
    Withdraw   -> Accepted
    Beat       -> PermitSnapshot | Ended
    Leave      -> Accepted | Ended
    Unloaded   -> Accepted | Ended
    Forget     -> Accepted
    Submit     -> Placed | Waiting | CallRefused       where the control plans: instead of Register
    NodeReport -> Accepted | CallRefused               by an operator or a health check

A call is the event that the control's policy takes. The same records travel in one process, over a
Unix socket and through a Ray actor; on the latter two as JSON bytes. Durations are each side's own
monotonic seconds. The epoch fences: a call with an older one changes nothing and is answered
`Ended`.
"""

from collections.abc import Iterator
from math import isfinite
from typing import Any, Final, Protocol, get_args

import msgspec

from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted, PeerProtocolError
from harvester.contracts.ids import Epoch, JobId, NodeId, checked_name
from scheduler.model import PhaseKind, Placement
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.runtime_events import Call, NodeReport, OrderMove, Submit
from scheduler.rollmux.permits.events import Enter, Register, Unloaded, Withdraw
from scheduler.rollmux.permits.job_permit import NO_EPOCH, PermitStage

WAIT_MAX_S: Final = 30.0
"""Longest time for which a call is held open; at most a third of the lease."""


class ControlUnreachable(Exhausted):
    """No control runs, so that no other job can get the permit: a holder goes on with it."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted", omit_defaults=True):
    """The call is in force."""

    move: OrderMove | None = None
    """The iteration is over, and the job goes on elsewhere."""
    unload: tuple[NodeId, ...] = ()
    """Nodes that the job's state has to leave now: another job is to start there."""


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted", omit_defaults=True):
    epoch: Epoch
    nodes: tuple[NodeId, ...]
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly held nodes; the tail of another job has the others."""
    lease_s: float
    """Length of the lease, in s: call at least three times within it."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """The job waits for a permit or a placement; ask again to learn of it."""

    ahead: int
    """Jobs that come before."""
    reason: str = ""
    """Why there is no placement for now."""


class CallRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    reason: str
    retry_after_s: float | None = None
    """Delay before the next request, in s; None: a repetition will not help."""
    unknown: bool = False
    """The job has to be placed first."""


class PermitSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="permit_state"):
    """The permit's complete present state, so that a lost reply loses nothing."""

    stage: PermitStage
    nodes: tuple[NodeId, ...]
    accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly held nodes."""
    keep: tuple[NodeId, ...] = ()
    """Nodes to bring the tail together on, while `stage` is narrowing."""
    keep_accelerators: dict[NodeId, tuple[int, ...]] = {}
    """Accelerator numbers of the partly kept nodes."""
    warned: bool = False
    """The phase takes longer than it declared."""
    ends_in_s: float | None = None
    """Seconds within which a revoked phase has to end."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    reason: str


class PlanStatus(Placement, frozen=True, kw_only=True):
    """A submitted job's placement and progress."""

    stage: PlacementStage
    group: str
    moves_to: tuple[NodeId, ...]
    """Next nodes, from its iteration's end, or once they have room."""
    reason: str
    slo: float
    slowdown: float | None
    """Time since its placement over what its phases and its first load would have taken alone; a
    running phase is delay only beyond its expected duration. None before the first iteration ended.
    """
    credit_s: float | None
    """Delay that it can still absorb, counted in the same way; below 0 its SLO is missed now."""
    iterations: int
    moves: int
    waits_s: float
    """Time that it has waited for a placement, in s."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one job, for people and dashboards; not a reply to a call."""

    job: JobId
    stage: PermitStage
    kind: PhaseKind | None = None
    epoch: Epoch = NO_EPOCH
    nodes: tuple[NodeId, ...] = ()
    awaits: tuple[NodeId, ...] = ()
    complete_ratio: float = 0.0
    tokens: int = 0
    warned: bool = False
    failures: int = 0
    loaded: tuple[NodeId, ...] = ()
    """Nodes with its state on their accelerators, without a permit."""
    unload: tuple[NodeId, ...] = ()
    """Nodes in `loaded` that it was asked to clear, for another job to start there."""
    plan: PlanStatus | None = None
    """Set by a planning control."""


class Placed(Placement, frozen=True, kw_only=True, tag="placed"):
    """The nodes of a pool are empty while a failed one has no replacement."""

    group: str
    reason: str
    harvesting: bool = False
    """Whether the job's rollouts may use leases."""


EnterReply = Granted | Waiting | CallRefused
Reply = Accepted | Granted | Waiting | CallRefused | PermitSnapshot | Ended | Placed
CALLS: Final[dict[str, type[Call]]] = {kind.__struct_config__.tag: kind for kind in get_args(Call)}
_REPLY: Final[msgspec.json.Decoder[Reply]] = msgspec.json.Decoder(Reply)


class Transport(Protocol):
    """A job process's connection to the control. Calls block; each may be repeated.

    Raises ControlUnreachable without a control, Exhausted without an answer in time.
    """

    def call(self, message: Call) -> Reply: ...

    def jobs(self) -> tuple[JobStatus, ...]:
        """Status of every job."""
        ...


def reply_text(reply: Reply) -> str:
    """The reply in words."""
    match reply:
        case Placed():
            return f"{reply.group} on {reply.text}: {reply.reason}"
        case Waiting():
            return f"waits behind {reply.ahead}: {reply.reason}"
        case CallRefused():
            return f"refused: {reply.reason}"
    return str(reply)


def call_name(message: Call) -> str:
    return str(message.__struct_config__.tag)


def encoded_call(message: Call) -> bytes:
    """A call's body. Raises ConfigError for a call that a control in any state would refuse."""
    name, body = call_name(message), msgspec.json.encode(message)
    # JSON has neither: they would arrive as null, which is "no bound" for an optional number.
    for field, value in _not_finite(msgspec.to_builtins(message), name):
        raise ConfigError(f"{field} is {value}, not a finite number")
    try:
        decoded_call(name, body)
    except PeerProtocolError as error:
        raise ConfigError(str(error)) from error
    return body


def _not_finite(value: Any, at: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not isfinite(value):
        yield at, value
    for key, one in value.items() if isinstance(value, dict) else ():
        yield from _not_finite(one, f"{at}.{key}")
    for place, one in enumerate(value if isinstance(value, list | tuple) else ()):
        yield from _not_finite(one, f"{at}[{place}]")


def decoded_call(name: str, body: bytes) -> Call:
    """Decodes a call. Raises PeerProtocolError for an unknown call, a wrong body or an invalid
    name."""
    kind = CALLS.get(name)
    if kind is None:
        raise PeerProtocolError(f"no call {name[:80]!r}; there are {', '.join(CALLS)}")
    try:
        return checked(msgspec.json.decode(body, type=kind))
    except UNDECODABLE as error:
        raise PeerProtocolError(f"{name}: {error}") from error


def checked(call: Call) -> Call:
    """Checks that every name is valid; returns the call. Raises PeerProtocolError otherwise."""
    nodes: tuple[NodeId, ...] = ()
    match call:
        case NodeReport():
            checked_name(call.node, what="node")
            return call
        case Register(terms=terms):
            job = terms.job
            nodes = tuple(node for phase in terms.phases for node in phase.nodes)
        case Submit(spec=given):
            job = given.job
            checked_name(given.tenant, what="tenant")
            if call.holder:
                checked_name(call.holder, what="holder")
        case _:
            job = call.job
    checked_name(job, what="job")
    if isinstance(call, Enter | Withdraw | Unloaded):
        checked_name(call.holder, what="holder")
    for node in call.nodes if isinstance(call, Unloaded) else nodes:
        checked_name(node, what="node")
    return call


def decoded_reply(body: bytes) -> Reply:
    """Raises PeerProtocolError for an invalid reply."""
    try:
        return _REPLY.decode(body)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"the phase control replied {body[:200]!r}: {error}") from error
