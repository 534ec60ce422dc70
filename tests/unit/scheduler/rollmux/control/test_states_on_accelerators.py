"""No two processes' states on one accelerator: random jobs, processes, tails, kills and restarts.

The jobs behave as `PhaseClient` and `LoadedStates` do; what lies on which accelerator is kept here,
by what each process knows.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.wire import Accepted, Ended, Granted, PermitSnapshot
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Leave,
    Recall,
    Register,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig, PhaseTerms
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, TRAINING
from tests.virtual_clock import VirtualClock

CONFIG = PermitsConfig(lease_s=10.0, warn_s=2.0, grace_s=2.0)
ACCELERATORS = 4
ASKS_S = 2.0
"""A process is never silent for longer."""
WHOLE = (PermitStage.RUNNING, PermitStage.NARROWING)
Held = frozenset[tuple[NodeId, int]]


@dataclass
class Running:
    kind: PhaseKind
    epoch: Epoch
    state: PermitSnapshot
    on: Held
    lost: bool = False
    narrowed: bool = False


@dataclass
class Process:
    job: JobId
    holder: str
    running: Running | None = None
    loaded: dict[PhaseKind, Held] = field(default_factory=dict)
    called_s: float = 0.0

    @property
    def on(self) -> Held:
        running = frozenset[tuple[NodeId, int]]() if self.running is None else self.running.on
        return running.union(*self.loaded.values())


def _held(nodes: tuple[NodeId, ...], parts: dict[NodeId, tuple[int, ...]]) -> Held:
    return frozenset((node, at) for node in nodes for at in parts.get(node, range(ACCELERATORS)))


def _nodes(held: Held) -> set[NodeId]:
    return {node for node, _ in held}


class World:
    def __init__(self, chance: Random, state: Path) -> None:
        self.chance, self.state, self.clock = chance, state, VirtualClock()
        self.count = 0
        self.processes: list[Process] = []
        self.restart()
        for name in "abc":
            self.register(JobId(name))
            self.begin(JobId(name))

    def restart(self) -> None:
        self.service = PhaseService(ControlSettings(permits=CONFIG, state=self.state), self.clock)

    def begin(self, job: JobId) -> None:
        self.count += 1
        self.processes.append(Process(job, f"{job}.{self.count}"))

    def register(self, job: JobId) -> None:
        chance = self.chance
        rollout = chance.sample(("n0", "n1", "n2"), chance.choice((1, 1, 2)))
        phases = (
            PhaseTerms(
                kind=ROLLOUT,
                nodes=tuple(map(NodeId, rollout)),
                accelerators=ACCELERATORS,
                least_accelerators=chance.choice((0, 1)),
                tail_ratio=0.5,
                tail_accelerators=chance.choice((0, 1, 2)),
                max_s=chance.choice((None, 6.0)),
            ),
            PhaseTerms(
                kind=TRAINING,
                nodes=(NodeId(chance.choice(("n2", "n3"))),),
                accelerators=ACCELERATORS,
                max_s=chance.choice((None, 6.0)),
            ),
        )
        self.service.call(Register(terms=JobTerms(job=job, phases=phases)))

    def step(self) -> None:
        process = self.chance.choice(self.processes)
        match self.chance.choice("eeeeeebbblllaakprRwtttt"):
            case "e" if process.running is None:
                self.enter(process)
            case "b":
                self.beat(process)
            case "l":
                self.leave(process, failed="broke" if self.chance.random() < 0.2 else "")
            case "a":
                self.ask(process)
            case "k":
                self.processes.remove(process)
                self.begin(process.job)
            case "p" if len(self.processes) < 6:
                self.begin(process.job)
            case "r":
                self.register(process.job)
            case "R":
                self.service.close()
                self.restart()
            case "w" if process.running is None:
                self.release(process, _nodes(process.on))
                self.service.call(Withdraw(job=process.job, holder=process.holder))
            case "t":
                self.pass_time()
        self.check()

    def check(self) -> None:
        whose: dict[tuple[NodeId, int], str] = {}
        for process in self.processes:
            for at in process.on:
                assert whose.setdefault(at, process.holder) == process.holder, at

    def pass_time(self) -> None:
        self.clock.now_s += self.chance.choice((0.1, 0.3, 1.0, ASKS_S))
        self.service.tick()
        for process in self.processes:
            self.beat(process)
            running = process.running
            if running is not None and (running.lost or running.state.ends_in_s is not None):
                self.leave(process, failed="must end")
            self.ask(process)

    def enter(self, process: Process) -> None:
        kind = self.chance.choice((ROLLOUT, TRAINING))
        reply = self.service.call(Enter(job=process.job, kind=kind, holder=process.holder))
        if not isinstance(reply, Granted):
            return
        state = PermitSnapshot(
            stage=PermitStage.RUNNING, nodes=reply.nodes, accelerators=reply.accelerators
        )
        for other, held in list(process.loaded.items()):
            both = _nodes(held) & {*reply.nodes}
            if other is kind or both:
                del process.loaded[other]
                self.report(process, _nodes(held) - {*reply.nodes})
        on = _held(reply.nodes, reply.accelerators)
        process.running = Running(kind, reply.epoch, state, on)

    def beat(self, process: Process) -> None:
        running = process.running
        if running is None or running.lost:
            return
        state, recall = running.state, None
        if state.stage is PermitStage.NARROWING and self.chance.random() < 0.6:
            running.on, running.narrowed = _held(state.keep, state.keep_accelerators), True
        if state.stage is PermitStage.TAILING and self.chance.random() < 0.3:
            recall, running.narrowed = self.chance.choice(list(Recall)), False
        reply = self.service.call(
            Beat(
                job=process.job,
                epoch=running.epoch,
                complete_ratio=self.chance.choice((0.3, 0.9)),
                narrowed=running.narrowed,
                recall=recall,
            )
        )
        if not isinstance(reply, PermitSnapshot):
            running.lost = True
            return
        running.state = reply
        if reply.stage in (PermitStage.RUNNING, PermitStage.TAILING):
            running.on = _held(reply.nodes, reply.accelerators)

    def leave(self, process: Process, *, failed: str) -> None:
        running, process.running = process.running, None
        if running is None:
            return
        whole = running.state.stage in WHOLE and not running.lost and not running.narrowed
        stays = whole and not failed and self.chance.random() < 0.7
        if stays:
            process.loaded[running.kind] = running.on
        reply = self.service.call(
            Leave(job=process.job, epoch=running.epoch, failed=failed, stays_loaded=stays)
        )
        if isinstance(reply, Ended):
            self.release(process, {*running.state.nodes} | _nodes(process.on))
        elif isinstance(reply, Accepted) and reply.unload:
            self.release(process, {*reply.unload})

    def ask(self, process: Process) -> None:
        if not process.loaded:
            return
        reply = self.service.call(Unloaded(job=process.job, holder=process.holder))
        if isinstance(reply, Ended):
            self.release(process, _nodes(process.on))
        elif isinstance(reply, Accepted) and self.chance.random() < 0.7:
            self.release(process, {*reply.unload})

    def release(self, process: Process, nodes: set[NodeId]) -> None:
        gone = set(nodes)
        for kind, held in list(process.loaded.items()):
            if _nodes(held) & nodes:
                gone |= _nodes(process.loaded.pop(kind))
        busy = set() if process.running is None else {*process.running.state.nodes}
        self.report(process, gone - busy)

    def report(self, process: Process, nodes: set[NodeId]) -> None:
        if nodes:
            gone = tuple(sorted(nodes))
            self.service.call(Unloaded(job=process.job, holder=process.holder, nodes=gone))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(50, 400))
def test_no_two_processes_have_their_states_on_one_accelerator(chance: Random, steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(chance, Path(directory) / "state.sqlite")
        for _ in range(steps):
            world.step()
        world.service.close()
