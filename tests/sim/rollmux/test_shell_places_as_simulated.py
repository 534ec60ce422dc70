"""The stream of a simulated cluster, told to the policy of the live shell: the same placements."""

from dataclasses import dataclass, field

import pytest

from harvester.contracts.ids import JobId, NodeId
from scheduler.policy.cluster.cluster import ClusterPolicy
from scheduler.policy.cluster.config import ClusterConfig, PoolNodes
from scheduler.policy.cluster.events import (
    ClusterEvent,
    JobGone,
    JobSubmitted,
    NodeLost,
    PhaseBegan,
    PhaseDone,
    PlanReviewed,
)
from scheduler.policy.cluster.submission import DeclaredPhase, Submission, nodes_of
from scheduler.policy.groups.events import (
    GroupEffect,
    GroupEvent,
    JobArrived,
    JobEnded,
    JobMoved,
    NodeFailed,
    PhaseEnded,
    ReviewDue,
)
from scheduler.policy.groups.facts import JobFacts
from scheduler.policy.groups.planner import GroupPlanner
from scheduler.policy.model import Job, Pool
from scheduler.policy.phases.standing import Standing
from scheduler.sim.rollmux.cluster import Cluster
from scheduler.sim.rollmux.disruptions import Disruptions
from scheduler.sim.rollmux.workload import NODE_TYPES, Drift, w1
from scheduler.sim.rollmux.world import PAPER_WORLD

Told = tuple[float, GroupEvent, tuple[GroupEffect, ...]]
MANY = 60
"""Nodes of each pool: more than the jobs ever need, as in the simulator."""


@dataclass
class Recorded:
    """A planner, and everything that it was told and asked for."""

    planner: GroupPlanner
    facts: dict[JobId, JobFacts] = field(init=False)
    told: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = self.planner.facts

    def observe(self, event: GroupEvent, *, now: float) -> tuple[GroupEffect, ...]:
        effects = self.planner.observe(event, now=now)
        self.told.append((now, event, effects))
        return effects


class NoPermits:
    def standing(self, job: JobId) -> Standing | None:
        return None


def _config() -> ClusterConfig:
    def nodes(pool: Pool) -> PoolNodes:
        names = tuple(NodeId(f"{pool}.{at}") for at in range(MANY))
        return PoolNodes(type=NODE_TYPES[pool], names=names)

    return ClusterConfig(
        rollout=nodes(Pool.ROLLOUT),
        training=nodes(Pool.TRAINING),
        cold_start_s=PAPER_WORLD.cold_start_s,
        move_s=PAPER_WORLD.move_s,
    )


def _submission(job: Job) -> Submission:
    return Submission(
        job=job.job,
        tenant=job.tenant,
        slo=job.slowdown_slo,
        host_bytes=job.host_bytes_per_node,
        phases=tuple(
            DeclaredPhase(kind=one.kind, max_s=one.max_s, nodes=one.nodes) for one in job.phases
        ),
    )


def _heard(event: GroupEvent, policy: ClusterPolicy) -> ClusterEvent:
    """What the live shell hears of it."""
    match event:
        case JobArrived(job=job):
            return JobSubmitted(submission=_submission(job))
        case PhaseEnded():
            return PhaseDone(job=event.job, kind=event.phase, solo_s=event.solo_s)
        case JobEnded(job=job):
            return JobGone(job=job)
        case JobMoved(job=job):
            # A process that begins anew has left, whatever it was told before.
            return JobSubmitted(submission=policy.stays[job].submission)
        case NodeFailed(node=node):
            return NodeLost(node=policy.fleet.machines[node])
        case ReviewDue():
            return PlanReviewed()


@pytest.mark.parametrize(
    ("seed", "drift", "disruptions"),
    [
        (1, Drift.NONE, Disruptions()),
        (2, Drift.MIXED, Disruptions(seed=2, node_mtbf_s=40 * 3600.0, leaving_ratio=0.2)),
    ],
)
def test_the_shell_s_planner_answers_as_the_simulator_s(
    seed: int, drift: Drift, disruptions: Disruptions
) -> None:
    config = _config()
    jobs = w1(seed, drift=drift, jobs=8)
    simulated = Recorded(GroupPlanner(config.judge, config.types, config.planner))
    Cluster(jobs, simulated, config.rules, disruptions=disruptions).run()

    policy = ClusterPolicy(config, NoPermits())
    live, observe = list[Told](), policy.planner.observe

    def recorded(event: GroupEvent, *, now: float) -> tuple[GroupEffect, ...]:
        effects = observe(event, now=now)
        live.append((now, event, effects))
        return effects

    policy.planner.observe = recorded  # type: ignore[method-assign]
    for now, event, _ in simulated.told:
        policy.observe(_heard(event, policy), now=now)
        for job, stay in policy.stays.items():
            if stay.at is not None and not stay.started:
                policy.observe(PhaseBegan(job=job), now=now)
        _holds_together(policy)

    asked = [
        [(at, one, effects) for at, one, effects in told if effects]
        for told in (live, simulated.told)
    ]
    assert asked[0] == asked[1]
    assert len(live) == len(simulated.told)
    assert not policy.stays
    assert len(asked[0]) > len(jobs)


def _holds_together(policy: ClusterPolicy) -> None:
    """Machines are behind one name each, and memory is given once."""
    machines = list(policy.fleet.machines.values())
    assert len(machines) == len(set(machines))
    resident: dict[NodeId, int] = {}
    for stay in policy.stays.values():
        for node in stay.held:
            resident[node] = resident.get(node, 0) + stay.submission.host_bytes
        if stay.at is not None:
            assert set(nodes_of(stay.at)) == set(stay.held)
    assert all(held <= NODE_TYPES[Pool.ROLLOUT].host_bytes for held in resident.values())
