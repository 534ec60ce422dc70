"""The shipped runtime in virtual time, its groups' rollouts on leased slots beside their nodes.

The runtime knows nothing of leases, so it places, moves and starts phases as without. A job's own
policy chooses its tail's engines; the shell here runs it after every change it could observe.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from benchmarks.rollmux.lease_supply import HeadroomRecord, LeaseSupply, allotted
from benchmarks.rollmux.leased_worker import LeasedWorker
from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.runtime import PhaseRuntime
from scheduler.rollmux.cluster.runtime_events import RuntimeEffect, RuntimeEvent
from scheduler.rollmux.permits.events import (
    Beat,
    EndPermit,
    FreeNodes,
    GrantPermit,
    WidenPermit,
)
from scheduler.rollmux.permits.job_permit import JobPermit, PermitStage
from scheduler.rollmux.permits.leased_tail import (
    GONE_S,
    RECALL_S,
    RecallTail,
    ReportNarrowed,
    TailSample,
    TailState,
)
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.driver import Driver
from scheduler.sim.rollmux.ledger import Ledger, RunResult
from scheduler.sim.rollmux.worker import Worker, WorkerStage
from scheduler.sim.rollmux.workload import SimulatedJob

TAIL_POLL_S: Final = 0.1
"""Period of a job's polls, in s: the time from its decision to leave until its engines are
empty."""


class LeasedDriver(Driver):
    def __init__(
        self,
        jobs: list[SimulatedJob],
        runtime: PhaseRuntime,
        supply: LeaseSupply,
        *,
        disruptions: Disruptions = UNDISTURBED,
        ledger: Ledger | None = None,
    ) -> None:
        self._supply = supply
        self._record = HeadroomRecord(supply.given_s)
        self._leased: dict[JobId, LeasedWorker] = {}
        self._in_force = supply.in_force(now=0.0)
        self._members: dict[GroupId, list[LeasedWorker]] = {}
        """Jobs on each group's nodes, first come first."""
        self._slots: dict[GroupId, int] = {}
        self._home: dict[JobId, GroupId] = {}
        self._dirty: set[GroupId] = set()
        """Groups in which something has changed that slots depend on."""
        self._away: dict[JobId, LeasedWorker] = {}
        super().__init__(jobs, runtime, disruptions=disruptions, ledger=ledger)

    @property
    def slot_s(self) -> float:
        """Slot seconds that were held."""
        return sum(worker.slot_s for worker in self._leased.values())

    @property
    def given_node_s(self) -> float:
        return sum(worker.given_node_s for worker in self._leased.values())

    def run(self) -> RunResult:
        for turn_s in self._supply.turns_s:
            if turn_s > 0.0:
                self._set(turn_s, self._turn, None)
        return super().run()

    def _worker(self, one: SimulatedJob) -> Worker:
        worker = LeasedWorker(one, self._world, terms=self._supply.terms, record=self._record)
        self._leased[worker.job] = worker
        return worker

    def _set_next(self, worker: Worker, t_s: float, act: Callable[[Worker], None]) -> None:
        if t_s < float("inf"):
            super()._set_next(worker, t_s, act)
        else:
            worker.version += 1

    def _send(self, event: RuntimeEvent) -> tuple[RuntimeEffect, ...]:
        effects = super()._send(event)
        for worker in self._away.values():
            if not worker.has_poll_due and self._is_home_free(worker):
                self._poll_soon(worker, RECALL_S)
        return effects

    def _update_nodes(self) -> None:
        super()._update_nodes()
        members: dict[GroupId, list[LeasedWorker]] = defaultdict(list)
        nodes: dict[GroupId, set[NodeId]] = defaultdict(set)
        for placed in self._runtime.cluster.placements.values():
            if placed.group is not None and placed.at is not None:
                worker = self._leased[placed.job]
                members[placed.group].append(worker)
                nodes[placed.group].update(placed.at.rollout_nodes)
                if self._home.get(placed.job) != placed.group:
                    self._home[placed.job] = placed.group
                    worker.offset_s = self._supply.offset_s(placed.group)
        self._members = dict(members)
        self._slots = {group: self._supply.slots(len(nodes[group])) for group in members}
        self._dirty.update(members)

    def _after_moment(self) -> None:
        while self._dirty:
            groups, self._dirty = sorted(self._dirty), set()
            for group in groups:
                self._allot(group)

    def _allot(self, group: GroupId) -> None:
        members = self._members.get(group, [])
        tails = [worker for worker in members if worker.is_away]
        bulks = [worker for worker in members if worker.takes_slots_for_its_bulk]
        given = allotted(
            self._slots.get(group, 0) if self._in_force else 0,
            tails=[worker.tail_slots for worker in tails],
            bulks=[worker.node_count for worker in bulks],
        )
        for worker, slots in zip([*tails, *bulks], given, strict=True):
            if slots == worker.slots + worker.slots_coming:
                continue
            worker.work_until(self._now)
            if worker.is_away:
                worker.take_tail_slots(slots)
            else:
                worker.resize(slots, recompute=not self._in_force, now=self._now)
            self._set_next(worker, worker.next_s(), self._work)
        for worker in members:
            if worker.is_asked_away and not worker.has_poll_due:
                self._poll_soon(worker, max(TAIL_POLL_S, worker.synced_s - self._now))

    def _changed(self, worker: LeasedWorker) -> None:
        group = self._home.get(worker.job)
        if group is not None:
            self._dirty.add(group)

    def _turn(self, _: None) -> None:
        """All leases are revoked, or given back."""
        for worker in list(self._away.values()):
            self._poll(worker)
        self._in_force = self._supply.in_force(now=self._now)
        self._dirty.update(self._members)
        self._after_moment()
        for worker in self._away.values():
            self._poll_soon(worker, GONE_S + TAIL_POLL_S)

    def _tick(self, periodic: bool) -> None:
        super()._tick(periodic)
        for worker in list(self._away.values()):
            self._poll(worker)

    def _begin(self, worker: Worker, grant: GrantPermit) -> None:
        super()._begin(worker, grant)
        self._changed(self._leased[worker.job])

    def _work(self, worker: Worker) -> None:
        leased = self._leased[worker.job]
        leased.work_until(self._now)
        leased.take_ready_slots(now=self._now)
        if leased.slots + leased.slots_coming and not leased.is_away and not leased.is_in_bulk:
            leased.end_bulk()
            self._changed(leased)
        super()._work(worker)
        if leased.is_known_to_be_in_its_tail:
            leased.measure_bulk(now=self._now)

    def _narrow(self, worker: Worker) -> None:
        """Asked to make room: on a part of its nodes, or on none of them, where guests serve it."""
        leased = self._leased[worker.job]
        leased.work_until(self._now)
        leased.measure_bulk(now=self._now)
        leased.is_narrowing = True
        if leased.slots + leased.slots_coming:
            leased.end_bulk()
        self._changed(leased)
        permit = self._runtime.permit(worker.job)
        if permit is not None and permit.keep:
            super()._narrow(worker)
        else:
            leased.is_asked_away = True
            self._set_next(worker, worker.next_s(), self._work)
            self._poll(leased)

    def _serves(self, worker: LeasedWorker) -> bool:
        """Whether guests serve the job's tail, or would if it left."""
        if worker.is_away:
            return worker.slots > 0
        group = self._home[worker.job]
        taken = sum(each.slots for each in self._members.get(group, ()) if each.is_away)
        enough = self._slots.get(group, 0) - taken >= worker.tail_slots > 0
        return self._in_force and enough and self._now >= worker.synced_s

    def _may_leave(self, worker: LeasedWorker, permit: JobPermit) -> bool:
        """A tail that is over before it would be away stays where it is."""
        asked = permit.stage is PermitStage.NARROWING and not permit.keep
        return asked and worker.left_s > self._supply.terms.activation_s

    def _poll_soon(self, worker: LeasedWorker, in_s: float) -> None:
        worker.has_poll_due = True
        self._set(self._now + in_s, self._poll, worker)

    def _poll(self, worker: LeasedWorker) -> None:
        """Runs the job's tail policy, which its process polls ten times a second."""
        worker.has_poll_due = False
        permit = self._runtime.permit(worker.job)
        rolls_out = worker.stage is WorkerStage.RUNNING and worker.kind is PhaseKind.ROLLOUT
        if permit is None or not rolls_out:
            return
        leaving = worker.tail.state is TailState.LEAVING
        effects = worker.tail.observe(
            TailSample(
                stage=permit.stage,
                may_leave=self._may_leave(worker, permit),
                guest_serves=self._serves(worker),
                engines_off=leaving,
            ),
            now=self._now,
        )
        if not leaving and worker.tail.state is TailState.LEAVING:
            self._poll_soon(worker, TAIL_POLL_S)
        for effect in effects:
            match effect:
                case ReportNarrowed():
                    self._send(Beat(job=worker.job, epoch=worker.epoch, narrowed=True))
                case RecallTail(how=how):
                    self._send(Beat(job=worker.job, epoch=worker.epoch, recall=how))

    def _share_changed(self, worker: Worker, effect: WidenPermit | FreeNodes) -> None:
        leased, permit = self._leased[worker.job], self._runtime.permit(worker.job)
        if worker.stage is not WorkerStage.RUNNING or permit is None:
            return
        leased.is_narrowing = False
        if not leased.is_away:
            super()._share_changed(worker, effect)
        elif isinstance(effect, FreeNodes):
            leased.work_until(self._now)
            leased.leave_nodes()
            self._away[worker.job] = leased
            self._phase("tail_leased", worker)
            self._set_next(worker, worker.next_s(), self._work)
        elif permit.stage is PermitStage.RUNNING:
            self._come_home(leased, permit, effect)
        self._changed(leased)

    def _come_home(self, worker: LeasedWorker, permit: JobPermit, effect: WidenPermit) -> None:
        worker.work_until(self._now)
        worker.tail.observe(TailSample(stage=permit.stage), now=self._now)
        worker.nodes = permit.nodes
        worker.come_home(loading_s=self._loaded.load(worker, worker.nodes))
        del self._away[worker.job]
        self._phase("tail_returned", worker)
        super()._share_changed(worker, effect)

    def _is_home_free(self, worker: LeasedWorker) -> bool:
        permit = self._runtime.permit(worker.job)
        phase = None if permit is None else permit.terms.phase(PhaseKind.ROLLOUT)
        if permit is None or phase is None or permit.awaits:
            return False
        return all(self._runtime.permits.on(node) is None for node in phase.nodes)

    def _end_phase(self, worker: Worker) -> None:
        leased = self._leased[worker.job]
        if worker.kind is PhaseKind.ROLLOUT:
            leased.end_rollout(now=self._now)
        self._stop(leased)
        if worker.kind is worker.kinds[-1]:
            leased.published_s = self._now
        super()._end_phase(worker)

    def _lose_phase(self, worker: Worker, end: EndPermit) -> None:
        self._stop(self._leased[worker.job])
        super()._lose_phase(worker, end)

    def _leave(self, worker: Worker, kind: str) -> None:
        self._stop(self._leased[worker.job])
        super()._leave(worker, kind)

    def _stop(self, worker: LeasedWorker) -> None:
        """Its slots are others' now."""
        if worker.stage is WorkerStage.RUNNING:
            worker.work_until(self._now)
        worker.drop_slots()
        self._away.pop(worker.job, None)
        self._changed(worker)
