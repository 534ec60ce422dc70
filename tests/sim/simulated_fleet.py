"""Simulated engines and trajectories on the production routing policy, in virtual time.

An engine shares itself between its turns: with n of them a token takes `alone * (1 + share * n)`.
A guest is a slower engine whose lease is revoked and given back at random. Trajectories are
long-tailed in turns, tokens and tool latency. The figures are simulated: they compare policies and
measure no machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from scheduler.gateway.policy.routing import (
    RoutingPolicy,
)
from scheduler.gateway.policy.routing_events import (
    DispatchTurn,
    EngineOffered,
    EngineWithdrawn,
    RoutingConfig,
    RoutingEvent,
    TurnArrived,
    TurnLeft,
)
from scheduler.gateway.policy.versions_events import Retarget
from scheduler.model import EngineKind
from tests.sim.simulation import Scheduled, Simulation

Plan = list[tuple[int, float]]
"""Tokens and tool seconds of each turn of one trajectory."""

_JOB, _VERSION = JobId("simulated"), WeightVersion(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    dedicated: int = 1
    guests: int = 1
    concurrency: int = 16
    guest_speed_ratio: float = 0.5
    """Speed of a guest under its grant, over a dedicated engine's."""
    lease_s: float = 60.0
    """Mean time until a lease is revoked."""
    gap_s: float = 5.0
    """Mean time until it is given again."""
    s_per_token_alone: float = 0.002
    share_per_stream: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    trajectories: int = 192
    turns_mean: float = 3.5
    turns_max: int = 9
    tokens_median: float = 16.0
    tokens_sigma: float = 0.6
    tokens_max: int = 256
    tool_median_s: float = 0.015
    tool_sigma: float = 1.0
    tool_max_s: float = 0.4
    training_s: float = 1.0
    """Time between two rollout phases, in s."""


@dataclass(slots=True)
class _Turn:
    arrived: TurnArrived
    left_tokens: float
    done: Callable[[], None]
    began_s: float = 0.0
    began_tokens: float = 0.0


@dataclass(slots=True)
class SimulatedEngine:
    """Processor sharing: every change of the number of turns changes everyone's speed."""

    sim: Simulation
    s_per_token_alone: float
    share_per_stream: float
    on_done: Callable[[_Turn], None]
    turns: dict[str, _Turn] = field(default_factory=dict)
    _updated_s: float = 0.0
    _next: Scheduled | None = None

    def begin(self, turn: _Turn) -> None:
        self._advance()
        turn.began_s, turn.began_tokens = self.sim.now, turn.left_tokens
        self.turns[turn.arrived.turn] = turn
        self._schedule()

    def take_all(self) -> list[_Turn]:
        self._advance()
        taken = list(self.turns.values())
        self.turns.clear()
        self._schedule()
        return taken

    def _s_per_token(self) -> float:
        return self.s_per_token_alone * (1 + self.share_per_stream * len(self.turns))

    def _advance(self) -> None:
        if self.turns:
            made = (self.sim.now - self._updated_s) / self._s_per_token()
            for turn in self.turns.values():
                turn.left_tokens = max(0.0, turn.left_tokens - made)
        self._updated_s = self.sim.now

    def _schedule(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self.turns:
            first = min(turn.left_tokens for turn in self.turns.values())
            self._next = self.sim.after(first * self._s_per_token(), self._finish)

    def _finish(self) -> None:
        self._next = None
        self._advance()
        # The event was scheduled for the turn with the least left; rounding may leave a crumb.
        least = min(turn.left_tokens for turn in self.turns.values())
        ended = [turn for turn in self.turns.values() if turn.left_tokens <= least + 1e-9]
        for turn in ended:
            turn.left_tokens = 0.0
            del self.turns[turn.arrived.turn]
        self._schedule()
        for turn in ended:
            self.on_done(turn)


class SimulatedFleet:
    def __init__(self, sim: Simulation, shape: FleetShape, *, leases: bool) -> None:
        self.sim = sim
        self.shape = shape
        self.policy = RoutingPolicy(RoutingConfig())
        self.engines: dict[EngineId, SimulatedEngine] = {}
        self.migrated = 0
        self._turns: dict[str, _Turn] = {}
        self.observe(Retarget(job=_JOB, version=_VERSION))
        for index in range(shape.dedicated):
            self._add(EngineId(f"dedicated.{index}"), EngineKind.DEDICATED, 1.0)
        for index in range(shape.guests if leases else 0):
            guest = EngineId(f"guest.{index}")
            self._add(guest, EngineKind.GUEST, shape.guest_speed_ratio)
            sim.after(self._draw_s(shape.lease_s), partial(self._revoke, guest))

    def submit(self, turn: TurnArrived, done: Callable[[], None]) -> None:
        self._turns[turn.turn] = _Turn(turn, float(turn.tokens), done)
        self.observe(turn)

    def observe(self, event: RoutingEvent) -> None:
        for effect in self.policy.observe(event, now=self.sim.now):
            if isinstance(effect, DispatchTurn):
                self.engines[effect.engine].begin(self._turns[effect.turn])

    def _add(self, engine: EngineId, kind: EngineKind, speed: float) -> None:
        self.engines[engine] = SimulatedEngine(
            self.sim,
            self.shape.s_per_token_alone / speed,
            self.shape.share_per_stream,
            self._done,
        )
        self._offer(engine, kind)

    def _offer(self, engine: EngineId, kind: EngineKind) -> None:
        self.observe(
            EngineOffered(
                engine=engine,
                kind=kind,
                concurrency=self.shape.concurrency,
                job=_JOB,
                version=_VERSION,
            )
        )

    def _revoke(self, guest: EngineId) -> None:
        self.observe(EngineWithdrawn(engine=guest))
        for turn in self.engines[guest].take_all():
            self.migrated += 1
            self._leave(turn)
            self.observe(
                TurnArrived(
                    turn=turn.arrived.turn,
                    trajectory=turn.arrived.trajectory,
                    job=_JOB,
                    tokens=max(1, round(turn.left_tokens)),
                    exact=_VERSION,
                    resumed=True,
                )
            )
        self.sim.after(self._draw_s(self.shape.gap_s), partial(self._regrant, guest))

    def _regrant(self, guest: EngineId) -> None:
        self._offer(guest, EngineKind.GUEST)
        self.sim.after(self._draw_s(self.shape.lease_s), partial(self._revoke, guest))

    def _done(self, turn: _Turn) -> None:
        del self._turns[turn.arrived.turn]
        self._leave(turn)
        turn.done()

    def _leave(self, turn: _Turn) -> None:
        self.observe(
            TurnLeft(
                turn=turn.arrived.turn,
                tokens=round(turn.began_tokens - turn.left_tokens),
                seconds=self.sim.now - turn.began_s,
            )
        )

    def _draw_s(self, mean_s: float) -> float:
        return float(self.sim.rng.exponential(mean_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    rollout_s: float
    tokens: int
    turns: int
    migrated: int
    events: int


class _Batch:
    """One step's rollouts: all trajectories start together; the last one ends the phase."""

    def __init__(self, fleet: SimulatedFleet, plans: list[Plan], *, step: int) -> None:
        self._fleet = fleet
        self._plans = plans
        self._step = step
        self.open = len(plans)
        self.began_s = self.end_s = fleet.sim.now
        for trajectory in range(len(plans)):
            self._play(trajectory, 0)

    def _play(self, trajectory: int, turn: int) -> None:
        plan = self._plans[trajectory]
        if turn == len(plan):
            self.open -= 1
            self.end_s = self._fleet.sim.now
            return
        tokens, tool_s = plan[turn]
        name = f"{self._step}.{trajectory}"
        arrived = TurnArrived(
            turn=f"{name}.{turn}",
            trajectory=TrajectoryId(name),
            job=_JOB,
            tokens=tokens,
            exact=_VERSION,
        )
        self._fleet.submit(arrived, partial(self._call_tool, trajectory, turn, tool_s))

    def _call_tool(self, trajectory: int, turn: int, tool_s: float) -> None:
        self._fleet.sim.after(tool_s, partial(self._play, trajectory, turn + 1))


def _plan(shape: BatchShape, rng: np.random.Generator) -> Plan:
    turns = min(shape.turns_max, int(rng.geometric(1 / shape.turns_mean)))
    plan = []
    for _ in range(turns):
        tokens = round(rng.lognormal(0, shape.tokens_sigma) * shape.tokens_median)
        tool_s = float(rng.lognormal(0, shape.tool_sigma)) * shape.tool_median_s
        plan.append((max(1, min(shape.tokens_max, tokens)), min(shape.tool_max_s, tool_s)))
    return plan


def run_steps(
    fleet_shape: FleetShape, batch_shape: BatchShape, *, steps: int, seed: int, leases: bool
) -> list[BatchResult]:
    """Steps of one job on one fleet, which learns on the way.

    The same seed gives the same trajectories with and without leases.
    """
    sim = Simulation(seed=seed + 1)
    rng = Simulation(seed=seed).rng
    fleet = SimulatedFleet(sim, fleet_shape, leases=leases)
    results = []
    for step in range(steps):
        plans = [_plan(batch_shape, rng) for _ in range(batch_shape.trajectories)]
        migrated, events = fleet.migrated, sim.events
        batch = _Batch(fleet, plans, step=step)
        while batch.open:
            sim.run(until_s=sim.now + 0.1)
        results.append(
            BatchResult(
                rollout_s=batch.end_s - batch.began_s,
                tokens=sum(tokens for plan in plans for tokens, _ in plan),
                turns=sum(map(len, plans)),
                migrated=fleet.migrated - migrated,
                events=sim.events - events,
            )
        )
        sim.run(until_s=sim.now + batch_shape.training_s)
    return results
