"""Invariants of permits under arbitrary jobs, holders and times."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.events import (
    Beat,
    ControlResumed,
    EndPermit,
    Enter,
    Forget,
    FreeNodes,
    GrantPermit,
    Leave,
    PermitEffect,
    PermitEvent,
    Recall,
    Register,
    TimeElapsed,
    Unloaded,
    WidenPermit,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms
from tests.unit.scheduler.rollmux.permits.permit_scenario import CONFIG, ROLLOUT, TRAINING

JOBS = tuple(JobId(name) for name in "abcd")
POOLS = {ROLLOUT: ("r0", "r1", "r2"), TRAINING: ("t0", "t1")}
NODES = tuple(NodeId(node) for pool in POOLS.values() for node in pool)
Timed = tuple[float, PermitEvent]


def _phase(kind: PhaseKind) -> st.SearchStrategy[PhaseTerms]:
    names = st.lists(st.sampled_from(POOLS[kind]), min_size=1, unique=True)
    return st.builds(
        lambda chosen, least, tail, ratio, max_s: PhaseTerms(
            kind=kind,
            nodes=tuple(map(NodeId, chosen)),
            least_accelerators=min(least, len(chosen)),
            tail_accelerators=min(tail, len(chosen)),
            tail_ratio=ratio,
            max_s=max_s,
        ),
        names,
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from((0.5, 1.0)),
        st.sampled_from((None, 4.0)),
    )


def _placed(job: JobId) -> st.SearchStrategy[Register]:
    phases = st.tuples(_phase(ROLLOUT), _phase(TRAINING))
    return phases.map(lambda both: Register(terms=JobTerms(job=job, phases=both)))


_job = st.sampled_from(JOBS)
_epoch = st.integers(1, 12).map(Epoch)
_event: st.SearchStrategy[PermitEvent] = st.one_of(
    _job.flatmap(_placed),
    st.builds(Forget, job=_job),
    st.builds(
        Enter,
        job=_job,
        kind=st.sampled_from((ROLLOUT, TRAINING)),
        holder=st.sampled_from(("first", "second")),
    ),
    st.builds(Withdraw, job=_job, holder=st.sampled_from(("first", "second"))),
    st.builds(Beat, job=_job, epoch=_epoch, complete_ratio=st.sampled_from((0.0, 0.6, 1.0))),
    st.builds(
        Beat,
        job=_job,
        epoch=_epoch,
        complete_ratio=st.sampled_from((0.0, 0.6, 1.0)),
        narrowed=st.booleans(),
        recall=st.none() | st.sampled_from(Recall),
    ),
    st.builds(
        Leave,
        job=_job,
        epoch=_epoch,
        failed=st.sampled_from(("", "", "broke")),
        stays_loaded=st.booleans(),
    ),
    st.builds(
        Unloaded,
        job=_job,
        holder=st.sampled_from(("first", "second")),
        nodes=st.lists(st.sampled_from(NODES), unique=True).map(tuple),
    ),
    st.just(TimeElapsed()),
    st.just(ControlResumed()),
)
_steps = st.lists(st.tuples(st.sampled_from((0.0, 0.1, 1.0, 6.0)), _event), max_size=60)


@dataclass
class Nodes:
    """The job on each node, by the effects alone."""

    on: dict[NodeId, JobId] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)

    def hear(self, effects: tuple[PermitEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case GrantPermit() | WidenPermit():
                    for node in effect.nodes:
                        assert node not in self.on, f"{node} is held by {self.on[node]}"
                        self.on[node] = effect.job
                    if isinstance(effect, GrantPermit):
                        self.epochs.append(effect.epoch)
                case FreeNodes():
                    for node in effect.nodes:
                        assert self.on.pop(node) == effect.job
                case EndPermit():
                    self.on = {node: job for node, job in self.on.items() if job != effect.job}


def _everybody() -> st.SearchStrategy[list[Timed]]:
    first = st.tuples(*map(_placed, JOBS)).map(lambda all_: [(0.0, each) for each in all_])
    return st.builds(lambda begin, then: begin + then, first, _steps)


def _run(policy: PermitPolicy, steps: list[Timed]) -> tuple[float, list[tuple[Any, ...]]]:
    now, heard = 0.0, []
    for delay_s, event in steps:
        now += delay_s
        heard.append(policy.observe(event, now=now))
        _check_loaded(policy)
    return now, heard


def _check_loaded(policy: PermitPolicy) -> None:
    """A state left loaded has its node for itself, and a process that may be asked for it."""
    found: list[NodeId] = []
    for job in policy.jobs:
        permit = policy.permit(job)
        assert permit is not None
        found += permit.loaded
        assert permit.loaded_by or not permit.loaded
        assert {*permit.unload} <= {*permit.loaded}
    assert len(found) == len(set(found))
    assert not [node for node in found if policy.on(node) is not None]


@given(_everybody())
@settings(max_examples=150, deadline=None)
def test_no_permit_is_held_twice_and_no_epoch_is_given_twice(steps: list[Timed]) -> None:
    policy, nodes = PermitPolicy(CONFIG), Nodes()
    for effects in _run(policy, steps)[1]:
        nodes.hear(effects)
    assert nodes.epochs == sorted(set(nodes.epochs))
    assert {node: job for node in NODES if (job := policy.on(node))} == nodes.on


@given(_everybody(), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_the_same_events_give_the_same_effects_also_over_a_snapshot(
    steps: list[Timed], cut: int
) -> None:
    whole, first, second = (PermitPolicy(CONFIG) for _ in range(3))
    _, expected = _run(whole, steps)
    now, heard = _run(first, steps[:cut])
    second.restore(msgspec.json.decode(msgspec.json.encode(first.snapshot())))
    for delay_s, event in steps[cut:]:
        now += delay_s
        heard.append(second.observe(event, now=now))
    assert heard == expected
    assert second.snapshot() == whole.snapshot()


@given(_everybody())
@settings(max_examples=150, deadline=None)
def test_from_any_state_every_waiting_job_is_served_when_holders_end(
    steps: list[Timed],
) -> None:
    policy = PermitPolicy(CONFIG)
    now, _ = _run(policy, steps)
    served: set[JobId] = set()
    present = set(policy.jobs)
    for _ in range(4 * len(JOBS)):
        now += CONFIG.patience_s
        policy.observe(TimeElapsed(), now=now)
        for job in policy.jobs:
            _asked(policy, job, now)
        for job in policy.jobs:
            permit = policy.permit(job)
            assert permit is not None
            if permit.holding:
                served.add(job)
                policy.observe(Leave(job=job, epoch=permit.epoch, stays_loaded=True), now=now)
            if permit.unload:
                report = Unloaded(job=job, holder=permit.loaded_by, nodes=permit.unload)
                policy.observe(report, now=now)
    assert served == present


@given(st.tuples(*map(_placed, JOBS)), st.permutations(JOBS), st.sets(st.sampled_from(JOBS)))
@settings(max_examples=200, deadline=None)
def test_no_job_is_passed_more_than_once_by_another_job(
    placed: tuple[Register, ...], order: list[JobId], stubborn: set[JobId]
) -> None:
    """Some never end their phase, the others end and ask again as fast as they can."""
    policy, now = PermitPolicy(CONFIG), 0.0
    for event in placed:
        policy.observe(event, now=now)
    passed: dict[tuple[JobId, JobId], int] = {}
    for _ in range(12):
        now += 0.3
        policy.observe(TimeElapsed(), now=now)
        for job in order:
            awaits = {each: _awaits(policy, each) for each in order if _asks(policy, each)}
            for effect in policy.observe(_next(policy, job, job in stubborn), now=now):
                if not isinstance(effect, GrantPermit):
                    continue
                passed = {pair: n for pair, n in passed.items() if pair[0] != effect.job}
                for waiter, nodes in awaits.items():
                    if waiter != effect.job and set(nodes) & set(effect.nodes):
                        pair = waiter, effect.job
                        passed[pair] = passed.get(pair, 0) + 1
        assert all(times <= 1 for times in passed.values())


def _asks(policy: PermitPolicy, job: JobId) -> bool:
    permit = policy.permit(job)
    assert permit is not None
    return permit.stage is PermitStage.WAITING and permit.heard_s is not None


def _awaits(policy: PermitPolicy, job: JobId) -> tuple[NodeId, ...]:
    permit = policy.permit(job)
    return permit.awaits if permit is not None else ()


def _next(policy: PermitPolicy, job: JobId, stubborn: bool) -> PermitEvent:
    permit = policy.permit(job)
    assert permit is not None
    if permit.holding:
        if stubborn:
            return Beat(job=job, epoch=permit.epoch)
        return Leave(job=job, epoch=permit.epoch)
    kind = permit.kind if permit.stage is PermitStage.WAITING and permit.kind else ROLLOUT
    return Enter(job=job, kind=kind, holder="first")


def _asked(policy: PermitPolicy, job: JobId, now: float) -> None:
    permit = policy.permit(job)
    assert permit is not None
    kind = permit.kind if permit.stage is PermitStage.WAITING and permit.kind else ROLLOUT
    if not permit.holding:
        holder = permit.holder or "first"
        policy.observe(Enter(job=job, kind=kind, holder=holder), now=now)
