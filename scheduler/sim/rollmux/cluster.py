"""The cluster in virtual time: a production planner above, the groups' machines below.

The shell that production has too, with drawn durations instead of engines: it tells the planner
what arrived, ended and failed, and does what it asks. Groups run on their own between two rounds.
"""

from heapq import heappop, heappush
from typing import Final, Protocol

import numpy as np

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.policy.groups.compiled import Records
from scheduler.policy.groups.events import (
    AddNode,
    GroupEffect,
    GroupEvent,
    JobArrived,
    JobEnded,
    JobMoved,
    MoveJob,
    NodeFailed,
    PhaseEnded,
    PlaceJob,
    ReleaseNode,
    RestartJob,
    ReviewDue,
)
from scheduler.policy.groups.facts import JobFacts
from scheduler.policy.groups.stages import (
    JOB_DONE,
    PARKED,
    ROLLOUT_ENDED,
    ROLLOUT_STARTED,
    TAIL_MIGRATED,
    TAIL_RETURNED,
    TAIL_SENT,
    TRAINING_ENDED,
    TRAINING_STARTED,
    Rules,
)
from scheduler.policy.groups.tail import best_shape
from scheduler.policy.model import PhaseKind, Placement, Pool
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.floor import Floor, new_row
from scheduler.sim.rollmux.ledger import Counts, Ledger, RunResult
from scheduler.sim.rollmux.site import FloorOf, Site, nodes_of, own_nodes
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob
from scheduler.sim.rollmux.world import PAPER_WORLD, World

ROUND_S: Final = 60.0
_PHASES: Final = {
    ROLLOUT_STARTED: ("phase_start", PhaseKind.ROLLOUT),
    ROLLOUT_ENDED: ("phase_end", PhaseKind.ROLLOUT),
    TRAINING_STARTED: ("phase_start", PhaseKind.TRAINING),
    TRAINING_ENDED: ("phase_end", PhaseKind.TRAINING),
    TAIL_MIGRATED: ("tail_moved", PhaseKind.ROLLOUT),
    TAIL_SENT: ("tail_leased", PhaseKind.ROLLOUT),
    TAIL_RETURNED: ("tail_returned", PhaseKind.ROLLOUT),
}


class Planner(Protocol):
    facts: dict[JobId, JobFacts]

    def observe(self, event: GroupEvent, *, now: float) -> tuple[GroupEffect, ...]: ...


class Cluster:
    def __init__(
        self,
        jobs: list[SimulatedJob],
        planner: Planner,
        rules: Rules,
        *,
        world: World = PAPER_WORLD,
        disruptions: Disruptions = UNDISTURBED,
        ledger: Ledger | None = None,
        floor_of: FloorOf = own_nodes,
    ) -> None:
        if world.sync_s:
            raise ValueError("weight sync is not simulated here")
        rules = rules._replace(warm_s=world.warm_start_s, migrate_s=world.migrate_s)
        self._world = world
        self._jobs = jobs
        self._number = {one.job.job: number for number, one in enumerate(jobs)}
        counts = [one.iterations for one in jobs]
        self._offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
        self._planner = planner
        self._disruptions = disruptions
        self.ledger = ledger or Ledger()
        self._site = Site(jobs, rules, self.ledger, floor_of)
        self._target: dict[int, tuple[GroupId, Placement]] = {}
        self._outside: dict[int, Records] = {}
        """Who has left its old nodes and waits for room on its new ones."""
        self._failing: list[tuple[float, NodeId]] = []
        self._leaving: list[tuple[float, int]] = []
        self._counts = Counts()

    def run(self) -> RunResult:
        now, arrived = 0.0, 0
        while arrived < len(self._jobs) or self._site.home:
            if not self._site.home:
                now = max(now, self._jobs[arrived].arrival_s)
            due_s = now + ROUND_S
            if arrived < len(self._jobs):
                due_s = min(due_s, max(now, self._jobs[arrived].arrival_s))
            for waiting in (self._failing, self._leaving):
                due_s = min(due_s, max(now, waiting[0][0])) if waiting else due_s
            self._advance(due_s)
            now = due_s
            self._disturb(now=now)
            while arrived < len(self._jobs) and self._jobs[arrived].arrival_s <= now:
                self._arrive(self._jobs[arrived], now=now)
                arrived += 1
            self._apply(self._planner.observe(ReviewDue(), now=now), now=now)
        self._counts.events = self._site.past_events
        return RunResult(ledger=self.ledger, counts=self._counts, end_s=now)

    def _arrive(self, one: SimulatedJob, *, now: float) -> None:
        self.ledger.write(
            now,
            "arrival",
            job=one.job.job,
            slo=one.job.slowdown_slo,
            host_bytes=one.job.host_bytes_per_node,
            iterations=one.iterations,
            cold_start_s=self._world.cold_start_s,
        )
        leaves_s = self._disruptions.leaves_at_s(one, self._world)
        if leaves_s < float("inf"):
            heappush(self._leaving, (leaves_s, self._number[one.job.job]))
        self._apply(self._planner.observe(JobArrived(job=one.job), now=now), now=now)

    def _disturb(self, *, now: float) -> None:
        """Nodes that fail and jobs that are given up now."""
        while self._failing and self._failing[0][0] <= now:
            _, node = heappop(self._failing)
            if node in self._site.nodes:
                self._counts.failures += 1
                self.ledger.write(now, "node_failed", node=node)
                self._apply(self._planner.observe(NodeFailed(node=node), now=now), now=now)
        while self._leaving and self._leaving[0][0] <= now:
            _, number = heappop(self._leaving)
            if number in self._site.home:
                if self._outside.pop(number, None) is None:
                    self._site.stop(number, now=now)
                self._counts.given_up += 1
                self._end(number, "job_given_up", t_s=now)

    def _apply(self, effects: tuple[GroupEffect, ...], *, now: float) -> None:
        for effect in effects:
            match effect:
                case AddNode(node=node, group=group):
                    self._site.nodes[node.node] = (node, group)
                case ReleaseNode(node=name):
                    self._site.release(name, now=now)
                case PlaceJob(group=group, placement=placement, reason=reason):
                    self._note("placement", placement, reason, now=now)
                    self._begin(placement, group, now=now)
                case MoveJob(group=group, placement=placement, reason=reason):
                    self._note("move", placement, reason, now=now)
                    number = self._number[placement.job]
                    self._counts.moves += 1
                    self._target[number] = (group, placement)
                    if number not in self._outside:
                        self._floor(number).ask_to_leave(number)
                case RestartJob(group=group, placement=placement, reason=reason):
                    self._note("restart", placement, reason, now=now)
                    self._restart(placement, group, now=now)
        self._move_parked(now=now)

    def _note(self, kind: str, placement: Placement, reason: str, *, now: float) -> None:
        self.ledger.write(
            now, kind, job=placement.job, nodes=list(nodes_of(placement)), reason=reason
        )

    def _begin(self, placement: Placement, group: GroupId, *, now: float) -> None:
        number = self._number[placement.job]
        one = self._jobs[number]
        tail = best_shape(one.curve, accelerators=NODE_TYPES[Pool.ROLLOUT].accelerators)
        row = new_row(
            number,
            offset=int(self._offsets[number]),
            iterations=one.iterations,
            slo=one.job.slowdown_slo,
            began_s=one.arrival_s,
            solo_s=self._world.cold_start_s,
            bulk_ratio=tail.bulk_ratio,
            tail_share=tail.share,
        )
        self._enter(row, placement, group, loading_s=self._world.cold_start_s, now=now)
        self.ledger.iteration_ends_s[placement.job] = []

    def _restart(self, placement: Placement, group: GroupId, *, now: float) -> None:
        number = self._number[placement.job]
        self._counts.restarts += 1
        self._target[number] = (group, placement)
        if number not in self._outside:
            keeps = nodes_of(placement)
            self._outside[number] = self._site.stop(number, keeps=keeps, now=now)

    def _enter(
        self, row: Records, placement: Placement, group: GroupId, *, loading_s: float, now: float
    ) -> None:
        for node in self._site.enter(row, placement, group, loading_s=loading_s, now=now):
            fails_s = self._disruptions.fails_at_s(node, up_s=now)
            if fails_s < float("inf"):
                heappush(self._failing, (fails_s, node))
        self._believe(self._site.floors[group], {self._number[placement.job]})

    def _move_parked(self, *, now: float) -> None:
        """Takes out who is at an iteration's end, and lets in who finds room."""
        for number in sorted(self._target):
            floor = self._floor(number) if number not in self._outside else None
            if floor is None or floor.jobs["stage"][floor.row(number)] != PARKED:
                continue
            self._outside[number] = self._site.leave(number)
            job = self._jobs[number].job.job
            self.ledger.write(now, "left", job=job)
            self._give_back(self._planner.observe(JobMoved(job=job), now=now), now=now)
        for number in list(self._outside):
            group, placement = self._target[number]
            if self._site.has_room(number, placement):
                del self._target[number]
                row = self._outside.pop(number)
                self._enter(row, placement, group, loading_s=self._world.move_s, now=now)

    def _floor(self, number: int) -> Floor:
        return self._site.floors[self._site.home[number]]

    def _give_back(self, effects: tuple[GroupEffect, ...], *, now: float) -> None:
        for effect in effects:
            if isinstance(effect, ReleaseNode):
                self._site.release(effect.node, now=now)

    def _advance(self, until_s: float) -> None:
        done: list[tuple[float, int]] = []
        for floor in list(self._site.floors.values()):
            log = floor.advance(until_s)
            if not log.size:
                continue
            changed: set[int] = set()
            for t_s, kind, number, mask, solo_s in log.tolist():
                if kind in (ROLLOUT_ENDED, TRAINING_ENDED):
                    self._learn(number, kind, t_s, solo_s)
                    changed.add(number)
                elif kind == JOB_DONE:
                    done.append((t_s, number))
                if self.ledger.record and kind in _PHASES:
                    self._record(floor, t_s, kind, number, mask, solo_s)
            self._believe(floor, changed)
        for t_s, number in sorted(done):
            self._site.leave(number)
            self.ledger.ended_s[self._jobs[number].job.job] = t_s
            self._end(number, "job_done", t_s=t_s)
        self._move_parked(now=until_s)

    def _record(
        self, floor: Floor, t_s: float, kind: int, number: int, mask: int, solo_s: float
    ) -> None:
        name, phase = _PHASES[kind]
        alone = {"solo_s": solo_s} if kind in (ROLLOUT_ENDED, TRAINING_ENDED) else {}
        job = self._jobs[number].job.job
        for node in floor.named(mask):
            pool = self._site.nodes[node][0].pool
            self.ledger.write(t_s, name, job=job, node=node, pool=pool, phase=phase, **alone)

    def _learn(self, number: int, kind: int, t_s: float, solo_s: float) -> None:
        job = self._jobs[number].job.job
        phase = PhaseKind.ROLLOUT if kind == ROLLOUT_ENDED else PhaseKind.TRAINING
        if kind == TRAINING_ENDED:
            self.ledger.iteration_ends_s[job].append(t_s)
        self._planner.observe(PhaseEnded(job=job, phase=phase, solo_s=solo_s), now=t_s)

    def _believe(self, floor: Floor, numbers: set[int]) -> None:
        """Brings what loading ahead expects up to what the planner has learned."""
        for at, number in enumerate(floor.jobs["id"].tolist()):
            if number in numbers:
                belief = self._planner.facts[self._jobs[number].job.job].belief()
                floor.jobs["rollout_mean_s"][at] = belief.rollout_s
                floor.jobs["training_mean_s"][at] = belief.training_s

    def _end(self, number: int, kind: str, *, t_s: float) -> None:
        job = self._jobs[number].job.job
        self._target.pop(number, None)
        self._site.forget(number)
        self.ledger.write(t_s, kind, job=job)
        self._give_back(self._planner.observe(JobEnded(job=job), now=t_s), now=t_s)
