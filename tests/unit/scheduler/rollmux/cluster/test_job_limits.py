"""A job's declarations: weight syncs, curves of completion, rollouts that are not divisible."""

from copy import deepcopy

import msgspec
import pytest

from harvester.contracts.ids import Epoch
from scheduler.model import Completion, JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.cluster_record import ClusterRecord, restore, snapshot
from scheduler.rollmux.cluster.job_limits import permit_terms, spec_fault
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.permits.events import EndPermit, PermitEndReason
from scheduler.rollmux.planner.planner import GroupPlanner
from tests.unit.scheduler.rollmux.cluster.submissions import ROLLOUT, TRAINING, cluster, submission
from tests.unit.scheduler.rollmux.plan.test_plan_and_control import NoPermits

SYNC = PhaseKind.SYNC


def _declared(*kinds: PhaseKind, nodes: int = 0, mean_s: float | None = None) -> JobSpec:
    sides = {one.kind: one for one in submission("a").phases}
    sides[SYNC] = PhaseSpec(kind=SYNC, max_s=4.0, nodes=nodes, mean_s=mean_s)
    return msgspec.structs.replace(submission("a"), phases=tuple(sides[kind] for kind in kinds))


SYNCED = _declared(ROLLOUT, TRAINING, SYNC)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (SYNCED, ""),
        (_declared(ROLLOUT, TRAINING), ""),
        (_declared(ROLLOUT, SYNC, TRAINING), "then a sync or none"),
        (_declared(ROLLOUT, TRAINING, SYNC, SYNC), "then a sync or none"),
        (_declared(ROLLOUT, TRAINING, SYNC, nodes=1), "sync: holds no node"),
        (_declared(ROLLOUT, TRAINING, SYNC, mean_s=5.0), "sync: mean_s is 0.001 to max_s"),
        (submission("a", 1e-9, 1e-9), "rollout: max_s is 0.001 to"),
        (_declared(ROLLOUT, TRAINING, SYNC, mean_s=1e-170), "sync: mean_s is 0.001 to max_s"),
    ],
)
def test_a_sync_follows_the_training_and_no_phase_is_too_short(given: JobSpec, said: str) -> None:
    assert said in spec_fault(given)
    assert bool(said) == bool(spec_fault(given))


def test_a_sync_s_permit_names_no_node() -> None:
    terms = permit_terms(SYNCED, ("r0",), ("t0",), accelerators=8)  # type: ignore[arg-type]
    assert terms is not None
    assert [(one.kind, one.nodes) for one in terms.phases][2] == (SYNC, ())


def _with_curve(*points: tuple[float, float], divisible: bool = True) -> JobSpec:
    rollout, training = submission("a").phases
    curve = tuple(Completion(*point) for point in points)
    rollout = msgspec.structs.replace(rollout, curve=curve, divisible=divisible)
    return msgspec.structs.replace(submission("a"), phases=(rollout, training))


@pytest.mark.parametrize(
    "points", [((0.5, 0.8), (0.4, 0.9)), ((0.5, 1.1),), ((0.5, float("nan")),)]
)
def test_a_curve_rises_between_nothing_and_all(points: tuple[tuple[float, float], ...]) -> None:
    assert spec_fault(_with_curve((0.5, 0.8))) == ""
    assert "curve" in spec_fault(_with_curve(*points))


@pytest.mark.parametrize(
    ("given", "leaves_at", "keeps", "least", "learns"),
    [
        (submission("a"), 1.0, 1, 1, True),
        (_with_curve((0.5, 0.8)), 0.8, 2, 1, True),
        (_with_curve((0.5, 0.8), divisible=False), 1.0, 1, 0, False),
    ],
)
def test_a_tail_leaves_where_the_declared_completion_says_until_its_own_is_seen(
    given: JobSpec, leaves_at: float, keeps: int, least: int, learns: bool
) -> None:
    terms = permit_terms(given, ("r0",), ("t0",), accelerators=8)  # type: ignore[arg-type]
    assert terms is not None
    rollout = terms.phases[0]
    assert (rollout.tail_ratio, rollout.tail_accelerators) == (leaves_at, keeps)
    assert (rollout.least_accelerators, rollout.learn_tail) == (least, learns)


def _policy() -> ClusterPolicy:
    policy = ClusterPolicy(cluster(cold_start_s=0.0), NoPermits())
    policy.submit(SYNCED, now=0.0)
    policy.begin_phase(SYNCED.job)
    return policy


def _done(
    policy: ClusterPolicy,
    kind: PhaseKind,
    solo_s: float,
    *,
    now: float,
    earlier_lost_s: float = 0.0,
) -> None:
    end = EndPermit(
        job=SYNCED.job,
        kind=kind,
        epoch=Epoch(1),
        ended=PermitEndReason.DONE,
        reason="",
        solo_s=solo_s,
        earlier_lost_s=earlier_lost_s,
    )
    policy.complete_phase(end, None, now=now)


def test_an_iteration_ends_with_its_sync_and_all_of_it_was_time_alone() -> None:
    policy = _policy()
    placed, facts = policy.placements[SYNCED.job], policy.planner.facts[SYNCED.job]
    _done(policy, ROLLOUT, 40.0, now=40.0)
    _done(policy, TRAINING, 15.0, now=55.0)
    assert placed.iterations == 0
    _done(policy, SYNC, 3.0, now=58.0)
    assert placed.iterations == 1
    assert facts.account.solo_s == 58.0
    assert facts.settled_slowdown(58.0) == 1.0


def test_time_that_earlier_tails_lost_is_no_time_alone_and_teaches_no_duration() -> None:
    policy = _policy()
    facts = policy.planner.facts[SYNCED.job]
    _done(policy, ROLLOUT, 40.0, now=40.0)
    untouched = deepcopy(facts.rollout)
    untouched.observe(40.0)
    _done(policy, ROLLOUT, 40.0, now=90.0, earlier_lost_s=10.0)
    assert facts.account.solo_s == 70.0
    assert facts.rollout.mean_s == untouched.mean_s


def test_a_restart_between_training_and_sync_goes_on_there() -> None:
    policy = _policy()
    for kind, solo_s, now in ((ROLLOUT, 40.0, 40.0), (TRAINING, 15.0, 55.0)):
        _done(policy, kind, solo_s, now=now)
    again = ClusterPolicy(policy.config, NoPermits())
    restore(again, msgspec.convert(snapshot(policy), ClusterRecord))
    before, after = (one.planner.facts[SYNCED.job] for one in (policy, again))
    assert (after.next_phase, after.open_s) == (SYNC, 55.0)
    assert after.belief() == before.belief()
    after.lose_iteration()
    assert after.account.solo_s == 0.0


def test_a_restart_knows_the_nodes_whose_memory_has_a_job_s_state() -> None:
    policy = _policy()
    again = ClusterPolicy(policy.config, NoPermits())
    restore(again, msgspec.convert(snapshot(policy), ClusterRecord))
    assert again.residency.nodes_of(SYNCED.job) == policy.residency.nodes_of(SYNCED.job) != ()


def test_a_restart_goes_on_at_once_after_the_last_of_very_many_names() -> None:
    policy, again = _policy(), ClusterPolicy(cluster(), NoPermits())
    used = policy.placements[SYNCED.job].group
    assert used is not None
    kept = msgspec.json.encode(snapshot(policy)).replace(used.encode(), b"group-1000000000000")
    restore(again, msgspec.json.decode(kept, type=ClusterRecord))
    again.submit(submission("b", slo=1.0), now=1.0)
    given = again.placements[submission("b").job].group
    assert given is not None
    assert int(given.removeprefix("group-")) > 10**12


@pytest.mark.parametrize(("counts", "credit_s"), [(False, 60.0), (True, -140.0)])
def test_whether_an_slo_counts_the_wait_for_a_place_is_a_setting(
    counts: bool, credit_s: float
) -> None:
    config = cluster("r0", "t0", cold_start_s=40.0, slo_counts_queueing=counts)
    policy = ClusterPolicy(config, NoPermits())
    first, late = submission("first", slo=1.0), submission("late", slo=1.5)
    policy.submit(first, now=0.0)
    policy.submit(late, now=100.0)
    assert late.job not in policy.planner.facts
    policy.end_job(first.job, now=300.0)
    assert policy.planner.facts[late.job].account.credit_s(300.0) == credit_s
    assert policy.planner.facts[late.job].seen_s == 340.0


class _Failing(Judge):
    """Fails on one job, as on a number that no limit foresaw."""

    def belief(self, facts: JobFacts) -> Belief:
        if facts.spec.job == "odd":
            raise ZeroDivisionError
        return facts.belief()


def test_a_job_that_the_planner_fails_on_is_no_job_and_fails_no_other() -> None:
    config = cluster()
    planner = GroupPlanner(_Failing(), config.types, config.planner)
    policy = ClusterPolicy(config, NoPermits(), planner)
    with pytest.raises(ZeroDivisionError):
        policy.submit(submission("odd"), now=0.0)
    assert not policy.placements
    assert not planner.facts
    policy.submit(submission("a"), now=1.0)
    assert policy.placements[submission("a").job].at is not None


def test_a_job_whose_time_alone_is_all_taken_back_has_not_kept_its_slo() -> None:
    """A negative time alone would make the slow-down negative, which is within every SLO."""
    policy = _policy()
    facts = policy.planner.facts[SYNCED.job]
    _done(policy, ROLLOUT, 40.0, now=40.0, earlier_lost_s=30.0)
    facts.lose_iteration()
    assert facts.account.solo_s == 0.0
    assert facts.settled_slowdown(60.0) > SYNCED.slo
