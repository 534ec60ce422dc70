"""Versions: a trainer that publishes, a gateway with two turns, and two engines that load and die.

    real      VersionPolicy, RoutingPolicy, Turn with its spans and pin, the identity's change
    modelled  engines that stamp each reply with their identity (as IdentityMiddleware does), the
              network, and the order in which the shells (`EngineFleet`, `TurnRunner`) call the
              policies

A tick is the delay to the next try of a failed update. Invariants:

    a token's span names the version of the weights that sampled it
    a pinned turn has tokens of its version only
    an engine that is believed to serve a version holds it, unless it is another process by now
    a job's published version never falls, nor does the version that the fleet is led to
    once faults are over every engine serves the newest version, and a turn ends with its tokens
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    VersionPin,
)
from scheduler.gateway.dispatch import arrival
from scheduler.gateway.engines.identity import Change, change_between
from scheduler.gateway.policy.attempt import Attempt
from scheduler.gateway.policy.course import TurnCourse
from scheduler.gateway.policy.prompts import Prompt
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import (
    DispatchTurn,
    EngineOffered,
    EngineWithdrawn,
    RefuseTurn,
    RoutingConfig,
    RoutingEvent,
    TurnLeft,
)
from scheduler.gateway.policy.turn import Turn, TurnCounters
from scheduler.gateway.policy.versions import EngineState, VersionPolicy
from scheduler.gateway.policy.versions_events import (
    EngineEmptied,
    EngineJoined,
    EngineLeft,
    EngineUpdated,
    JobActivated,
    QuiesceEngine,
    RefusePublish,
    Retarget,
    ServeEngine,
    TimePassed,
    UpdateEngine,
    VersionPublished,
    VersionsConfig,
    VersionsEvent,
)
from scheduler.model import BASE_VERSION, EngineKind
from tests.explore.part import Part
from tests.explore.search import FAULT, Broken, Move

TICK_S, TOKENS, TURNS, LATE_MAX = 1.0, 2, 2, 1
JOB, STORE = JobId("job"), "store"
ENGINES = (EngineId("e0"), EngineId("e1"))
NO_WEIGHTS = -1
"""The weights after an update that broke half way, or after another client's."""


class Versions:
    def __init__(self, published: int) -> None:
        self.now = 0.0
        self.policy = VersionPolicy(VersionsConfig(retry_s=TICK_S))
        if published:
            event = VersionPublished(job=JOB, store=STORE, version=WeightVersion(published))
            self.policy.observe(event, now=self.now)
        self.policy.observe(JobActivated(job=JOB), now=self.now)

    def tick(self) -> None:
        self.now += TICK_S

    def observe(self, event: VersionsEvent) -> Any:
        return self.policy.observe(event, now=self.now)


class Routing:
    def __init__(self, target: int) -> None:
        self.now = 0.0
        self.policy = RoutingPolicy(RoutingConfig())
        self.observe(Retarget(job=JOB, version=WeightVersion(target)))

    def tick(self) -> None:
        self.now += TICK_S

    def observe(self, event: RoutingEvent) -> Any:
        return self.policy.observe(event, now=self.now)


class TurnPart:
    """A turn, its attempts, and of each token the version of the weights that sampled it."""

    def __init__(self, name: str, pin: VersionPin) -> None:
        self.now = 0.0
        request = GenerateRequest(
            request_id=name,
            token_ids=(1,),
            sampling_params=SamplingParams(max_tokens=TOKENS),
            weight_version=pin,
        )
        self.turn = Turn(
            request=request,
            job=JOB,
            trajectory=TrajectoryId(name),
            counters=TurnCounters(),
            pin=pin.resolved(BASE_VERSION),
            prompt=Prompt(JOB, request.token_ids),
        )
        self.attempts: list[Attempt] = []
        self.truth: list[int] = []

    def arrival(self) -> Any:
        return arrival(self.turn, TurnCourse(pin_until_s=0.0, resumed=bool(self.attempts)))

    def key(self) -> str:
        return self.turn.key

    def ended(self) -> bool:
        return self.turn.ended

    def whole(self) -> bool:
        return len(self.turn.token_ids) == TOKENS

    def goes_on_at(self, version: int) -> bool:
        return self.turn.pin.exact is None and self.turn.pin.admits(WeightVersion(version))

    def begin(self, engine: EngineId, version: int) -> int:
        attempt = self.turn.begin(engine=engine, version=WeightVersion(version), numerics="")
        self.attempts.append(attempt)
        return len(self.attempts) - 1

    def accept(self, number: int, true: int) -> None:
        if self.turn.ended:
            return
        logprob = TokenLogprob(7, 0.0)
        if not self.turn.accept(self.attempts[number], (7,), (logprob,)):
            return
        self.truth.append(true)
        if self.turn.remaining_tokens == 0:
            self.turn.finish(self.attempts[number], "length")
        self._check()

    def lose(self, number: int) -> None:
        self.turn.lose(self.attempts[number])

    def end(self) -> None:
        self.turn.refuse()

    def _check(self) -> None:
        for span in self.turn.choice().spans:
            for true in self.truth[span.start : span.end]:
                if true != span.version:
                    raise Broken(f"a token of version {true} is labelled {span.version}")
                if not self.turn.pin.admits(WeightVersion(true)):
                    raise Broken(f"a turn pinned to {self.turn.pin.exact} has a token of {true}")


class EngineProcess(NamedTuple):
    life: int = 0
    alive: bool = True
    calls: int = 0
    """Calls that may have changed its weights."""
    weights: int = 0

    @property
    def identity(self) -> str:
        return f"p{self.life}.{self.calls}"

    def loaded(self, weights: int) -> "EngineProcess":
        return self._replace(weights=weights, calls=self.calls + 2)


class Member(NamedTuple):
    """The gateway's view of an engine."""

    up: bool = False
    identity: str = ""
    """Identity of the engine that the version in force was applied to."""
    quiesced: bool = False
    version: int | None = None
    """That an update under way leads to."""
    loaded: bool = False
    read: str = ""
    """Identity from before the update's check of the weights."""


class Stream(NamedTuple):
    """An attempt between gateway and engine."""

    turn: int
    engine: int
    version: int
    """The version that the dispatch named."""
    number: int | None = None
    """The attempt's; None while the turn has a place and its runner has not gone on."""
    wanted: str = ""
    sent: bool = False
    open: bool = False
    """The engine serves it."""
    broken: bool = False
    cut: str = ""
    """Why its runner was told to leave; it has not yet."""
    pipe: tuple[int, ...] = ()
    """Tokens on their way, by the version that sampled them."""


class World(NamedTuple):
    versions: int
    routing: int
    up: bool = True
    """Whether the gateway runs."""
    stored: int = 0
    """Published version in its state file."""
    engines: tuple[EngineProcess, ...] = (EngineProcess(), EngineProcess())
    members: tuple[Member, ...] = (Member(), Member())
    turns: tuple[int | None, ...] = (None,) * TURNS
    streams: tuple[Stream, ...] = ()
    late: tuple[tuple[int, int], ...] = ()
    """Loads that come to an engine although their caller has given them up."""
    stale: tuple[tuple[int, int, int], ...] = ()
    """Tokens of attempts that were cut: turn, attempt and version."""
    opened: int = 0
    faults: int = 0
    publishes: int = 0
    served: bool | None = None
    """On a fair course: whether a turn has ended with its tokens."""


class VersionModel:
    def __init__(self, *, faults: int = 4, publishes: int = 3) -> None:
        moments = {
            "failed_at_s",
            "progress_at_s",
            "learned_s",
            "since_s",
            "stalled_s",
            "closed_until_s",
        }
        ignored = {
            *("_config", "request", "counters", "logprobs", "reasoning", "sampling_params"),
            *("end_tokens", "_turn_tokens", "seconds", "tokens", "learned_s", "progress_at_s"),
            *("token_ids", "limit", "refused"),
        }
        kinds: dict[str, Any] = {"moments": moments, "ignored": ignored, "age_max_s": 2 * TICK_S}
        self._versions: Part[Versions] = Part(**kinds)
        self._routing: Part[Routing] = Part(**kinds)
        self._turns: Part[TurnPart] = Part(
            moments=moments, ignored=ignored - {"token_ids"}, age_max_s=2 * TICK_S
        )
        self._faults, self._publishes = faults, publishes

    def starts(self) -> Iterator[World]:
        """A new gateway; one whose engines serve their first weights, with a place for each turn;
        and the same when a token of each is on its way."""
        world = World(
            self._versions.add(Versions(0)),
            self._routing.add(Routing(0)),
            faults=self._faults,
            publishes=self._publishes,
        )
        yield world
        for at in range(len(ENGINES)):
            world = self._update(self._join(world, at), at)
        for turn, pinned in enumerate((True, False)):
            world = self._open(world, turn, pinned)
        yield world
        for turn in range(TURNS):
            while not (stream := self._stream_of(world, turn)).pipe:
                world = next(iter(self._stream_moves(world, stream))).go()
        yield world

    def moves(self, world: World) -> Iterator[Move[World]]:
        yield Move("a tick passes", partial(self._tick, world))
        if world.up:
            yield from self._gateway_moves(world)
        else:
            yield Move("the gateway starts", partial(self._start, world))
        for at, engine in enumerate(world.engines):
            if not engine.alive:
                yield Move(f"{ENGINES[at]} starts", partial(self._start_engine, world, at))
        for stream in world.streams:
            yield from self._stream_moves(world, stream)
        for at, version in world.late:
            words = f"a late load of version {version} comes to {ENGINES[at]}"
            yield Move(words, partial(self._load_late, world, at, version))
        for token in world.stale:
            words = f"a token of a cut attempt of turn {token[0]} arrives"
            yield Move(words, partial(self._accept_stale, world, token))
        if world.faults:
            yield from self._faults_of(world._replace(faults=world.faults - 1))

    def _gateway_moves(self, world: World) -> Iterator[Move[World]]:
        if world.publishes:
            less = world._replace(publishes=world.publishes - 1)
            version = self._published(world) + 1
            for cut in (False, True):
                words = f"version {version} is published{', pins cut' if cut else ''}"
                yield Move(words, partial(self._publish, less, version, cut))
            if version > 1:
                words = f"version {version - 2} is published, late"
                yield Move(words, partial(self._publish, less, version - 2, False), FAULT)
        for at, member in enumerate(world.members):
            name = ENGINES[at]
            if member.version is not None:
                yield from self._update_moves(world, at)
            elif not member.up and world.engines[at].alive:
                yield Move(f"{name} is found healthy", partial(self._join, world, at))
            elif member.up and not self._running(world, at) and self._changed(world, at):
                yield Move(f"{name} is found changed", partial(self._down, world, at))
        for turn, part in enumerate(world.turns):
            if part is None and world.opened < 2 * TURNS:
                yield Move(f"turn {turn} comes", partial(self._open, world, turn, False))
                words = f"turn {turn} comes, pinned to the newest version"
                yield Move(words, partial(self._open, world, turn, True))

    def _update_moves(self, world: World, at: int) -> Iterator[Move[World]]:
        name, member, engine = ENGINES[at], world.members[at], world.engines[at]
        if not engine.alive:
            yield Move(f"the update of {name} finds nobody", partial(self._updated, world, at, "x"))
        elif member.version and not member.loaded:
            yield Move(f"{name} loads version {member.version}", partial(self._load, world, at))
        elif not member.read:
            yield Move(f"{name} says who it is", partial(self._read, world, at))
        else:
            yield Move(f"{name} says what it holds", partial(self._confirm, world, at))

    def _stream_moves(self, world: World, stream: Stream) -> Iterator[Move[World]]:
        turn, engine = stream.turn, world.engines[stream.engine]
        there = engine.alive and engine.identity == stream.wanted
        if stream.cut:
            words = f"turn {turn} leaves its engine: {stream.cut}"
            yield Move(words, partial(self._leave, world, stream))
            return
        if stream.number is None:
            yield Move(f"turn {turn} goes on at its place", partial(self._begin, world, stream))
            return
        if not stream.sent:
            yield Move(f"turn {turn} is sent", partial(self._send, world, stream))
            return
        if not (stream.open or stream.broken):
            yield Move(
                f"turn {turn} reaches its engine", partial(self._reach, world, stream, there)
            )
        if stream.open and not stream.pipe and not stream.broken:
            go = partial(self._sample, world, stream, there)
            yield Move(f"a token of turn {turn} is sampled", go)
        if stream.pipe:
            yield Move(f"a token of turn {turn} arrives", partial(self._accept, world, stream))
        elif stream.broken:
            yield Move(f"turn {turn} sees its stream end", partial(self._broke, world, stream))

    def _faults_of(self, world: World) -> Iterator[Move[World]]:
        if world.up:
            yield Move("the gateway dies", partial(self._kill, world), FAULT)
        for at, engine in enumerate(world.engines):
            name = ENGINES[at]
            if not engine.alive:
                continue
            yield Move(f"{name} dies", partial(self._kill_engine, world, at), FAULT)
            words = f"{name} dies and another process is at once in its place"
            anew = partial(self._replaced, world, at)
            yield Move(words, anew, FAULT)
            meddled = self._at(world, at, engine.loaded(NO_WEIGHTS))
            words = f"another client loads weights into {name}"
            yield Move(words, lambda meddled=meddled: meddled, FAULT)
            member = world.members[at]
            if member.version and not member.loaded:
                yield Move(f"{name} breaks its load", partial(self._break_load, world, at), FAULT)
                if len(world.late) < LATE_MAX:
                    late = world._replace(late=(*world.late, (at, member.version)))
                    words = f"the load of {name} is given up, and comes late"
                    yield Move(words, partial(self._updated, late, at, "timeout"), FAULT)
        for stream in world.streams:
            if stream.sent and not stream.broken:
                cut = self._with(world, stream, stream._replace(broken=True))
                words = f"the connection of turn {stream.turn} breaks"
                yield Move(words, lambda cut=cut: cut, FAULT)

    def check(self, world: World) -> None:
        if not world.up:
            return
        policy = self._versions.look(world.versions).policy
        target = policy.target
        if self._published(world) < world.stored or (target and target.version < world.stored):
            raise Broken(f"the published version fell below {world.stored}")
        for at, (engine, member) in enumerate(zip(world.engines, world.members, strict=True)):
            if policy.state(ENGINES[at]) is not EngineState.SERVING or not member.up:
                continue
            same = engine.alive and engine.identity == member.identity
            held = policy.version(ENGINES[at])
            if same and engine.weights != held:
                raise Broken(f"{ENGINES[at]} serves {held} and holds {engine.weights}")
            if not member.identity:
                raise Broken(f"{ENGINES[at]} serves {held}, and it is not known who it is")

    def mended(self, world: World) -> World:
        world = world._replace(late=(), stale=(), faults=0, publishes=0, opened=0, served=False)
        for at, engine in enumerate(world.engines):
            # The weights that an engine started with are in no store.
            lost = not world.stored and engine.weights
            if not engine.alive or lost:
                world = self._replaced(world, at)
        return world if world.up else self._start(world)

    def onward(self, world: World) -> World | None:
        """One fair tick: engines are looked after, then turns go on to their end."""
        newest = WeightVersion(self._published(world))
        policy = self._versions.look(world.versions).policy
        serves = all(
            policy.state(engine) is EngineState.SERVING and policy.version(engine) == newest
            for engine in ENGINES
        )
        if serves and world.served:
            return None
        for stream in world.streams:
            for move in self._stream_moves(world, stream):
                return move.go()
        for at, member in enumerate(world.members):
            if member.version is not None:
                return self._update(world, at)
            if not member.up:
                return self._join(world, at)
            if not self._running(world, at) and self._changed(world, at):
                return self._down(world, at)
        for turn, part in enumerate(world.turns):
            if part is None and not world.served:
                return self._open(world, turn, False)
        return self._tick(world)

    # The gateway's engines.

    def _published(self, world: World) -> int:
        job = self._versions.look(world.versions).policy.published(JOB)
        return job.version if job else 0

    def _observe(self, world: World, event: VersionsEvent) -> World:
        """Effects may raise further events; they are taken one after another."""
        events = [event]
        while events:
            number, effects = self._versions.call(world.versions, "observe", events.pop(0))
            world = world._replace(versions=number)
            for effect in effects:
                world = self._apply(world, effect, events)
        return world

    def _apply(self, world: World, effect: Any, events: list[VersionsEvent]) -> World:
        match effect:
            case Retarget():
                return self._route(world, effect)
            case QuiesceEngine():
                return self._quiesce(world, effect, events)
            case UpdateEngine():
                at = ENGINES.index(effect.engine)
                member = world.members[at]._replace(version=effect.version, loaded=False, read="")
                return self._of(world, at, member)
            case ServeEngine():
                at = ENGINES.index(effect.engine)
                world = self._of(world, at, world.members[at]._replace(quiesced=False))
                return self._offer(world, effect)
        return world

    def _quiesce(self, world: World, effect: QuiesceEngine, events: list[VersionsEvent]) -> World:
        at = ENGINES.index(effect.engine)
        world = self._of(world, at, world.members[at]._replace(quiesced=True))
        world = self._route(world, EngineWithdrawn(engine=effect.engine))
        target = self._versions.look(world.versions).policy.target
        assert target is not None
        for stream in self._running(world, at):
            part = world.turns[stream.turn]
            assert part is not None
            if self._turns.ask(part, "goes_on_at", target.version):
                world = self._with(world, stream, stream._replace(cut=stream.cut or "switch"))
            elif effect.cut_exact:
                world = self._with(world, stream, stream._replace(cut=stream.cut or "end"))
        if not self._running(world, at):
            events.append(EngineEmptied(engine=effect.engine))
        return world

    def _offer(self, world: World, effect: ServeEngine) -> World:
        offered = EngineOffered(
            engine=effect.engine,
            kind=EngineKind.DEDICATED,
            concurrency=TURNS,
            job=effect.job,
            version=effect.version,
        )
        return self._route(world, offered)

    def _join(self, world: World, at: int) -> World:
        world = self._of(world, at, Member(up=True))
        return self._observe(world, EngineJoined(engine=ENGINES[at], kind=EngineKind.DEDICATED))

    def _down(self, world: World, at: int) -> World:
        if not world.members[at].up:
            return world
        world = self._of(world, at, Member())
        world = self._route(world, EngineWithdrawn(engine=ENGINES[at]))
        world = self._observe(world, EngineLeft(engine=ENGINES[at]))
        for stream in self._running(world, at):
            world = self._with(world, stream, stream._replace(cut=stream.cut or "engine"))
        return world

    def _changed(self, world: World, at: int) -> Change:
        given, engine = world.members[at].identity, world.engines[at]
        if not given or not engine.alive:
            return Change.NONE
        return change_between(given, engine.identity)

    def _publish(self, world: World, version: int, cut: bool) -> World:
        before, event = (
            self._published(world),
            VersionPublished(job=JOB, store=STORE, version=WeightVersion(version), cut_exact=cut),
        )
        _, effects = self._versions.call(world.versions, "observe", event)
        refused = any(isinstance(effect, RefusePublish) for effect in effects)
        if refused != (version < before):
            raise Broken(f"version {version} after {before}: refused is {refused}")
        if refused:
            return world
        return self._observe(world._replace(stored=max(version, world.stored)), event)

    # An update.

    def _update(self, world: World, at: int) -> World:
        """One that nothing disturbs."""
        while world.members[at].version is not None:
            world = next(iter(self._update_moves(world, at))).go()
        return world

    def _load(self, world: World, at: int) -> World:
        member, engine = world.members[at], world.engines[at]
        assert member.version is not None
        world = self._at(world, at, engine.loaded(member.version))
        return self._of(world, at, member._replace(loaded=True))

    def _break_load(self, world: World, at: int) -> World:
        broken = world.engines[at]._replace(weights=NO_WEIGHTS, calls=world.engines[at].calls + 1)
        return self._updated(self._at(world, at, broken), at, "broken")

    def _load_late(self, world: World, at: int, version: int) -> World:
        late = tuple(each for each in world.late if each != (at, version))
        engine = world.engines[at]
        world = world._replace(late=late)
        return self._at(world, at, engine.loaded(version)) if engine.alive else world

    def _read(self, world: World, at: int) -> World:
        member = world.members[at]._replace(read=world.engines[at].identity)
        return self._of(world, at, member)

    def _confirm(self, world: World, at: int) -> World:
        member, engine = world.members[at], world.engines[at]
        if engine.identity != member.read or engine.weights != member.version:
            return self._updated(world, at, "another engine, or other weights")
        world = self._of(world, at, member._replace(identity=engine.identity))
        return self._updated(world, at, "")

    def _updated(self, world: World, at: int, fault: str) -> World:
        member = world.members[at]
        assert member.version is not None
        done = member._replace(version=None, loaded=False, read="")
        if fault:
            done = done._replace(identity="")
        event = EngineUpdated(
            engine=ENGINES[at], job=JOB, version=WeightVersion(member.version), fault=fault
        )
        return self._observe(self._of(world, at, done), event)

    # Turns.

    def _route(self, world: World, event: RoutingEvent) -> World:
        number, effects = self._routing.call(world.routing, "observe", event)
        world = world._replace(routing=number)
        for effect in effects:
            match effect:
                case DispatchTurn():
                    engine = ENGINES.index(effect.engine)
                    stream = Stream(self._turn(world, effect.turn), engine, effect.version)
                    world = world._replace(streams=tuple(sorted((*world.streams, stream))))
                case RefuseTurn():
                    turn = self._turn(world, effect.turn)
                    world = self._close(self._do(world, turn, "end"), turn)
        return world

    def _turn(self, world: World, key: str) -> int:
        keys = [None if part is None else self._turns.ask(part, "key") for part in world.turns]
        return keys.index(key)

    def _open(self, world: World, turn: int, pinned: bool) -> World:
        pin = VersionPin(exact=WeightVersion(self._published(world))) if pinned else VersionPin()
        part = self._turns.add(TurnPart(f"t{turn}", pin))
        world = self._put(world._replace(opened=world.opened + 1), turn, part)
        return self._arrive(world, turn)

    def _arrive(self, world: World, turn: int) -> World:
        part = world.turns[turn]
        assert part is not None
        if self._turns.ask(part, "ended"):
            return self._close(world, turn)
        return self._route(world, self._turns.ask(part, "arrival"))

    def _close(self, world: World, turn: int) -> World:
        part = world.turns[turn]
        assert part is not None
        if world.served is False and self._turns.ask(part, "whole"):
            world = world._replace(served=True)
        stale = tuple(each for each in world.stale if each[0] != turn)
        return self._put(world._replace(stale=stale), turn, None)

    def _do(self, world: World, turn: int, method: str, *arguments: Any) -> World:
        part = world.turns[turn]
        assert part is not None
        return self._put(world, turn, self._turns.call(part, method, *arguments)[0])

    def _begin(self, world: World, stream: Stream) -> World:
        """The turn's runner goes on; its engine may have gone away meanwhile."""
        if not self._began(world, stream):
            return self._leave(world, stream)
        part = world.turns[stream.turn]
        assert part is not None
        number, attempt = self._turns.call(part, "begin", ENGINES[stream.engine], stream.version)
        world = self._put(world, stream.turn, number)
        return self._with(world, stream, stream._replace(number=attempt))

    def _began(self, world: World, stream: Stream) -> bool:
        """As `EngineFleet.began`."""
        policy = self._versions.look(world.versions).policy
        serves = policy.serves(ENGINES[stream.engine], JOB, WeightVersion(stream.version))
        return world.members[stream.engine].up and serves

    def _send(self, world: World, stream: Stream) -> World:
        wanted = world.members[stream.engine].identity
        return self._with(world, stream, stream._replace(sent=True, wanted=wanted))

    def _reach(self, world: World, stream: Stream, there: bool) -> World:
        after = stream._replace(open=True) if there else stream._replace(broken=True)
        return self._with(world, stream, after)

    def _sample(self, world: World, stream: Stream, there: bool) -> World:
        """The engine ends a stream whose identity is no more its own before the next token."""
        if not there:
            return self._with(world, stream, stream._replace(broken=True))
        weights = world.engines[stream.engine].weights
        return self._with(world, stream, stream._replace(pipe=(weights,)))

    def _accept(self, world: World, stream: Stream) -> World:
        world = self._do(world, stream.turn, "accept", stream.number, stream.pipe[0])
        part = world.turns[stream.turn]
        assert part is not None
        if not self._turns.ask(part, "ended"):
            return self._with(world, stream, stream._replace(pipe=()))
        return self._leave(world, stream)

    def _accept_stale(self, world: World, token: tuple[int, int, int]) -> World:
        turn, number, true = token
        world = world._replace(stale=tuple(each for each in world.stale if each != token))
        return self._do(world, turn, "accept", number, true)

    def _broke(self, world: World, stream: Stream) -> World:
        """A broken stream: the engine is asked what became of it."""
        at, engine = stream.engine, world.engines[stream.engine]
        same = engine.alive and engine.identity == stream.wanted
        if not same and world.members[at].identity == stream.wanted:
            world = self._down(world, at)
            stream = self._stream_of(world, stream.turn)
        return self._leave(world, stream)

    def _leave(self, world: World, stream: Stream) -> World:
        """The attempt is over; its turn goes on elsewhere, unless it has ended."""
        turn, at, stale = stream.turn, stream.engine, world.stale
        if stream.pipe and stream.number is not None and len(stale) < LATE_MAX:
            stale = (*stale, (turn, stream.number, stream.pipe[0]))
        streams = tuple(each for each in world.streams if each != stream)
        world = world._replace(streams=streams, stale=stale)
        if stream.number is not None:
            world = self._do(world, turn, "lose", stream.number)
        if stream.cut == "end":
            world = self._do(world, turn, "end")
        part = world.turns[turn]
        assert part is not None
        left = TurnLeft(turn=self._turns.ask(part, "key"), tokens=1, seconds=1.0)
        world = self._route(world, left)
        member = world.members[at]
        begun = stream.number is not None
        if begun and member.quiesced and member.up and not self._running(world, at):
            world = self._observe(world, EngineEmptied(engine=ENGINES[at]))
        return self._arrive(world, turn)

    def _stream_of(self, world: World, turn: int) -> Stream:
        return next(stream for stream in world.streams if stream.turn == turn)

    def _running(self, world: World, at: int) -> tuple[Stream, ...]:
        return tuple(s for s in world.streams if s.engine == at and s.number is not None)

    # Lives, and time.

    def _tick(self, world: World) -> World:
        if not world.up:
            return world
        world = world._replace(
            versions=self._versions.call(world.versions, "tick")[0],
            routing=self._routing.call(world.routing, "tick")[0],
        )
        return self._route(self._observe(world, TimePassed()), TimePassed())

    def _kill(self, world: World) -> World:
        nothing = (None,) * TURNS
        return world._replace(
            up=False, turns=nothing, streams=(), stale=(), members=(Member(), Member())
        )

    def _start(self, world: World) -> World:
        versions = self._versions.add(Versions(world.stored))
        routing = self._routing.add(Routing(world.stored))
        return world._replace(up=True, versions=versions, routing=routing)

    def _kill_engine(self, world: World, at: int) -> World:
        world = self._at(world, at, world.engines[at]._replace(alive=False))
        return self._cut(world, at)

    def _start_engine(self, world: World, at: int) -> World:
        return self._at(world, at, EngineProcess(life=world.engines[at].life + 1))

    def _replaced(self, world: World, at: int) -> World:
        return self._start_engine(self._kill_engine(world, at), at)

    def _cut(self, world: World, at: int) -> World:
        for stream in world.streams:
            if stream.engine == at and stream.open:
                world = self._with(world, stream, stream._replace(broken=True))
        return world

    def _with(self, world: World, stream: Stream, after: Stream) -> World:
        streams = (after if each == stream else each for each in world.streams)
        return world._replace(streams=tuple(streams))

    def _at(self, world: World, at: int, engine: EngineProcess) -> World:
        return world._replace(engines=(*world.engines[:at], engine, *world.engines[at + 1 :]))

    def _of(self, world: World, at: int, member: Member) -> World:
        return world._replace(members=(*world.members[:at], member, *world.members[at + 1 :]))

    def _put(self, world: World, turn: int, part: int | None) -> World:
        return world._replace(turns=(*world.turns[:turn], part, *world.turns[turn + 1 :]))
