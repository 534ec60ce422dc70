"""Events, effects and settings of routing."""

import math
from enum import StrEnum

import msgspec

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from scheduler.gateway.policy.versions_events import Retarget, TimePassed
from scheduler.model import EngineKind


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    queue_turns: int = 16384
    """Turns that wait for a place or for their version; more are refused. A synchronous step asks
    for its whole batch at once: 1,024 prompts of 16 samples each wait here, with their prompts in
    memory."""
    lease_margin_s: float = 1.0
    """A guest takes no turn this shortly before its lease ends."""
    affinity_ratio: float = 2.0
    """A turn stays on its last engine up to this ratio of the fastest engine's expected time."""
    default_s_per_token: float = 0.005
    """Speed assumed until an engine has been measured, in s per token."""
    default_turn_tokens: float = 64.0
    """Turn length assumed until a turn has ended, in tokens."""
    speed_weight: float = 0.03
    """Weight of the newest turn in the moving averages of speed and length."""
    speed_half_life_s: float = 10.0
    """Half-life of an engine's measured speed without new turns, in s."""
    moved_after_s: float | None = None
    """A guest's turn without a token for this long, in s, moves to a free place: a bad place costs
    no more than this and the turn elsewhere. None: turns are not moved."""
    begun_first: bool = True
    """Queued turns of begun trajectories go before first turns, so that few prefixes are kept at a
    time. False: first come first served. All trajectories then advance together and the step's tail
    is shorter, which pays where prefixes are cheap to make again."""
    patience_s: float = 1.0
    """Time for which turns with their prefix on the freed engine may overtake a queued turn, in
    s."""
    trajectories: int = 65536
    """Remembered last engines; the longest unused is forgotten."""


class EngineOffered(msgspec.Struct, frozen=True, kw_only=True, tag="engine_offered"):
    """The engine serves this job at this version. Repeated when something changes."""

    engine: EngineId
    kind: EngineKind
    concurrency: int
    job: JobId
    version: WeightVersion
    usable_until_s: float | None = None
    context_tokens: int = 0
    """Prompt and output of a turn together; 0 is not known."""
    numerics: str = ""
    """Label of all inputs of its log-probabilities."""
    idle_ratio: float | None = None
    """Forecast idle share of a guest's slot at its P10; None if unknown."""


class EngineWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="engine_withdrawn"):
    engine: EngineId


class ContextLimited(msgspec.Struct, frozen=True, kw_only=True, tag="context_limited"):
    """The largest context of all engines that exist or may come; None if one is unknown."""

    tokens: int | None


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True, tag="request_arrived"):
    """All turns of one request, which arrive soon: the queue admits all of them or none."""

    turns: tuple[str, ...]


class RequestLeft(msgspec.Struct, frozen=True, kw_only=True, tag="request_left"):
    """The client of an arrived request waits no more."""

    turns: tuple[str, ...]


class TurnArrived(msgspec.Struct, frozen=True, kw_only=True, tag="turn_arrived"):
    turn: str
    trajectory: TrajectoryId
    job: JobId
    tokens: int
    """Still to be generated, at most."""
    context_tokens: int = 0
    """Length of prompt and whole output, in tokens; an engine with less would cut it short."""
    exact: WeightVersion | None = None
    minimum: WeightVersion | None = None
    pin_until_s: float = math.inf
    """A pin that no engine meets yet is waited for until then."""
    numerics: str = ""
    """Label that the turn's engine must have; empty: any."""
    resumed: bool = False
    """Lost its engine; it waits in front of all others."""
    since_s: float | None = None
    """Time since which it waits, if it has waited before and comes again in another way."""
    suspect: str = ""
    """Suspected cause of engine deaths. Until cleared, no other suspect and nothing of the same
    name shares its engine."""
    avoid: tuple[EngineId, ...] = ()
    """Engines that failed or refused the turn a moment ago."""


class TurnLeft(msgspec.Struct, frozen=True, kw_only=True, tag="turn_left"):
    """A dispatched turn freed its place."""

    turn: str
    tokens: int = 0
    seconds: float = 0.0
    """Time on its engine, without the pauses of a guest's closed gate, in s."""
    stalled: bool = False
    """Whether it was taken off an engine that had fallen silent."""
    refused_s: float | None = None
    """The engine refused the turn: it gets no more turns than it has, for this long, in s."""


class TurnCleared(msgspec.Struct, frozen=True, kw_only=True, tag="turn_cleared"):
    """The turn stops being a suspect; it stays on its engine."""

    turn: str


class JobPaused(msgspec.Struct, frozen=True, kw_only=True, tag="job_paused"):
    """The job's turns wait, or go on where `paused` is false."""

    job: JobId
    paused: bool


class TrajectoryEnded(msgspec.Struct, frozen=True, kw_only=True, tag="trajectory_ended"):
    """No turn of this session, or of its request's samples, comes any more."""

    job: JobId
    trajectory: TrajectoryId


class TurnWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="turn_withdrawn"):
    """No client waits for this queued turn any more."""

    turn: str


RoutingEvent = (
    EngineOffered
    | EngineWithdrawn
    | Retarget
    | ContextLimited
    | RequestArrived
    | RequestLeft
    | TurnArrived
    | TurnLeft
    | TurnWithdrawn
    | TurnCleared
    | JobPaused
    | TrajectoryEnded
    | TimePassed
)


class DispatchReason(StrEnum):
    AFFINITY = "affinity"
    DEDICATED = "dedicated"
    GUEST = "guest"
    TAIL = "tail"


class DispatchTurn(msgspec.Struct, frozen=True, kw_only=True, tag="dispatch_turn"):
    turn: str
    engine: EngineId
    version: WeightVersion
    reason: DispatchReason


class DeferTurn(msgspec.Struct, frozen=True, kw_only=True, tag="hold_turn"):
    """No engine meets its pin yet."""

    turn: str
    reason: str


class QueueTurn(msgspec.Struct, frozen=True, kw_only=True, tag="queue_turn"):
    turn: str


class Refusal(StrEnum):
    VERSION = "version"
    """No engine met the pin within the turn's patience; a later one may."""
    GONE = "gone"
    """No engine will ever serve the pinned version again."""
    JOB = "job"
    FULL = "full"
    """More turns wait than the queue holds."""
    UNSERVED = "unserved"
    """No engine could serve or finish the turn in time."""
    CONTEXT = "context"
    """No engine has the context that the turn needs."""
    REQUEST = "request"
    """The request itself is at fault; the same one is not served later either."""


class RefuseTurn(msgspec.Struct, frozen=True, kw_only=True, tag="refuse_turn"):
    turn: str
    refusal: Refusal
    reason: str


class ForgetPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="forget_prefix"):
    """The engine need not keep the prefix of this trajectory."""

    engine: EngineId
    job: JobId
    trajectory: TrajectoryId


RoutingEffect = DispatchTurn | DeferTurn | QueueTurn | RefuseTurn | ForgetPrefix
