"""The cluster in virtual time: a production planner above, the groups' machines below.

The shell that production has too, with drawn durations instead of engines: it tells the planner
what arrived and ended, and does what it asks. Groups run on their own between two rounds. A node
costs from when the first job is put on it to when the planner gives it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    PhaseEnded,
    PlaceJob,
    ReleaseNode,
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
from scheduler.policy.model import Node, PhaseKind, Placement
from scheduler.sim.rollmux.floor import Floor, new_row
from scheduler.sim.rollmux.ledger import Ledger
from scheduler.sim.rollmux.workload import COLD_START_S, MOVE_S, SimulatedJob

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
FloorOf = Callable[[GroupId, Rules, Records, float], Floor]
"""A new group's machines, by the rules, everybody's durations and the time."""


def _own_nodes(_: GroupId, rules: Rules, lengths_s: Records, now_s: float) -> Floor:
    return Floor(rules, lengths_s, now_s=now_s)


class Planner(Protocol):
    facts: dict[JobId, JobFacts]

    def observe(self, event: GroupEvent, *, now: float) -> tuple[GroupEffect, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    dollars: float
    ended_s: dict[JobId, float]
    ledger: Ledger
    moves: int
    events: int
    end_s: float


class Cluster:
    def __init__(
        self,
        jobs: list[SimulatedJob],
        planner: Planner,
        rules: Rules,
        *,
        record: bool = False,
        floor_of: FloorOf = _own_nodes,
    ) -> None:
        self._jobs = jobs
        self._floor_of = floor_of
        self._number = {one.job.job: number for number, one in enumerate(jobs)}
        self._lengths_s = np.concatenate([one.lengths_s for one in jobs])
        counts = [one.iterations for one in jobs]
        self._offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
        self._planner = planner
        self._rules = rules
        self.ledger = Ledger(record=record)
        self._floors: dict[GroupId, Floor] = {}
        self._home: dict[int, GroupId] = {}
        self._nodes: dict[NodeId, tuple[Node, GroupId]] = {}
        self._target: dict[int, tuple[GroupId, Placement]] = {}
        self._outside: dict[int, Records] = {}
        """Movers that have left their old nodes and wait for room on their new ones."""
        self._at: dict[int, Placement] = {}
        self._held_bytes: dict[NodeId, int] = {}
        self._moves = 0
        self._events = 0

    def run(self) -> RunResult:
        now, arrived = 0.0, 0
        while arrived < len(self._jobs) or self._home:
            if not self._home:
                now = max(now, self._jobs[arrived].arrival_s)
            due_s = now + ROUND_S
            if arrived < len(self._jobs):
                due_s = min(due_s, max(now, self._jobs[arrived].arrival_s))
            self._advance(due_s)
            now = due_s
            while arrived < len(self._jobs) and self._jobs[arrived].arrival_s <= now:
                self._arrive(self._jobs[arrived], now=now)
                arrived += 1
            self._apply(self._planner.observe(ReviewDue(), now=now), now=now)
        return RunResult(
            dollars=self.ledger.dollars,
            ended_s=self.ledger.ended_s,
            ledger=self.ledger,
            moves=self._moves,
            events=self._events,
            end_s=now,
        )

    def _arrive(self, one: SimulatedJob, *, now: float) -> None:
        self.ledger.write(now, "arrival", job=one.job.job)
        self._apply(self._planner.observe(JobArrived(job=one.job), now=now), now=now)

    def _apply(self, effects: tuple[GroupEffect, ...], *, now: float) -> None:
        for effect in effects:
            match effect:
                case AddNode(node=node, group=group):
                    self._nodes[node.node] = (node, group)
                case ReleaseNode(node=name):
                    self._release(name, now=now)
                case PlaceJob(group=group, placement=placement, reason=reason):
                    self._note("placement", placement, reason, now=now)
                    self._begin(placement, group, now=now)
                case MoveJob(group=group, placement=placement, reason=reason):
                    self._note("move", placement, reason, now=now)
                    number = self._number[placement.job]
                    self._target[number] = (group, placement)
                    if number not in self._outside:
                        self._floors[self._home[number]].ask_to_leave(number)
                    self._moves += 1
        self._move_parked(now=now)

    def _note(self, kind: str, placement: Placement, reason: str, *, now: float) -> None:
        nodes = [*placement.rollout_nodes, *placement.training_nodes]
        self.ledger.write(now, kind, job=placement.job, nodes=nodes, reason=reason)

    def _begin(self, placement: Placement, group: GroupId, *, now: float) -> None:
        number = self._number[placement.job]
        one, facts = self._jobs[number], self._planner.facts[placement.job]
        row = new_row(
            number,
            offset=int(self._offsets[number]),
            iterations=one.iterations,
            slo=one.job.slowdown_slo,
            began_s=one.arrival_s,
            solo_s=COLD_START_S,
            bulk_ratio=facts.tail.bulk_ratio,
            tail_share=facts.tail.share,
        )
        self._enter(row, placement, group, loading_s=COLD_START_S, now=now)
        self.ledger.iteration_ends_s[placement.job] = []

    def _enter(
        self, row: Records, placement: Placement, group: GroupId, *, loading_s: float, now: float
    ) -> None:
        floor = self._floors.get(group)
        if floor is None:
            floor = self._floor_of(group, self._rules, self._lengths_s, now)
            self._floors[group] = floor
        for name in (*placement.rollout_nodes, *placement.training_nodes):
            node = self._nodes[name][0]
            self.ledger.node_up(name, node.pool, node.price_per_hour, t_s=now)
            size = self._jobs[int(row["id"][0])].job.host_bytes_per_node
            self._held_bytes[name] = self._held_bytes.get(name, 0) + size
        floor.enter(row, placement, loading_s=loading_s)
        self._at[int(row["id"][0])] = placement
        self.ledger.write(
            now,
            "loading",
            job=placement.job,
            nodes=[*placement.rollout_nodes, *placement.training_nodes],
        )
        self._home[int(row["id"][0])] = group
        self._believe(floor, {int(row["id"][0])})

    def _move_parked(self, *, now: float) -> None:
        """Takes out who is at an iteration's end, and lets in who finds room."""
        for number in sorted(self._target):
            floor = self._floors[self._home[number]] if number not in self._outside else None
            if floor is None or floor.jobs["stage"][floor.row(number)] != PARKED:
                continue
            self._outside[number] = floor.leave(number)
            self._vacate(number)
            job = self._jobs[number].job.job
            self.ledger.write(now, "left", job=job)
            for effect in self._planner.observe(JobMoved(job=job), now=now):
                if isinstance(effect, ReleaseNode):
                    self._release(effect.node, now=now)
        for number in list(self._outside):
            group, placement = self._target[number]
            if self._has_room(number, placement):
                del self._target[number]
                row = self._outside.pop(number)
                self._enter(row, placement, group, loading_s=MOVE_S, now=now)

    def _has_room(self, number: int, placement: Placement) -> bool:
        size = self._jobs[number].job.host_bytes_per_node
        return all(
            self._held_bytes.get(node, 0) + size <= self._nodes[node][0].host_bytes
            for node in (*placement.rollout_nodes, *placement.training_nodes)
        )

    def _vacate(self, number: int) -> None:
        placement = self._at.pop(number)
        for node in (*placement.rollout_nodes, *placement.training_nodes):
            self._held_bytes[node] -= self._jobs[number].job.host_bytes_per_node

    def _release(self, name: NodeId, *, now: float) -> None:
        self.ledger.node_down(name, t_s=now)
        _, group = self._nodes.pop(name)
        if (floor := self._floors.get(group)) is not None:
            floor.drop_node(name)
            if not floor.jobs.size and not any(floor.names):
                self._events += floor.events
                del self._floors[group]

    def _advance(self, until_s: float) -> None:
        done: list[tuple[float, int]] = []
        for floor in list(self._floors.values()):
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
                    name, phase = _PHASES[kind]
                    job = self._jobs[number].job.job
                    for node in floor.named(mask):
                        pool = self._nodes[node][0].pool
                        self.ledger.write(t_s, name, job=job, node=node, pool=pool, phase=phase)
            self._believe(floor, changed)
        for t_s, number in sorted(done):
            self._end(number, t_s)
        self._move_parked(now=until_s)

    def _learn(self, number: int, kind: int, t_s: float, solo_s: float) -> None:
        job = self._jobs[number].job.job
        phase = PhaseKind.ROLLOUT if kind == ROLLOUT_ENDED else PhaseKind.TRAINING
        if kind == TRAINING_ENDED:
            self.ledger.iteration_ends_s[job].append(t_s)
        self._planner.observe(PhaseEnded(job=job, phase=phase, solo_s=solo_s), now=t_s)

    def _believe(self, floor: Floor, numbers: set[int]) -> None:
        """Brings what the orders expect up to what the planner has learned."""
        for at, number in enumerate(floor.jobs["id"].tolist()):
            if number in numbers:
                belief = self._planner.facts[self._jobs[number].job.job].belief()
                floor.jobs["rollout_mean_s"][at] = belief.rollout_s
                floor.jobs["training_mean_s"][at] = belief.training_s

    def _end(self, number: int, t_s: float) -> None:
        job = self._jobs[number].job.job
        self._target.pop(number, None)
        self._floors[self._home.pop(number)].leave(number)
        self._vacate(number)
        self.ledger.ended_s[job] = t_s
        self.ledger.write(t_s, "job_done", job=job)
        for effect in self._planner.observe(JobEnded(job=job), now=t_s):
            if isinstance(effect, ReleaseNode):
                self._release(effect.node, now=t_s)
