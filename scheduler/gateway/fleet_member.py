"""One engine of the fleet: the facts known about it, and the turns on it."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from harvester.contracts.ids import EngineId
from harvester.contracts.wire.engines import CONTINUATION_FEATURE, EngineDescription
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.identity import Change
from scheduler.gateway.policy.engine_health import EngineLog, FaultStreak, ForeignUpdates
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.running_attempt import RunningAttempt
from scheduler.model import Engine, EngineKind, Lease

_ENDED_MAX = 256
_EARLY_TOKENS = 64
"""An engine that decodes speculatively may end a turn this far from the end of its context."""


@dataclass(slots=True, eq=False)
class FleetMember:
    engine: Engine
    client: EngineClient
    up: bool = False
    losses: int = 0
    """Number of times that the engine was lost after it had been up."""
    lease: Lease | None = None
    idle_ratio: float | None = None
    """Forecast idle share of a guest's slot; None if unknown."""
    numerics: str = ""
    vllm_version: str = ""
    """Empty if unknown."""
    description: EngineDescription | None = None
    """The engine's last description; None before the first."""
    clashes: bool = False
    """Whether serving engines disagreed with its description, which then bounds no request until
    the engine serves."""
    is_described: bool = False
    """Whether it has been described since it joined."""
    seen_context_tokens: int = 0
    """Context that was seen, in tokens: where it ended an unfinished turn, or refused one that
    another engine served; 0: never."""
    held_tokens: int = 0
    """Length in tokens of the longest turn that it continued: its context is at least as long."""
    running: set[RunningAttempt] = field(default_factory=set)
    ended_trajectories: deque[str] = field(default_factory=lambda: deque(maxlen=_ENDED_MAX))
    """Reported with the engine's next request: it need not keep their prefixes."""
    fault: str = ""
    log: EngineLog = field(default_factory=EngineLog)
    streak: FaultStreak = field(default_factory=FaultStreak)
    probing: "asyncio.Task[Change] | None" = None
    quiesced_at_s: float | None = None
    switch_s: float | None = None
    """Duration of its last version switch, from its last new turn to the next one."""
    updating: "asyncio.Task[None] | None" = None
    held: bool = False
    """The engine gets no new turn, because of an order to stop."""
    foreign_changes: ForeignUpdates = field(default_factory=ForeignUpdates)
    doubted: tuple[RunningAttempt, ...] | None = None
    """Attempts that it had when it went silent, until it is known whether it died; else None."""

    @property
    def vocabulary_tokens(self) -> int | None:
        """Exclusive upper bound of the engine's token ids; None if unknown."""
        return (self.description.vocabulary if self.description else 0) or None

    @property
    def resumes(self) -> bool:
        """Whether it goes on from another engine's output as from its own."""
        return self.description is not None and CONTINUATION_FEATURE in self.description.features

    @property
    def model(self) -> str:
        """Name of its model; empty if unknown."""
        return self.description.model if self.description else ""

    def lost(self) -> tuple[RunningAttempt, ...]:
        """Attempts that go down with it, and that it may have died of."""
        return tuple(each for each in self.running if each.reached and not each.turn.ended)

    @property
    def context_tokens(self) -> int:
        """Context in tokens; 0 if unknown. Observed behaviour overrides the description."""
        described = self.description.context_tokens if self.description else 0
        return min(filter(None, (described, self.seen_context_tokens)), default=0)

    def may_end_at(self, tokens: int) -> bool:
        """Whether the engine's context may be full at this number of tokens; True if unknown."""
        return not self.context_tokens or tokens + _EARLY_TOKENS >= self.context_tokens


def unfit_for(turn: Turn, members: Mapping[EngineId, FleetMember]) -> set[EngineId]:
    """Engines that are unfit for a turn whose sampling counts output.

    The turn begins on an engine from which it can move, else on a dedicated engine, which is never
    taken back; from its first token on it goes on only where output stays output.
    """
    if not turn.counts_output:
        return set()
    resuming = {engine for engine, member in members.items() if member.resumes}
    if turn.token_ids or any(members[engine].up for engine in resuming):
        return members.keys() - resuming
    return {e for e, member in members.items() if member.engine.kind is EngineKind.GUEST}


def numerics_of(engine: EngineId, vllm_version: str, described: EngineDescription | None) -> str:
    known = [f"vllm {vllm_version}" if vllm_version else ""]
    known += [described.dtype, described.logprobs_mode] if described is not None else []
    # An engine without a description is equal to no other engine.
    return " ".join(filter(None, known)) or f"unknown, {engine}"
