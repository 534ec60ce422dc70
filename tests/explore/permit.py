"""Permits: two jobs that share nodes, and the phase control between them.

    real      PermitPolicy in its PhaseService, which decides what is kept and what is answered; the
              job's Permit, which decides when a holder gives up
    modelled  the transport, the state file, when a job asks, reports, narrows and leaves

A tick is a quarter of a lease; a call that has no answer within two of them has failed. Job a's
rollout has two nodes and a tail that needs one; job b wants the other. Invariants:

    no node is used by two jobs
    a permit starts where no earlier job waits for one of its nodes
    no epoch is given twice, and none has orders after its end
    once faults are over each job completes a phase
"""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.repeated_calls import _OLD_RATIO as OLD_RATIO
from scheduler.rollmux.control.wire import (
    Accepted,
    ControlUnreachable,
    Ended,
    Granted,
    PermitSnapshot,
    Waiting,
    decoded_reply,
)
from scheduler.rollmux.permits.events import (
    Beat,
    ControlResumed,
    EndPermit,
    Enter,
    GrantPermit,
    Leave,
    Register,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig, PhaseTerms
from tests.explore.part import Part
from tests.explore.search import FAULT, Broken, Move

TICK_S, LEASE_S, TIMEOUT_TICKS = 1.0, 4.0, 2
LATE_MAX = 1
CONFIG = PermitsConfig(lease_s=LEASE_S, patience_s=1.0)
ROLLOUT, TRAINING = PhaseKind.ROLLOUT, PhaseKind.TRAINING
R0, R1, T0 = NodeId("r0"), NodeId("r1"), NodeId("t0")
TERMS = (
    JobTerms(
        job=JobId("a"),
        phases=(
            PhaseTerms(kind=ROLLOUT, nodes=(R0, R1), tail_ratio=0.5, tail_accelerators=1),
            PhaseTerms(kind=TRAINING, nodes=(T0,)),
        ),
    ),
    JobTerms(
        job=JobId("b"),
        phases=(
            PhaseTerms(kind=ROLLOUT, nodes=(R1,)),
            PhaseTerms(kind=TRAINING, nodes=(T0,)),
        ),
    ),
)


class PartClock:
    """A part's clock. A call that began at `asked_s` reads that time first."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.asked_s: float | None = None

    def now(self) -> float:
        asked_s, self.asked_s = self.asked_s, None
        return self.now_s if asked_s is None else asked_s


class _Disk:
    """The control's state file: the rows that it was given last."""

    def __init__(self) -> None:
        self.counters = (0, 0)
        self.rows: dict[JobId, JobPermit] = {}

    def keep(self, counters: Any, job_permits: Any, plan: object, now: float) -> None:
        self.counters = counters
        self.rows |= {job: self._row(permit) for job, permit in job_permits.items()}

    def _row(self, permit: JobPermit) -> JobPermit:
        """A control that starts takes every known holder for just heard."""
        last_call_s = None if permit.last_call_s is None else permit.enqueued_s
        return copy.deepcopy(msgspec.structs.replace(permit, last_call_s=last_call_s))

    def snapshot(self) -> dict[str, Any]:
        epoch, ticket = self.counters
        jobs = [msgspec.to_builtins(permit) for permit in self.rows.values()]
        return {"epoch": epoch, "ticket": ticket, "jobs": jobs}


class _Unmeasured:
    def decided(self, *_: object, **__: object) -> None:
        pass

    check = decided


class _Service(PhaseService):
    """The control's own, with this model's disk, and without journal and metrics."""

    def __init__(self, clock: PartClock, disk: _Disk) -> None:
        self.config, self.journal = CONFIG, None
        self._clock: Any = clock
        self.state: Any = disk
        self._metrics: Any = _Unmeasured()
        self._log: Any = _Unmeasured()
        self._policy: Any = PermitPolicy(CONFIG)
        self._ticked_s = clock.now()
        self._loaded_seen_s, self._unsaved = {}, set()
        self.effects: list[Any] = []

    def on_change(self) -> None:  # type: ignore[override]
        pass

    def _observe(self, event: Any) -> Any:
        effects = super()._observe(event)
        self.effects += effects
        return effects


def _encoded(reply: Any) -> bytes:
    """As it goes over the wire."""
    return b"" if reply is None else msgspec.json.encode(reply)


class Control:
    """The phase control and its disk. Answers come with the policy's effects."""

    FORM = ("kept", "held", "ticked_s", "tended_s")

    def __init__(self) -> None:
        self.clock, self.disk = PartClock(), _Disk()
        self.service = _Service(self.clock, self.disk)
        for terms in TERMS:
            self.service.call(Register(terms=terms))
        self.service.effects.clear()

    def pack(self) -> bytes:
        kept = (
            *(self.now, self.service._ticked_s, self.service._policy._tended_s),
            *(self.disk.snapshot(), self.service._policy.snapshot()),
        )
        return msgspec.msgpack.encode(kept)

    @classmethod
    def unpack(cls, packed: bytes) -> "Control":
        now, ticked_s, tended_s, kept, policy = msgspec.msgpack.decode(packed)
        twin = cls.__new__(cls)
        twin.clock, twin.disk = PartClock(now), _Disk()
        twin.disk.counters = (kept["epoch"], kept["ticket"])
        rows = msgspec.convert(kept["jobs"], list[JobPermit])
        twin.disk.rows = {row.job: row for row in rows}
        twin.service = _Service(twin.clock, twin.disk)
        twin.service._policy.restore(policy)
        twin.service._ticked_s, twin.service._policy._tended_s = ticked_s, tended_s
        return twin

    @property
    def kept(self) -> Any:
        return self.disk.counters, list(self.disk.rows.values())

    @property
    def held(self) -> Any:
        """Lines and holders follow from the records of the jobs."""
        policy = self.service._policy
        return policy.counters, list(policy._table.jobs.values())

    @property
    def ticked_s(self) -> float:
        return self.service._ticked_s

    @property
    def tended_s(self) -> float:
        tended_s: float = self.service._policy._tended_s
        return tended_s

    @property
    def now(self) -> float:
        return self.clock.now_s

    def tick(self) -> None:
        self.clock.now_s += TICK_S

    def restart(self) -> Any:
        self.service = _Service(self.clock, self.disk)
        self.service._policy.restore(self.disk.snapshot())
        self.service._observe(ControlResumed())
        return self._heard(None, {})

    def tend(self) -> Any:
        before = self._before()
        self.service.tick()
        return self._heard(None, before)

    def hear(self, message: Any) -> Any:
        before = self._before()
        return self._heard(self.service.call(message), before)

    def look(self, entry: Enter) -> Any:
        """The reply to a call that is held open."""
        return _encoded(self.service.entry_reply(entry))

    def _before(self) -> dict[JobId, tuple[Any, ...]]:
        """Jobs that wait, and whether their place counts, as their own records say."""
        now, found = self.now, {}
        for job in self.service.jobs:
            permit = self.service.policy.permit(job)
            assert permit is not None
            if permit.stage is not PermitStage.WAITING:
                continue
            if permit.last_call_s is None:
                counts = now < permit.enqueued_s + CONFIG.patience_s
            else:
                counts = now < permit.last_call_s + CONFIG.lease_s
            found[job] = (permit.ticket, permit.awaits, counts)
        return found

    def _heard(self, reply: Any, before: dict[JobId, tuple[Any, ...]]) -> Any:
        effects, self.service.effects = tuple(self.service.effects), []
        for effect in effects:
            if isinstance(effect, GrantPermit) and effect.job in before:
                own, after = before[effect.job][0], self._before()
                for job, (ticket, awaits, counts) in before.items():
                    stays = job in after and after[job][0] == ticket
                    if ticket < own and counts and stays and {*awaits} & {*effect.nodes}:
                        raise Broken(f"{effect.job} starts before {job}, which came first")
        return _encoded(reply), tuple(
            effect for effect in effects if isinstance(effect, GrantPermit | EndPermit)
        )


class _Sent(Exception):  # noqa: N818 - carries a call out of the code that makes it
    def __init__(self, message: Any) -> None:
        super().__init__()
        self.message = message


class _Wire:
    """A holder's transport: the first time it takes the call, the second it has the outcome."""

    def __init__(self) -> None:
        self.outcome: Any = None

    def call(self, message: Any) -> Any:
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            raise _Sent(message)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class _Unset:
    """Stands for the event of a holder whose beats this model makes."""

    def set(self) -> None:
        pass


class Job:
    """A job's process, with the real permit in its hands."""

    def __init__(self, terms: JobTerms) -> None:
        self.clock, self.wire = PartClock(), _Wire()
        self.terms, self.name, self.life = terms, terms.job, 0
        self._begin()

    def _begin(self) -> None:
        self.kind = ROLLOUT
        self.permit: Permit | None = None
        self.leaving: Leave | None = None
        self.called_s = 0.0
        self.beat_due = False

    @property
    def now(self) -> float:
        return self.clock.now_s

    def tick(self) -> None:
        self.clock.now_s += TICK_S
        # Seen at once: a job looks often.
        _ = self.lost()

    def restart(self) -> None:
        """From its checkpoint, as another holder."""
        self.life += 1
        self._begin()

    def idle(self) -> bool:
        return self.permit is None and self.leaving is None

    def uses(self) -> frozenset[NodeId]:
        """Nodes that its phase runs on now; a tail leaves the others before it reports so."""
        permit = self.permit
        if permit is None or permit.lost:
            return frozenset()
        narrows = permit.stage is PermitStage.NARROWING and permit._narrowed
        return frozenset((permit.keep or ()) if narrows else permit.nodes)

    def can(self) -> tuple[bool, bool, bool]:
        """Whether it has a permit, may report its tail, and may bring it together."""
        permit = self.permit
        if permit is None or permit.lost:
            return False, False, False
        tails = self.terms.phase(permit.kind).tail_ratio < 1.0 and permit.complete_ratio == 0.0
        return True, tails, permit.keep is not None and not permit._narrowed

    def lost(self) -> bool:
        return self.permit is not None and bool(self.permit.lost)

    def enter(self) -> Enter:
        self.called_s = self.now
        return Enter(job=self.terms.job, kind=self.kind, holder=self._holder, wait_s=1.0)

    def withdraw(self) -> Withdraw:
        self.called_s = self.now
        return Withdraw(job=self.terms.job, holder=self._holder)

    def beat(self) -> Any:
        assert self.permit is not None
        self.called_s = self.now
        try:
            self.permit._beat()
        except _Sent as sent:
            self.clock.asked_s = None
            return sent.message
        raise AssertionError("a beat is a call")

    def progress(self) -> None:
        assert self.permit is not None
        self.permit.progress(0.6)

    def narrow(self) -> None:
        assert self.permit is not None
        self.permit.narrowed()

    def leave(self) -> Leave:
        """Ends its phase, or says again that it has."""
        self.called_s = self.now
        if self.permit is not None:
            failed = self.permit.lost
            self.leaving = Leave(job=self.terms.job, epoch=self.permit.epoch, failed=failed)
            self.permit = None
        assert self.leaving is not None
        return self.leaving

    def answered(self, message: Any, reply: Any) -> bool:
        """Whether a phase is done with it."""
        reply = decoded_reply(reply)
        match message:
            case Enter() if isinstance(reply, Granted):
                # An older answer is asked for again.
                if self.now - self.called_s <= OLD_RATIO * LEASE_S:
                    self._hold(message.kind, reply)
            case Beat():
                self._beaten(message, reply)
            case Leave() if message == self.leaving:
                self.leaving = None
                done = isinstance(reply, Accepted) and not message.failed
                self.kind = self.terms.after(self.kind).kind if done else ROLLOUT
                return done
        return False

    def failed(self, message: Any, absent: bool) -> None:
        match message:
            case Beat():
                self._beaten(message, ControlUnreachable("gone") if absent else Exhausted("silent"))
            case Leave() if message == self.leaving and message.failed:
                # After a lease the control knows by itself.
                self.leaving, self.kind = None, ROLLOUT

    def _hold(self, kind: PhaseKind, granted: Granted) -> None:
        with mock.patch("scheduler.rollmux.control.permit.threading"):
            self.permit = Permit(
                self.wire,
                self.clock,
                job=self.terms.job,
                kind=kind,
                granted=granted,
                asked_s=self.called_s,
            )
        self.permit._wake = self.permit._beating = _Unset()  # type: ignore[assignment]

    def _beaten(self, message: Beat, outcome: Any) -> None:
        if self.permit is None or self.permit.epoch != message.epoch:
            return
        self.wire.outcome, self.clock.asked_s = outcome, self.called_s
        self.permit._beat()
        self.clock.asked_s = None

    @property
    def _holder(self) -> str:
        return f"{self.terms.job}{self.life}"


class Call(NamedTuple):
    job: int
    message: Any
    heard: bool = False
    """Whether the control has it; an entry stays open while it has to wait."""
    reply: Any = None
    age: int = 0
    """In ticks."""


class World(NamedTuple):
    control: int
    up: bool
    """Whether a control is there."""
    jobs: tuple[int, ...]
    calls: tuple[Call, ...] = ()
    late: tuple[Any, ...] = ()
    """Messages whose sender waits for them no more."""
    cut: frozenset[int] = frozenset()
    """Jobs between whom and the control nothing passes."""
    hangs: bool = False
    """The control is there, and does nothing."""
    faults: int = 0
    ended: frozenset[Epoch] = frozenset()
    """Epochs of ended permits that a job may still name."""
    newest: Epoch = Epoch(0)
    done: frozenset[int] | None = None
    """Jobs that have completed a phase on a fair course."""


class PermitModel:
    def __init__(self, *, faults: int = 4) -> None:
        moments = {
            *("enqueued_s", "last_call_s", "tended_s", "ticked_s", "_answered_s"),
            *("_asked_to_narrow_s", "called_s", "_since_s"),
        }
        ignored = {
            *("clock", "_clock", "config", "wire", "_transport", "terms", "_metrics", "journal"),
            *("_wake", "_beating", "narrowing_s", "effects", "_loaded_seen_s"),
            # No phase is bounded and no tail learned: what is known of their lengths moves nothing.
            *(
                "started_s",
                "worked_s",
                "worked_at_s",
                "longest_runs",
                "curves",
                "course",
                "failures",
                "tokens",
            ),
            "_said_ratio",
        }
        kinds = {"moments": moments, "ignored": ignored, "age_max_s": LEASE_S}
        self._controls: Part[Control] = Part(**kinds, pack=Control.pack, unpack=Control.unpack)
        self._jobs: Part[Job] = Part(**kinds)
        self._faults = faults

    def starts(self) -> Iterator[World]:
        """Nobody runs yet; job a runs its rollout while b waits; and both have done theirs, so that
        a has its place for training before b, and has not asked for it."""
        jobs = tuple(self._jobs.add(Job(terms)) for terms in TERMS)
        world = World(self._controls.add(Control()), True, jobs, faults=self._faults)
        yield world
        for job in range(len(TERMS)):
            world = self._hear(self._say(world, job, "enter"), job)
            if job == 0:
                world = self._reply(world, job)
        yield world
        world = self._answered(self._say(world, 0, "leave"), 0)
        world = self._reply(self._held(world, 1), 1)
        yield self._answered(self._say(world, 1, "leave"), 1)

    def moves(self, world: World) -> Iterator[Move[World]]:
        yield Move("a tick passes", partial(self._tick, world))
        if not world.up:
            yield Move("the control starts", partial(self._start, world))
        if world.hangs:
            yield Move("the control goes on", partial(self._go_on, world))
        for job, terms in enumerate(TERMS):
            call = self._call_of(world, job)
            if call is None:
                yield from self._own_moves(world, job, terms.job)
            else:
                yield from self._call_moves(world, call, terms.job)
            _, tails, narrows = self._ask(world, job, "can")
            if job in world.cut:
                back = world._replace(cut=world.cut - {job})
                yield Move(f"{terms.job} is connected again", lambda back=back: back)
            if tails:
                yield Move(f"{terms.job} is in its tail", partial(self._do, world, job, "progress"))
            if narrows:
                yield Move(f"{terms.job} narrows", partial(self._do, world, job, "narrow"))
        if self._works(world):
            for message in world.late:
                words = f"a late {type(message).__name__} of {message.job} arrives"
                yield Move(words, partial(self._hear_late, world, message))
        if world.faults:
            yield from self._faults_of(world._replace(faults=world.faults - 1))

    def _own_moves(self, world: World, job: int, name: str) -> Iterator[Move[World]]:
        """Moves of a job that waits for no answer."""
        holds, _, _ = self._ask(world, job, "can")
        if self._ask(world, job, "idle"):
            yield Move(f"{name} enters", partial(self._say, world, job, "enter"))
            return
        if holds:
            yield Move(f"{name} beats", partial(self._say, world, job, "beat"))
        yield Move(f"{name} leaves", partial(self._say, world, job, "leave"))

    def _call_moves(self, world: World, call: Call, name: str) -> Iterator[Move[World]]:
        what = type(call.message).__name__
        if call.job in world.cut:
            return
        if call.reply is not None:
            yield Move(f"{name} has the reply to its {what}", partial(self._reply, world, call.job))
        elif not world.up:
            yield Move(f"{name} finds no control", partial(self._fail, world, call.job, True))
        elif call.heard and not world.hangs:
            yield Move(f"{name}'s held call is answered", partial(self._held, world, call.job))
        elif not world.hangs:
            yield Move(f"the control hears {what} of {name}", partial(self._hear, world, call.job))

    def _faults_of(self, world: World) -> Iterator[Move[World]]:
        if world.up:
            dead = world._replace(up=False, hangs=False)
            yield Move("the control dies", lambda: dead, FAULT)
        if self._works(world):
            yield Move("the control hangs", lambda: world._replace(hangs=True), FAULT)
        for job, terms in enumerate(TERMS):
            call = self._call_of(world, job)
            go = partial(self._restart, world, job)
            yield Move(f"{terms.job} starts anew", go, FAULT)
            if job not in world.cut:
                off = world._replace(cut=world.cut | {job})
                yield Move(f"{terms.job} is cut off", lambda off=off: off, FAULT)
            if call is None:
                continue
            what = type(call.message).__name__
            if isinstance(call.message, Enter):
                words = f"{terms.job} stops waiting"
                yield Move(words, partial(self._withdraw, world, job), FAULT)
            fresh = not call.heard and call.reply is None and job not in world.cut
            if fresh and self._works(world) and len(world.late) < LATE_MAX:
                twice = world._replace(late=(*world.late, call.message))
                words = f"the control hears {what} of {terms.job}, which comes again"
                yield Move(words, partial(self._hear, twice, job), FAULT)

    def check(self, world: World) -> None:
        used: dict[NodeId, str] = {}
        for job, terms in enumerate(TERMS):
            for node in sorted(self._ask(world, job, "uses")):
                if node in used:
                    raise Broken(f"{node} is used by {used[node]} and {terms.job}")
                used[node] = terms.job

    def mended(self, world: World) -> World:
        for call in world.calls:
            world = self._fail(world, call.job, False)
        world = world._replace(late=(), cut=frozenset(), faults=0, done=frozenset())
        if world.hangs:
            return self._go_on(world)
        return world if world.up else self._start(world)

    def onward(self, world: World) -> World | None:
        """One fair tick: each job asks, reports, and leaves once it has reported its tail."""
        if world.done == {0, 1}:
            return None
        for job in range(len(TERMS)):
            if self._ask(world, job, "lost"):
                world = self._answered(self._say(world, job, "leave"), job)
            if self._ask(world, job, "idle"):
                world = self._answered(self._say(world, job, "enter"), job)
            holds, tails, narrows = self._ask(world, job, "can")
            if holds:
                world = self._do(world, job, "progress") if tails else world
                world = self._do(world, job, "narrow") if narrows else world
                world = self._answered(self._say(world, job, "beat"), job)
            if not tails and not self._ask(world, job, "idle"):
                world = self._answered(self._say(world, job, "leave"), job)
        return self._tick(world)

    # Jobs.

    def _ask(self, world: World, job: int, method: str) -> Any:
        return self._jobs.ask(world.jobs[job], method)

    def _do(self, world: World, job: int, method: str, *arguments: Any) -> World:
        return self._done(world, job, method, *arguments)[0]

    def _done(self, world: World, job: int, method: str, *arguments: Any) -> tuple[World, Any]:
        number, answer = self._jobs.call(world.jobs[job], method, *arguments)
        jobs = (*world.jobs[:job], number, *world.jobs[job + 1 :])
        return world._replace(jobs=jobs), answer

    def _say(self, world: World, job: int, method: str) -> World:
        world, message = self._done(world, job, method)
        calls = (*world.calls, Call(job, message))
        return world._replace(calls=tuple(sorted(calls, key=lambda each: each.job)))

    def _call_of(self, world: World, job: int) -> Call | None:
        return next((call for call in world.calls if call.job == job), None)

    def _with(self, world: World, call: Call, after: Call | None) -> World:
        kept = (after if each is call else each for each in world.calls)
        return world._replace(calls=tuple(each for each in kept if each is not None))

    def _restart(self, world: World, job: int) -> World:
        call = self._call_of(world, job)
        if call is not None:
            world = self._with(world, call, None)
        return self._do(world, job, "restart")

    def _withdraw(self, world: World, job: int) -> World:
        call = self._call_of(world, job)
        assert call is not None
        return self._say(self._with(world, call, None), job, "withdraw")

    def _fail(self, world: World, job: int, absent: bool) -> World:
        call = self._call_of(world, job)
        assert call is not None
        return self._do(self._with(world, call, None), job, "failed", call.message, absent)

    def _reply(self, world: World, job: int) -> World:
        call = self._call_of(world, job)
        assert call is not None
        world = self._with(world, call, None)
        world, done = self._done(world, job, "answered", call.message, call.reply)
        if done and world.done is not None:
            world = world._replace(done=world.done | {job})
        return world

    def _answered(self, world: World, job: int) -> World:
        """A call on a fair course: heard and answered at once."""
        world = self._hear(world, job)
        call = self._call_of(world, job)
        return (
            self._fail(world, job, False)
            if call and call.reply is None
            else self._reply(world, job)
        )

    # Time and the control.

    def _tick(self, world: World) -> World:
        """Calls that are too old fail with its end, and a holder that waits for none beats."""
        world = world._replace(
            control=self._controls.call(world.control, "tick")[0],
            jobs=tuple(self._jobs.call(job, "tick")[0] for job in world.jobs),
        )
        for call in world.calls:
            if call.age + 1 < TIMEOUT_TICKS:
                world = self._with(world, call, call._replace(age=call.age + 1))
                continue
            if not call.heard and call.reply is None:
                world = world._replace(late=(*world.late, call.message)[:LATE_MAX])
            world = self._fail(world, call.job, False)
        world = self._beating(world)
        return self._told_by(world, "tend") if self._works(world) else world

    def _beating(self, world: World) -> World:
        for job in range(len(TERMS)):
            if self._call_of(world, job) is None and self._ask(world, job, "can")[0]:
                world = self._say(world, job, "beat")
        return world

    def _works(self, world: World) -> bool:
        return world.up and not world.hangs

    def _go_on(self, world: World) -> World:
        return self._told_by(world._replace(hangs=False), "tend")

    def _start(self, world: World) -> World:
        return self._told_by(world._replace(up=True), "restart")

    def _told_by(self, world: World, method: str, *arguments: Any) -> World:
        return self._told(world, method, *arguments)[0]

    def _told(self, world: World, method: str, *arguments: Any) -> tuple[World, Any]:
        number, (reply, effects) = self._controls.call(world.control, method, *arguments)
        world = world._replace(control=number)
        for effect in effects:
            if isinstance(effect, EndPermit):
                world = world._replace(ended=world.ended | {effect.epoch})
            elif effect.epoch <= world.newest:
                raise Broken(f"epoch {effect.epoch} is given again")
            else:
                world = world._replace(newest=effect.epoch)
        return world, reply

    def _hear(self, world: World, job: int) -> World:
        call = self._call_of(world, job)
        assert call is not None
        world, reply = self._told(world, "hear", call.message)
        self._check_orders(world, call.message, reply)
        held = isinstance(decoded_reply(reply), Waiting)
        after = call._replace(heard=held, reply=None if held else reply)
        return self._with(world, call, after)

    def _held(self, world: World, job: int) -> World:
        call = self._call_of(world, job)
        assert call is not None
        reply = self._controls.ask(world.control, "look", call.message)
        return self._with(world, call, call._replace(reply=reply))

    def _hear_late(self, world: World, message: Any) -> World:
        late = tuple(each for each in world.late if each is not message)
        world, reply = self._told(world._replace(late=late), "hear", message)
        self._check_orders(world, message, reply)
        return world

    def _check_orders(self, world: World, message: Any, encoded: bytes) -> None:
        reply = decoded_reply(encoded)
        if (
            isinstance(message, Beat)
            and isinstance(reply, PermitSnapshot)
            and message.epoch in world.ended
        ):
            raise Broken(f"epoch {message.epoch} has orders after its end")
        if isinstance(reply, Granted) and reply.epoch in world.ended:
            raise Broken(f"epoch {reply.epoch} is granted after its end")
        assert not isinstance(reply, Ended) or isinstance(message, Beat | Leave)
