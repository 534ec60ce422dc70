"""Rounds that a planner gives: followed, waited for with patience, and fair."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.clock import VirtualClock
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import Epoch, JobId
from scheduler.phases.desk import PermitDesk
from scheduler.phases.embedded import EmbeddedControl
from scheduler.phases.rounds import give_round
from scheduler.phases.wire import Enter, Granted, Leave, Round, Waiting
from scheduler.policy.groups.rounds import search_order
from scheduler.policy.groups.stages import CYCLIC, Rules
from scheduler.policy.phases.events import (
    EnqueuePhase,
    JobLeft,
    KeepRound,
    Refuse,
    RoundGiven,
)
from scheduler.policy.phases.permits import PermitPolicy
from scheduler.policy.phases.terms import TURNS_MAX
from tests.unit.scheduler.groups.stage_jobs import occupant
from tests.unit.scheduler.phases.said import CONFIG, ROLLOUT, TRAINING, Group, granted, of, terms
from tests.unit.scheduler.phases.turning import Turning

EQUAL = {"a": (10.0, 5.0), "b": (10.0, 5.0)}


def _pair(**durations_s: tuple[float, float]) -> Turning:
    return Turning((terms("a"), terms("b")), EQUAL | durations_s)


def test_turns_are_taken_in_the_order_of_the_round() -> None:
    jobs = _pair()
    jobs.give_round("aab", patience_s=60.0)
    jobs.begin("a", "b")
    jobs.run(400.0)
    assert jobs.order().startswith("aabaabaab")
    assert jobs.order(TRAINING).startswith("aabaabaab")
    assert not jobs.missed


def test_without_a_round_the_same_jobs_alternate() -> None:
    jobs = _pair()
    jobs.begin("a", "b")
    jobs.run(400.0)
    assert jobs.order().startswith("ababab")


def test_who_came_first_goes_behind_whose_turn_is_earlier() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    group.policy.observe(_round("abc"), now=0.0)
    group.ask("c")
    group.ask("b")
    enqueued = of(EnqueuePhase, group.ask("a"))
    assert [(each.job, each.ticket) for each in enqueued] == [("a", 2), ("b", 3)]
    assert [granted(group.end(job)) for job in "cab"] == [["a"], ["b"], []]


def test_a_node_is_kept_for_a_late_job_only_as_long_as_the_round_is_patient() -> None:
    jobs = _pair(a=(10.0, 1000.0))
    jobs.give_round("aab", patience_s=7.0)
    jobs.begin("a", "b")
    jobs.run(900.0)
    # a rolls out until 10; b could start then, and does when patience is over.
    assert next(at for at, job, kind in jobs.grants if (job, kind) == ("b", ROLLOUT)) == 17.0
    assert jobs.missed[0] == (17.0, "a", ROLLOUT)


def test_who_was_missed_is_not_waited_for_again_before_it_has_run() -> None:
    jobs = Turning(
        (terms("a"), terms("b", training="t1"), terms("c", training="t1")),
        {"a": (10.0, 1000.0), "b": (10.0, 5.0), "c": (10.0, 5.0)},
    )
    jobs.give_round("aabc", patience_s=7.0)
    jobs.begin("a", "b", "c")
    jobs.run(900.0)
    begun = [at for at, _, kind in jobs.grants if kind is ROLLOUT]
    assert begun[1] == 17.0
    # From here on b and c fill the node without a pause.
    assert all(later - earlier == 10.0 for earlier, later in itertools.pairwise(begun[1:]))
    assert {job for _, job, kind in jobs.missed if kind is ROLLOUT} == {"a"}


def test_who_comes_back_has_its_turn_and_none_to_catch_up() -> None:
    placed = (terms("a"), terms("b", training="t1"))
    jobs = Turning(placed, EQUAL | {"a": (10.0, 1000.0)})
    jobs.give_round("aab", patience_s=7.0)
    jobs.begin("a", "b")
    jobs.run(900.0)
    jobs.durations_s = EQUAL
    jobs.run(1400.0)
    back = jobs.order()[jobs.order().rindex("bb") + 2 :]
    assert "aaa" not in back
    assert "aab" in back


def test_nobody_waits_for_a_job_that_failed_left_or_has_not_come() -> None:
    group = Group(terms("a"), terms("b"))
    group.policy.observe(_round("ab"), now=0.0)
    assert granted(group.ask("b")) == ["b"]
    group.end("b")
    assert granted(group.ask("b", TRAINING)) == ["b"]
    group.end("b")
    assert granted(group.ask("a")) == ["a"]
    group.end("a", failed="broke")
    assert granted(group.ask("b")) == ["b"]


def test_a_job_that_leaves_frees_its_round_of_it() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    group.policy.observe(_round("abcb"), now=0.0)
    effects = group.policy.observe(JobLeft(job=JobId("a")), now=0.0)
    assert {each.job: each.turns for each in of(KeepRound, effects)} == {
        "b": ("b", "c", "b"),
        "c": ("b", "c", "b"),
    }
    effects = group.policy.observe(JobLeft(job=JobId("b")), now=0.0)
    assert [(each.job, each.turns) for each in of(KeepRound, effects)] == [("c", ())]


def test_a_new_round_frees_who_was_in_one_with_its_jobs() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    group.policy.observe(_round("ab"), now=0.0)
    effects = group.policy.observe(_round("bc"), now=0.0)
    assert {each.job: "".join(each.turns) for each in of(KeepRound, effects)} == {
        "a": "",
        "b": "bc",
        "c": "bc",
    }
    effects = group.policy.observe(_round("b"), now=0.0)
    assert {each.job: each.turns for each in of(KeepRound, effects)} == {"b": (), "c": ()}


def test_a_round_given_to_a_waiting_line_orders_it_at_once() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    for job in "abc":
        group.ask(job)
    group.policy.observe(_round("acb"), now=0.0)
    assert granted(group.end("a")) == ["c"]


@pytest.mark.parametrize(
    ("turns", "patience_s", "said"),
    [
        ("ax", 1.0, "not placed: x"),
        ("", 1.0, "1 to"),
        ("ab" * TURNS_MAX, 1.0, "1 to"),
        ("ab", -1.0, "patience_s"),
        ("ab", float("nan"), "patience_s"),
        ("ab", float("inf"), "patience_s"),
    ],
)
def test_a_round_that_cannot_be_kept_changes_nothing(
    turns: str, patience_s: float, said: str
) -> None:
    group = Group(terms("a"), terms("b"))
    group.policy.observe(_round("ab"), now=0.0)
    before = group.policy.snapshot()
    (refused,) = group.policy.observe(_round(turns, patience_s), now=0.0)
    assert isinstance(refused, Refuse)
    assert said in refused.reason
    assert group.policy.snapshot() == before


def test_others_on_the_nodes_are_not_held_up_by_more_than_patience() -> None:
    placed = (terms("a"), terms("b"), terms("z"))
    jobs = Turning(placed, {"a": (10.0, 40.0), "b": (10.0, 5.0), "z": (3.0, 3.0)})
    jobs.give_round("aab", patience_s=4.0)
    jobs.begin("a", "b", "z")
    jobs.run(600.0)
    begun = [at for at, job, kind in jobs.grants if (job, kind) == ("z", ROLLOUT)]
    assert len(begun) > 10
    assert max(b - a for a, b in itertools.pairwise(begun)) <= 100.0


def test_permits_under_the_searched_round_run_as_it_was_forecast() -> None:
    durations_s = {"l": (800.0, 100.0), "s": (150.0, 100.0)}
    members = [
        occupant(*durations_s["l"], slo=1.5, rollout=1, training=4),
        occupant(*durations_s["s"], slo=1.5, rollout=2, training=4),
    ]
    found = search_order(members, rules=Rules(CYCLIC, False, False, 0.0, 0.0, 0.0))
    turns = "".join("ls"[at] for at in found.turns)
    placed = (terms("l", rollout="r0"), terms("s", rollout="r1"))
    jobs = Turning(placed, durations_s)
    jobs.give_round(turns, patience_s=found.patience_s)
    jobs.begin("l", "s")
    jobs.run(40_000.0)
    for job, forecast in zip("ls", found.found.slowdowns, strict=True):
        alone_s = jobs.trained[job] * sum(durations_s[job])
        assert 40_000.0 / alone_s == pytest.approx(forecast, rel=0.05)


_durations = st.tuples(st.integers(2, 20), st.integers(2, 20))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from("abc"), min_size=3, max_size=8).filter(lambda t: len(set(t)) > 1),
    st.tuples(_durations, _durations, _durations),
    st.sampled_from((0.0, 3.0, 1000.0)),
)
def test_nobody_starves_whatever_the_round(
    turns: list[str], lengths_s: tuple[tuple[int, int], ...], patience_s: float
) -> None:
    """Between two rollouts of one job every other has its turns of one round and one more.

    Who is in no round goes once between any two turns.
    """
    jobs = Turning(
        tuple(map(terms, "abc")),
        {job: (float(a), float(b)) for job, (a, b) in zip("abc", lengths_s, strict=True)},
    )
    jobs.give_round("".join(turns), patience_s=patience_s)
    jobs.begin("a", "b", "c")
    jobs.run(700.0)
    order = jobs.order()
    for job in "abc":
        assert order.count(job) > 2
        for between in order.split(job)[1:-1]:
            for other in set("abc") - {job}:
                inside = {job, other} <= set(turns)
                most = turns.count(other) + 1 if inside else len(turns) + 1
                assert between.count(other) <= most


def test_a_restart_goes_on_in_the_same_round() -> None:
    jobs = _pair()
    jobs.give_round("aab", patience_s=60.0)
    jobs.begin("a", "b")
    jobs.run(37.0)
    again = PermitPolicy(CONFIG)
    again.restore(msgspec.json.decode(msgspec.json.encode(jobs.policy.snapshot())))
    assert again.snapshot() == jobs.policy.snapshot()


def test_a_planner_gives_a_round_to_a_running_control(tmp_path) -> None:
    state = tmp_path / "state.sqlite"
    desk = PermitDesk(CONFIG, VirtualClock(), state=state)
    for job in ("a", "b"):
        desk.place(terms(job))
    desk.call(Round(turns=(JobId("b"), JobId("a")), patience_s=5.0))
    desk.close()
    desk = PermitDesk(CONFIG, VirtualClock(), state=state)
    assert _enter(desk, "a") == Granted(
        epoch=Epoch(1), nodes=terms("a").phases[0].nodes, lease_s=10
    )
    assert isinstance(_enter(desk, "b"), Waiting)
    standing = desk.policy.standing(JobId("b"))
    assert standing is not None
    assert (standing.turns, standing.turn_patience_s) == (("b", "a"), 5.0)
    desk.leave(Leave(job=JobId("a"), epoch=Epoch(1)))
    desk.close()


def test_a_round_of_jobs_that_are_not_there_is_a_clear_error() -> None:
    control = EmbeddedControl()
    try:
        with pytest.raises(ConfigError, match="round a b: not placed: a, b"):
            give_round(control, [JobId("a"), JobId("b")], patience_s=1.0)
    finally:
        control.close()


def _round(turns: str, patience_s: float = 5.0) -> RoundGiven:
    return RoundGiven(turns=tuple(map(JobId, turns)), patience_s=patience_s)


def _enter(desk: PermitDesk, job: str) -> object:
    return desk.enter(Enter(job=JobId(job), kind=ROLLOUT, holder=f"{job}.1"))
