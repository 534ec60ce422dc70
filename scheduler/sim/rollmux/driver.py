"""The shipped runtime in virtual time: a shell that draws durations instead of running engines.

It sends the runtime the events of jobs and nodes at their true times, and carries out the effects.
It has no rule of its own: no order, no tail, no placement and no memory.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import NO_JOB
from scheduler.rollmux.cluster.runtime import PhaseRuntime
from scheduler.rollmux.cluster.runtime_events import (
    CloseJob,
    NodeReport,
    OrderMove,
    PlanJob,
    RuntimeEffect,
    RuntimeEvent,
    Submit,
)
from scheduler.rollmux.permits.events import (
    AdmitJob,
    Beat,
    DropPlace,
    EndPermit,
    Enter,
    Forget,
    FreeNodes,
    GrantPermit,
    Leave,
    NarrowPhase,
    PermitEndReason,
    Refuse,
    RevokePermit,
    TimeElapsed,
    Unloaded,
    UnloadNodes,
    WarnHolder,
    WidenPermit,
)
from scheduler.rollmux.planner.group_effects import PlacementDecision
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.ledger import Ledger, NodeBill, RunCounts, RunResult
from scheduler.sim.rollmux.worker import Worker, WorkerStage
from scheduler.sim.rollmux.workload import PAPER_WORLD, SimulatedJob, World, spec_of

TICK_S: Final = 60.0
"""Period of ticks, in s; the shipped shell ticks more often."""
REPAIR_S: Final = 3600.0
"""Time from a node's failure until it is supply again, in s."""
_RETRY_S: Final = 5.0
_ALWAYS: Final = -1
"""Version of a moment that no other action replaces."""


Watch = Callable[[PhaseRuntime, float], None]


def not_watched(_runtime: PhaseRuntime, _now: float) -> None:
    pass


class LoadedNodes:
    """The accelerators of all nodes: the job whose state is loaded on each node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[NodeId, JobId] = {}
        """`NO_JOB` on a node whose state made way: the next job there pays for it with its warm
        start."""

    def load(self, worker: Worker, nodes: tuple[NodeId, ...]) -> float:
        """Loads the job's state on these nodes; returns the seconds that it takes."""
        missing = [node for node in nodes if self._jobs.get(node) != worker.job]
        # On accelerators that hold nothing, a state from storage comes at once.
        warm = any(node in self._jobs or node in worker.resident for node in missing)
        self._jobs.update(dict.fromkeys(nodes, worker.job))
        return warm * self._world.warm_start_s + worker.bring(nodes, self._world)

    def widen(self, worker: Worker, nodes: tuple[NodeId, ...]) -> None:
        """The running phase has its state on these nodes too."""
        self._jobs.update(dict.fromkeys(nodes, worker.job))
        worker.resident.update(nodes)

    def make_way(self, nodes: Iterable[NodeId], job: JobId | None = None) -> None:
        """The states on these nodes are off; `job`: only those of this job."""
        self._jobs |= {n: NO_JOB for n in nodes if job is None or self._jobs.get(n) == job}

    def unload(self, job: JobId) -> None:
        """The job's process has taken its states off all accelerators."""
        self._jobs = {node: one for node, one in self._jobs.items() if one != job}

    def lose(self, node: NodeId) -> None:
        """The node has failed."""
        self._jobs.pop(node, None)


class Driver:
    def __init__(
        self,
        jobs: list[SimulatedJob],
        runtime: PhaseRuntime,
        *,
        world: World = PAPER_WORLD,
        disruptions: Disruptions = UNDISTURBED,
        ledger: Ledger | None = None,
        watch: Watch = not_watched,
    ) -> None:
        self._watch = watch
        self.ledger = ledger or Ledger()
        self._runtime = runtime
        self._world = world
        self._disruptions = disruptions
        self._workers = [self._worker(one) for one in jobs]
        self._by_job = {worker.job: worker for worker in self._workers}
        self._bill = NodeBill(runtime.cluster, self.ledger)
        self._counts = RunCounts()
        self._now = 0.0
        self._moments: list[tuple[float, int, Callable[[Any], None], Any, int]] = []
        """Time, number, action, its argument, and the worker's version at scheduling."""
        self._numbers = count()
        self._left = len(jobs)
        self._loaded = LoadedNodes(world)

    def run(self) -> RunResult:
        for worker in self._workers:
            self._set(worker.one.arrival_s, self._arrive, worker)
        self._set(0.0, self._tick, True)
        while self._left:
            t_s, _, act, target, version = heappop(self._moments)
            if version not in (_ALWAYS, getattr(target, "version", _ALWAYS)):
                continue
            self._now = max(self._now, t_s)
            act(target)
            self._after_moment()
        self._counts.events = next(self._numbers)
        return RunResult(ledger=self.ledger, counts=self._counts, end_s=self._now)

    def _worker(self, one: SimulatedJob) -> Worker:
        return Worker(one, self._world)

    def _after_moment(self) -> None:
        """Hook; empty here."""

    def _set(self, t_s: float, act: Callable[[Any], None], target: Any) -> None:
        heappush(self._moments, (t_s, next(self._numbers), act, target, _ALWAYS))

    def _set_next(self, worker: Worker, t_s: float, act: Callable[[Worker], None]) -> None:
        """Replaces the worker's next scheduled action."""
        worker.version += 1
        heappush(self._moments, (t_s, next(self._numbers), act, worker, worker.version))

    def _send(self, event: RuntimeEvent) -> tuple[RuntimeEffect, ...]:
        effects = self._runtime.observe(event, now=self._now)
        if self._runtime.cluster.layout_changed:
            self._update_nodes()
        # A job whose node failed is off its other nodes before another one loads there.
        for effect in sorted(effects, key=_stays) if len(effects) > 1 else effects:
            self._carry_out(effect)
        return effects

    def _update_nodes(self) -> None:
        self._watch(self._runtime, self._now)
        for node, times in self._bill.update(self._now):
            fails_s = self._disruptions.fails_at_s(node, up_s=self._now, times=times)
            if fails_s < float("inf"):
                self._set(fails_s, self._fail, (node, times))

    def _carry_out(self, effect: RuntimeEffect) -> None:
        match effect:
            case GrantPermit():
                self._begin(self._by_job[effect.job], effect)
            case WidenPermit() | FreeNodes():
                self._share_changed(self._by_job[effect.job], effect)
            case NarrowPhase():
                self._narrow(self._by_job[effect.job])
            case EndPermit(ended=PermitEndReason.DONE):
                pass
            case EndPermit():
                self._lose_phase(self._by_job[effect.job], effect)
            case AdmitJob():
                self._admitted(self._by_job[effect.job])
            case DropPlace(forgotten=False) if (
                self._by_job[effect.job].stage is WorkerStage.WAITING
            ):
                self._by_job[effect.job].stage = WorkerStage.BETWEEN
            case Refuse(unknown=True):
                self._set_next(self._by_job[effect.job], self._now, self._submit_again)
            case Refuse() if self._by_job[effect.job].stage is WorkerStage.WAITING:
                worker = self._by_job[effect.job]
                self._set_next(worker, self._now + _RETRY_S, self._ask)
            case UnloadNodes():
                self._loaded.make_way(effect.nodes)
                self._set(self._now, self._unloaded, effect)
            case PlanJob():
                self._counts.moves += effect.decision is PlacementDecision.MOVED
                self._counts.restarts += effect.decision is PlacementDecision.RESTARTED
                self.ledger.placement(self._now, effect)
            case CloseJob(kept=True):
                self.ledger.reported_kept.add(effect.job)
            case WarnHolder():
                self._set(self._now + self._runtime.config.permits.warn_s, self._tick, False)
            case RevokePermit():
                self._set(self._now + effect.grace_s, self._tick, False)
            case _:
                pass

    def _tick(self, periodic: bool) -> None:
        self._send(TimeElapsed())
        if periodic:
            self._set(self._now + TICK_S, self._tick, True)

    def _unloaded(self, asked: UnloadNodes) -> None:
        self._send(Unloaded(job=asked.job, holder=asked.job, nodes=asked.nodes))

    def _arrive(self, worker: Worker) -> None:
        one = worker.one
        self.ledger.arrival(one, self._world, t_s=self._now)
        leaves_s = self._disruptions.leaves_at_s(one, self._world)
        if leaves_s < float("inf"):
            self._set(leaves_s, self._give_up, worker)
        self._submit(worker)

    def _submit(self, worker: Worker) -> None:
        self._send(Submit(spec=spec_of(worker.one, self._world), holder=worker.job))

    def _admitted(self, worker: Worker) -> None:
        """The job is on its present nodes: their host memory is its, and its phases load there."""
        if worker.stage is WorkerStage.WAITING:
            self._set_next(worker, self._now, self._ask)
        placed = self._runtime.cluster.placements[worker.job]
        if placed.at is None or worker.stage is not WorkerStage.BETWEEN:
            return
        if placed.changed:
            self._submit(worker)
        nodes = {node for side in self._runtime.cluster.machines(placed.at) for node in side}
        self.ledger.write(self._now, "loading", job=worker.job, nodes=sorted(nodes))
        worker.stage, worker.resident = WorkerStage.WAITING, worker.resident & nodes
        self._set_next(worker, self._now, self._ask)

    def _submit_again(self, worker: Worker) -> None:
        """Submits the job again: it learns its present placement and moves its state there."""
        worker.stage = WorkerStage.BETWEEN
        self._loaded.unload(worker.job)
        self._submit(worker)
        self._admitted(worker)

    def _ask(self, worker: Worker) -> None:
        worker.stage = WorkerStage.WAITING
        self._send(Enter(job=worker.job, kind=worker.kind, holder=worker.job))

    def _begin(self, worker: Worker, grant: GrantPermit) -> None:
        loading_s = self._loaded.load(worker, grant.nodes)
        worker.epoch = grant.epoch
        share = worker.share_of(grant.nodes, grant.accelerators)
        worker.begin(grant.nodes, loading_s=loading_s, share=share, now=self._now)
        self._phase("phase_start", worker)
        self._set_next(worker, worker.next_s(), self._work)

    def _work(self, worker: Worker) -> None:
        worker.work_until(self._now)
        if worker.is_complete:
            self._end_phase(worker)
            return
        version = worker.version
        ratio = worker.progress()
        if ratio is not None:
            self._send(Beat(job=worker.job, epoch=worker.epoch, complete_ratio=ratio))
        if worker.version == version:
            self._set_next(worker, worker.next_s(), self._work)

    def _share_changed(self, worker: Worker, effect: WidenPermit | FreeNodes) -> None:
        permit = self._runtime.permit(worker.job)
        if permit is None or permit.epoch != worker.epoch or not permit.nodes:
            return  # The same decision has ended its permit, or its tail has left all nodes.
        worker.work_until(self._now)
        worker.share = worker.share_of(permit.nodes, permit.accelerators)
        if isinstance(effect, WidenPermit):
            self._loaded.widen(worker, effect.nodes)
        else:
            self._loaded.make_way(effect.nodes, worker.job)
            worker.tail_moved()
            self._phase("tail_moved", worker)
        self._set_next(worker, worker.next_s(), self._work)

    def _narrow(self, worker: Worker) -> None:
        """A tail that is over before it would have been moved stays where it is."""
        worker.work_until(self._now)
        migrate_s = self._world.migrate_s
        if worker.left_s > migrate_s:
            worker.overhead_s += migrate_s
            worker.loading_s += migrate_s
            self._set_next(worker, self._now + migrate_s, self._narrowed)

    def _narrowed(self, worker: Worker) -> None:
        self._send(Beat(job=worker.job, epoch=worker.epoch, narrowed=True))

    def _end_phase(self, worker: Worker) -> None:
        self._phase("phase_end", worker, solo_s=worker.length_s)
        worker.stage, ended = WorkerStage.WAITING, worker.kind
        worker.version += 1
        permit = self._runtime.permit(worker.job)
        # As a job's process does: a tail takes its state off, and only whole phases leave theirs.
        whole = permit is not None and permit.stage.is_whole
        if not whole:
            self._loaded.make_way(worker.nodes, worker.job)
        effects = self._send(
            Leave(
                job=worker.job,
                epoch=worker.epoch,
                loading_s=worker.loading_s,
                stays_loaded=whole,
                leased_s=worker.leased_s,
            )
        )
        worker.next_kind()
        if ended is worker.kinds[-1]:
            self.ledger.iteration_ends_s.setdefault(worker.job, []).append(self._now)
        if worker.is_over:
            self.ledger.ended_s[worker.job] = self._now
            self._leave(worker, "job_done")
        elif any(isinstance(each, OrderMove) and each.job == worker.job for each in effects):
            self.ledger.write(self._now, "left", job=worker.job)
            self._loaded.unload(worker.job)
            worker.stage = WorkerStage.BETWEEN
            self._submit(worker)
        else:
            self._ask(worker)

    def _lose_phase(self, worker: Worker, end: EndPermit) -> None:
        if worker.stage is not WorkerStage.RUNNING:
            return
        self._phase("phase_lost", worker)
        self._loaded.unload(worker.job)
        worker.lose_iteration()
        worker.stage = WorkerStage.BETWEEN
        worker.version += 1
        if end.ended is PermitEndReason.LEFT:
            self.ledger.write(self._now, "left", job=worker.job)
        else:
            self._set_next(worker, self._now + _RETRY_S, self._ask)

    def _give_up(self, worker: Worker) -> None:
        if worker.stage is not WorkerStage.DONE:
            self._counts.given_up += 1
            self._leave(worker, "job_given_up")

    def _leave(self, worker: Worker, kind: str) -> None:
        if worker.stage is WorkerStage.RUNNING:
            self._phase("phase_lost", worker)
        worker.stage = WorkerStage.DONE
        worker.version += 1
        self._left -= 1
        self.ledger.write(self._now, kind, job=worker.job)
        self._loaded.unload(worker.job)
        self._send(Forget(job=worker.job))

    def _fail(self, failing: tuple[NodeId, int]) -> None:
        node, times = failing
        if not self._bill.is_up(node, times):
            return
        self._counts.failures += 1
        self.ledger.write(self._now, "node_failed", node=node)
        self._loaded.lose(node)
        for worker in self._workers:
            worker.resident.discard(node)
        self._send(NodeReport(node=node, failed=True))
        self._set(self._now + REPAIR_S, self._repaired, node)

    def _repaired(self, node: NodeId) -> None:
        self.ledger.write(self._now, "node_repaired", node=node)
        self._send(NodeReport(node=node, failed=False))

    def _phase(self, kind: str, worker: Worker, **fields: object) -> None:
        permit = self._runtime.permit(worker.job)
        parts = {} if permit is None else permit.accelerators
        self.ledger.phase(self._now, kind, worker, parts, **fields)


def _stays(effect: RuntimeEffect) -> bool:
    return not (isinstance(effect, EndPermit) and effect.ended is PermitEndReason.LEFT)
