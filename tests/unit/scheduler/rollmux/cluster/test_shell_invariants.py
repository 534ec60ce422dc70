"""Invariants of a planning control under arbitrary jobs, nodes and times, and over restarts."""

import tempfile
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.runtime_events import (
    NodeReport,
    Submit,
)
from scheduler.rollmux.control.wire import (
    CallRefused,
    Granted,
    Placed,
    Waiting,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Forget,
    Leave,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from tests.unit.scheduler.rollmux.cluster.submissions import (
    HOST_BYTES,
    POOLS,
    ROLLOUT,
    TRAINING,
    Control,
    ask_to_move,
    cluster,
    resident_bytes,
    submission,
)

JOBS = tuple(f"j{at}" for at in range(5))
NODES = ("r0", "r1", "r2", "t0", "t1")


class World:
    """Random jobs with a control; tracks the jobs on each node by the answers alone."""

    steps = "seeellbbfntmmmwwwwR"
    """One letter for what may happen next, as often as it is likely."""

    def __init__(self, chance: Random, state: Path, **more: Any) -> None:
        config = cluster("r0 r1 r2", "t0 t1", review_s=30.0, gone_s=200.0)
        self.chance = chance
        self.control = Control(config, state=state, **more)
        self.given = {
            name: submission(
                name,
                chance.uniform(20, 60),
                chance.uniform(5, 40),
                slo=chance.uniform(1.0, 3.0),
                host=chance.randint(100, 1200),
                rollout_nodes=chance.randint(1, 2),
                measured=chance.random() < 0.5,
            )
            for name in JOBS
        }

    def step(self) -> None:
        chance, name = self.chance, self.chance.choice(JOBS)
        job, service = JobId(name), self.control.service
        permit = service.policy.permit(job)
        epoch = Epoch(0) if permit is None else permit.epoch
        match chance.choice(self.steps):
            case "s":
                assert isinstance(
                    service.call(Submit(spec=self.given[name])),
                    Placed | Waiting | CallRefused,
                )
            case "e":
                kind = chance.choice((ROLLOUT, TRAINING))
                service.call(Enter(job=job, kind=kind, holder=f"{name}.1"))
            case "l":
                failed = "broke" if chance.random() < 0.1 else ""
                service.call(Leave(job=job, epoch=epoch, failed=failed, loading_s=chance.random()))
            case "b":
                service.call(Beat(job=job, epoch=epoch))
            case "f" if chance.random() < 0.3:
                service.call(Forget(job=job))
            case "n" if chance.random() < 0.5:
                node = NodeId(chance.choice(NODES))
                service.call(NodeReport(node=node, failed=chance.random() < 0.4))
            case "m" if job in service.cluster.placements:
                ask_to_move(service.cluster, name)
                self.control.clock.now_s += 31.0
                service.tick()
            case "w":
                self.iterates(name)
            case "R" if chance.random() < 0.5:
                self.control = self.control.restarted()
            case _:
                self.control.clock.now_s += chance.choice((0.5, 3.0, 11.0, 31.0))
                service.tick()

    def iterates(self, name: str) -> None:
        """Runs one undisturbed iteration; skips phases that are refused."""
        for kind in (ROLLOUT, TRAINING):
            entered = self.control.enter(name, kind)
            self.check()
            if isinstance(entered, Granted):
                self.control.clock.now_s += 2.0
                self.control.leave(name)

    def check(self) -> None:
        policy, permits = self.control.service.cluster, self.control.service.runtime.permits
        machines = list(policy.fleet.machines.values())
        assert len(machines) == len(set(machines))
        assert not set(machines) & policy.fleet.failed
        for held in resident_bytes(policy).values():
            assert held <= HOST_BYTES
        on: set[tuple[NodeId, int]] = set()
        for job in permits.jobs:
            permit, placed = permits.permit(job), policy.placements.get(job)
            assert permit is not None
            assert placed is not None
            wanted = policy.current_terms(placed)
            assert permit.terms == wanted or wanted is None
            if wanted is None:
                assert permit.stage is PermitStage.APART
            for node in permit.nodes:
                assert node not in policy.fleet.failed
                held = {(node, at) for at in permit.accelerators.get(node, range(8))}
                assert not held & on
                on |= held
            if permit.holding:
                # It runs where its state is.
                assert placed.at is not None
                assert set(permit.nodes) <= {
                    policy.fleet.machines.get(name) for name in placed.at.nodes
                }
        for pool in POOLS:
            counts = policy.fleet.counts(pool)
            assert counts["used"] + counts["free"] + counts["failed"] == policy.fleet.count(pool)
        groups = policy.planner.table.groups.values()
        owned = [node for one in groups for node in (*one.rollout, *one.training)]
        assert len(owned) == len(set(owned))
        assert set(owned) == {*policy.fleet.machines, *policy.fleet.awaited}

    def drained(self) -> None:
        for name in JOBS:
            self.control.service.call(Forget(job=JobId(name)))
        policy = self.control.service.cluster
        assert not policy.placements
        assert not policy.planner.table.groups
        assert not policy.fleet.machines
        assert not resident_bytes(policy)
        assert not self.control.service.runtime.permits.jobs


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(20, 150))
def test_no_permit_is_held_twice_no_memory_is_exceeded_and_permits_follow_the_plan(
    chance: Random, steps: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(chance, Path(directory) / "state.sqlite")
        for _ in range(steps):
            world.step()
            world.check()
        world.drained()
        world.control.service.close()


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_job_is_served_when_all_nodes_are_back_and_others_leave(chance: Random) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(chance, Path(directory) / "state.sqlite")
        for _ in range(60):
            world.step()
        for node in NODES:
            world.control.service.call(NodeReport(node=NodeId(node), failed=False))
        for name in JOBS:
            world.control.submit(world.given[name])
        served: set[str] = set()
        for _ in range(60):
            for name in JOBS:
                _one_phase(world.control, name, served)
            world.control.clock.now_s += 3.0
            world.control.service.tick()
            for name in served:
                world.control.service.call(Forget(job=JobId(name)))
        placements = world.control.service.cluster.placements
        assert served == set(JOBS), {name: placements[JobId(name)].stage for name in placements}
        assert all(placed.stage is not PlacementStage.BETWEEN for placed in placements.values())
        world.control.service.close()


def _one_phase(control: Control, name: str, served: set[str]) -> None:
    job = JobId(name)
    if name in served or job not in control.service.cluster.placements:
        return
    permit = control.service.policy.permit(job)
    if permit is not None and permit.holding:
        served.add(name)
        return
    control.service.call(Enter(job=job, kind=ROLLOUT, holder=f"{name}.1"))
