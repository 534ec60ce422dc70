"""The engine for a turn: where it may be served, and where it is expected to end first.

A place is skipped if waiting for a faster engine is expected to end the turn sooner: a slow
harvested engine gets the share that fits its speed. At the tail of a batch the turn goes where it
is expected to end first, so that no straggler sits on a slow engine; a guest, whose gate may close
any moment, must be clearly faster for that, even where the prefix is. Only engines that serve the
turn's job at a version its pin allows, with the numerics that it needs, and whose context holds its
prompt and its whole output, are eligible: a turn never ends early because of its place.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain, count, takewhile

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from scheduler.gateway.policy.engine_load import EngineLoad
from scheduler.gateway.policy.routing_events import (
    DispatchReason,
    EngineOffered,
    ForgetPrefix,
    RoutingConfig,
    TrajectoryEnded,
    TurnArrived,
    TurnLeft,
)
from scheduler.model import EngineKind


class EngineSelection:
    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._engines: dict[EngineId, EngineLoad] = {}
        self._last: OrderedDict[tuple[JobId, TrajectoryId], EngineId] = OrderedDict()
        self._trials: dict[EngineId, TurnArrived] = {}
        """Suspects that are not cleared yet, where they are."""
        self._turn_tokens = config.default_turn_tokens

    def reconfigure(self, config: RoutingConfig) -> None:
        self._config = config

    def offer(self, event: EngineOffered) -> None:
        load = self._engines.setdefault(event.engine, EngineLoad(event))
        load.offer, load.offered = event, True

    def withdraw(self, engine: EngineId) -> None:
        if engine in self._engines:
            self._engines[engine].offered = False

    def versions(self) -> list[WeightVersion]:
        """The version that each engine served when it was last offered."""
        return [load.offer.version for load in self._engines.values()]

    def numerics(self) -> set[str]:
        return {load.offer.numerics for load in self._engines.values()}

    def last(self, turn: TurnArrived) -> EngineId | None:
        """Engine of the trajectory's last turn: its prefix may be there."""
        return self._last.get((turn.job, turn.trajectory))

    def speeds(self) -> dict[EngineId, float]:
        """Learned seconds per token of one stream alone."""
        return {
            engine: round(load.s_per_token_alone, 6)
            for engine, load in sorted(self._engines.items())
            if load.s_per_token_alone is not None
        }

    def s_per_token_alone(self, engine: EngineId) -> float | None:
        load = self._engines.get(engine)
        return load.s_per_token_alone if load else None

    def may_serve(self, turn: TurnArrived, *, unfit: Collection[EngineId] = ()) -> bool:
        """Whether an engine is offered that the turn could wait for; it may avoid that for now."""
        engines = self._engines.items()
        return any(_may_serve(load, turn) for engine, load in engines if engine not in unfit)

    def other_places(
        self, turn: TurnArrived, here: EngineId | None, *, queued: int, now: float
    ) -> int:
        """Number of places on other engines where a stalled turn could go on at once."""
        return sum(
            self._engines[engine].free_places(half_life_s=self._config.speed_half_life_s, now=now)
            for engine in self._places(turn, queued, now)
            if engine != here
        )

    def choose(
        self, turn: TurnArrived, *, queued: int, now: float
    ) -> tuple[EngineId, DispatchReason] | None:
        """The engine and the reason; None where the turn has to wait. Without a queue the batch is
        at its tail."""
        places, tail = self._places(turn, queued, now), not queued
        if not places:
            return None
        fastest, last = next(iter(places)), self.last(turn)
        kept_s = self._config.affinity_ratio * places[fastest]
        dedicated = [e for e in places if self._engines[e].offer.kind is EngineKind.DEDICATED]
        near = last in places and places[last] <= kept_s
        if last is not None and near and (last in dedicated or not (tail and dedicated)):
            return last, DispatchReason.AFFINITY
        if tail:
            safe = dedicated and places[dedicated[0]] <= kept_s
            return dedicated[0] if safe else fastest, DispatchReason.TAIL
        if dedicated:
            return dedicated[0], DispatchReason.DEDICATED
        return fastest, DispatchReason.GUEST

    def begin(self, turn: TurnArrived, engine: EngineId, *, now: float) -> WeightVersion:
        """Counts the turn on the engine; returns the engine's version."""
        load = self._engines[engine]
        load.begin(now=now)
        if turn.suspect:
            self._trials[engine] = turn
        self._last[turn.job, turn.trajectory] = engine
        self._last.move_to_end((turn.job, turn.trajectory))
        while len(self._last) > self._config.trajectories:
            self._last.popitem(last=False)
        return load.offer.version

    def leave(self, event: TurnLeft, engine: EngineId, *, now: float) -> None:
        load, weight = self._engines[engine], self._config.speed_weight
        self.end_trial(event.turn)
        if event.stalled:
            load.stall(now=now)
        elif event.refused_s is not None:
            load.refuse(event.turn, retry_s=event.refused_s, now=now)
        else:
            load.leave(tokens=event.tokens, seconds=event.seconds, weight=weight, now=now)
            if event.tokens:
                self._turn_tokens += weight * (event.tokens - self._turn_tokens)

    def end_trial(self, turn: str) -> None:
        for engine, tried in self._trials.items():
            if tried.turn == turn:
                del self._trials[engine]
                return

    def forget(self, event: TrajectoryEnded) -> Iterator[ForgetPrefix]:
        """The trajectory and the trajectories of its requests' samples `.0`, `.1`, ..."""
        parts = (TrajectoryId(f"{event.trajectory}.{index}") for index in count())
        there = takewhile(lambda part: (event.job, part) in self._last, parts)
        for name in chain((event.trajectory,), there):
            if (engine := self._last.pop((event.job, name), None)) is not None:
                yield ForgetPrefix(engine=engine, job=event.job, trajectory=name)

    def _may_try(self, turn: TurnArrived, engine: EngineId) -> bool:
        if engine in turn.avoid:
            return False
        return not turn.suspect or (
            engine not in self._trials
            and all(other.suspect != turn.suspect for other in self._trials.values())
        )

    def _expected_s(self, turn: TurnArrived, now: float) -> dict[EngineId, float]:
        """Expected duration of the turn on each engine that may serve it, full or not, in s."""
        config, until_s = self._config, now + self._config.lease_margin_s
        may = {
            engine: load
            for engine, load in self._engines.items()
            if _may_serve(load, turn)
            and ((end_s := load.offer.usable_until_s) is None or until_s < end_s)
            and self._may_try(turn, engine)
        }
        known = [load.s_per_token_alone for load in may.values()]
        guess_s = min((*filter(None, known), config.default_s_per_token))
        return {
            engine: load.turn_s(
                self._turn_tokens, guess_s=guess_s, half_life_s=config.speed_half_life_s, now=now
            )
            for engine, load in may.items()
        }

    def _places(self, turn: TurnArrived, queued: int, now: float) -> dict[EngineId, float]:
        """Engines with a place that ends the turn no later than waiting for a faster one would.

        Waiting takes as long as the faster engines, all full, need for everyone in the queue.
        """
        places: dict[EngineId, float] = {}
        faster_places, fastest_s = 0, 0.0
        ahead, expected = max(1, queued), self._expected_s(turn, now)
        for engine, turn_s in sorted(expected.items(), key=lambda item: (item[1], item[0])):
            load = self._engines[engine]
            wait_s = fastest_s * (1 + ahead / faster_places) if faster_places else turn_s
            free = load.free_places(half_life_s=self._config.speed_half_life_s, now=now)
            cost_s = turn_s
            if load.offer.kind is EngineKind.GUEST and self._config.moved_after_s is not None:
                cost_s = min(turn_s, self._config.moved_after_s + fastest_s)
            if free and (places or cost_s <= wait_s):
                places[engine] = turn_s
            if not faster_places:
                fastest_s = turn_s
            faster_places += load.places
        return places


def _may_serve(load: EngineLoad, turn: TurnArrived) -> bool:
    """Whether the engine serves the turn's job at a version its pin allows, has the numerics that
    it needs, and its context holds the whole turn."""
    offer = load.offer
    if not load.offered or offer.job != turn.job or not load.fits(turn.context_tokens):
        return False
    if turn.numerics not in ("", offer.numerics):
        return False
    return turn.exact in (None, offer.version) and offer.version >= (turn.minimum or 0)
