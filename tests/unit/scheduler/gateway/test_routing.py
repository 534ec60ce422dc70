"""Routing of turns to engines."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from scheduler.gateway.policy.engine_load import PROBE_TURNS, STALL_PAUSE_S
from scheduler.gateway.policy.routing import (
    RoutingPolicy,
)
from scheduler.gateway.policy.routing_events import (
    ContextLimited,
    DeferTurn,
    DispatchReason,
    DispatchTurn,
    EngineOffered,
    EngineWithdrawn,
    ForgetPrefix,
    QueueTurn,
    Refusal,
    RefuseTurn,
    RequestArrived,
    RequestLeft,
    RoutingConfig,
    TrajectoryEnded,
    TurnArrived,
    TurnCleared,
    TurnLeft,
    TurnWithdrawn,
)
from scheduler.gateway.policy.versions_events import Retarget, TimePassed
from scheduler.model import EngineKind

JOB = JobId("job")
DEDICATED, GUEST = EngineKind.DEDICATED, EngineKind.GUEST


def _target(version: int = 1, job: JobId = JOB) -> Retarget:
    return Retarget(job=job, version=WeightVersion(version))


def _offer(
    engine: str,
    kind: EngineKind = DEDICATED,
    *,
    concurrency: int = 2,
    version: int = 1,
    until_s: float | None = None,
    context: int = 0,
    numerics: str = "",
    idle_ratio: float | None = None,
) -> EngineOffered:
    return EngineOffered(
        engine=EngineId(engine),
        kind=kind,
        concurrency=concurrency,
        job=JOB,
        version=WeightVersion(version),
        usable_until_s=until_s,
        context_tokens=context,
        numerics=numerics,
        idle_ratio=idle_ratio,
    )


def _turn(name: str, trajectory: str = "", **pins) -> TurnArrived:
    return TurnArrived(
        turn=name, trajectory=TrajectoryId(trajectory or name), job=JOB, tokens=16, **pins
    )


def _policy(*offers: EngineOffered, **config) -> RoutingPolicy:
    policy = RoutingPolicy(RoutingConfig(**config))
    policy.observe(_target(), now=0.0)
    for offer in offers:
        policy.observe(offer, now=0.0)
    return policy


def _engine_of(effects) -> str:
    (effect,) = effects
    assert isinstance(effect, DispatchTurn)
    return effect.engine


def test_an_ended_trajectory_and_its_samples_leave_no_trace() -> None:
    policy = _policy(_offer("a", concurrency=8), _offer("b", concurrency=8))
    for name in ("t", "t.0", "t.1", "t.x", "u"):
        policy.observe(_turn(name), now=0.0)
    end = TrajectoryEnded(job=JOB, trajectory=TrajectoryId("t"))
    forgotten = policy.observe(end, now=1.0)
    assert all(isinstance(each, ForgetPrefix) and each.job == JOB for each in forgotten)
    assert [each.trajectory for each in forgotten] == ["t", "t.0", "t.1"]
    assert policy.observe(end, now=1.0) == ()


def test_a_turn_goes_only_where_its_prompt_and_whole_output_fit() -> None:
    policy = _policy(_offer("small", context=512), _offer("large", GUEST, context=4096))
    assert _engine_of(policy.observe(_turn("1", context_tokens=512), now=0.0)) == "small"
    assert _engine_of(policy.observe(_turn("2", context_tokens=513), now=0.0)) == "large"


def test_a_turn_that_stalls_counts_the_free_places_of_the_engines_that_it_may_go_to() -> None:
    policy = _policy(_offer("a"))
    assert _engine_of(policy.observe(_turn("1"), now=0.0)) == "a"
    assert policy.other_places(_turn("1"), now=0.0) == 0
    policy.observe(_offer("b", concurrency=3), now=0.0)
    assert policy.other_places(_turn("1"), now=0.0) == 3
    assert policy.other_places(_turn("1", avoid=(EngineId("b"),)), now=0.0) == 0
    assert _engine_of(policy.observe(_turn("2", avoid=(EngineId("a"),)), now=0.0)) == "b"
    assert policy.other_places(_turn("1"), now=0.0) == 2


def test_a_turn_that_fits_waits_for_its_engine_and_not_for_a_smaller_one() -> None:
    policy = _policy(_offer("small", context=512), _offer("large", concurrency=1, context=4096))
    policy.observe(_turn("1", context_tokens=4000), now=0.0)
    assert policy.observe(_turn("2", context_tokens=4000), now=0.0) == (QueueTurn(turn="2"),)
    assert policy.other_places(_turn("1", context_tokens=4000), now=0.0) == 0
    (placed,) = policy.observe(TurnLeft(turn="1", tokens=16, seconds=0.1), now=0.1)
    assert (placed.turn, placed.engine) == ("2", "large")


def test_a_moved_turn_does_not_go_back_to_a_smaller_engine_for_its_prefix() -> None:
    policy = _policy(_offer("a", context=512), _offer("b", context=4096))
    assert _engine_of(policy.observe(_turn("1", "t", context_tokens=100), now=0.0)) == "a"
    policy.observe(TurnLeft(turn="1", tokens=16, seconds=0.1), now=0.1)
    moved = _turn("2", "t", context_tokens=1000, resumed=True)
    assert _engine_of(policy.observe(moved, now=0.2)) == "b"


def test_a_turn_that_waits_for_a_large_engine_holds_up_no_smaller_one() -> None:
    policy = _policy(_offer("small", concurrency=1, context=512))
    policy.observe(_offer("large", concurrency=1, context=4096), now=0.0)
    policy.observe(_turn("large1", context_tokens=4000), now=0.0)
    policy.observe(_turn("small1", context_tokens=100), now=0.0)
    policy.observe(_turn("large2", context_tokens=4000), now=0.1)
    policy.observe(_turn("small2", context_tokens=100), now=0.2)
    (placed,) = policy.observe(TurnLeft(turn="small1", tokens=16, seconds=0.1), now=0.3)
    assert (placed.turn, placed.engine) == ("small2", "small")


def test_turns_of_equal_wait_are_ordered_by_size_when_a_smaller_engine_joins() -> None:
    policy = _policy()
    policy.observe(_turn("large", context_tokens=4000), now=0.0)
    policy.observe(_turn("small", context_tokens=100), now=0.1)
    (placed,) = policy.observe(_offer("e", context=512), now=0.2)
    assert placed.turn == "small"
    assert policy.queued_turns == 1


def test_a_freed_place_goes_to_the_oldest_turn_whatever_its_size() -> None:
    policy = _policy(_offer("large", concurrency=1, context=4096), _offer("s", context=512))
    policy.observe(EngineWithdrawn(engine=EngineId("s")), now=0.0)
    policy.observe(_turn("first", context_tokens=100), now=0.0)
    for at, (name, tokens) in enumerate(
        [("small1", 100), ("large1", 4000), ("small2", 100), ("large2", 4000)]
    ):
        policy.observe(_turn(name, context_tokens=tokens), now=0.1 + at)
    order, last = [], "first"
    for at in range(4):
        left = TurnLeft(turn=last, tokens=16, seconds=0.1)
        (placed,) = policy.observe(left, now=10.0 + at)
        last = placed.turn
        order.append(last)
    assert order == ["small1", "large1", "small2", "large2"]


def test_a_turn_that_no_engine_fits_is_refused_with_the_limit() -> None:
    policy = _policy(_offer("small", context=512), _offer("large", context=4096))
    policy.observe(ContextLimited(tokens=4096), now=0.0)
    (refused,) = policy.observe(_turn("1", context_tokens=4097), now=0.0)
    assert (refused.refusal, "4096" in refused.reason) == (Refusal.CONTEXT, True)
    assert _engine_of(policy.observe(_turn("2", context_tokens=4096), now=0.0)) == "large"


def test_a_waiting_turn_is_refused_once_the_limit_is_known() -> None:
    policy = _policy(_offer("small", context=512))
    assert policy.observe(_turn("1", context_tokens=1000), now=0.0) == (QueueTurn(turn="1"),)
    (refused,) = policy.observe(ContextLimited(tokens=512), now=1.0)
    assert (refused.turn, refused.refusal) == ("1", Refusal.CONTEXT)
    assert policy.queued_turns == 0


def test_an_engine_of_unknown_context_may_serve_any_turn() -> None:
    policy = _policy(_offer("a"))
    policy.observe(ContextLimited(tokens=None), now=0.0)
    assert _engine_of(policy.observe(_turn("1", context_tokens=1 << 20), now=0.0)) == "a"


def test_goes_back_to_the_trajectorys_last_engine() -> None:
    policy = _policy(_offer("a"), _offer("b"))
    first = _engine_of(policy.observe(_turn("1", "t"), now=0.0))
    policy.observe(TurnLeft(turn="1", tokens=16, seconds=0.1), now=0.1)
    (again,) = policy.observe(_turn("2", "t"), now=0.2)
    assert isinstance(again, DispatchTurn)
    assert (again.engine, again.reason) == (first, DispatchReason.AFFINITY)


def test_queues_when_every_place_is_taken_and_serves_begun_trajectories_first() -> None:
    policy = _policy(_offer("a", concurrency=1))
    policy.observe(_turn("1", "begun"), now=0.0)
    assert policy.observe(_turn("2", "fresh"), now=0.0) == (QueueTurn(turn="2"),)
    policy.observe(_turn("3", "begun"), now=0.0)
    policy.observe(_turn("4", "other", resumed=True), now=0.0)
    order = []
    for ending in ("1", "4", "3"):
        (placed,) = policy.observe(TurnLeft(turn=ending, tokens=16, seconds=0.1), now=1.0)
        order.append(placed.turn)
    assert order == ["4", "3", "2"]


def _waiting_for_their_engines(policy: RoutingPolicy) -> tuple[str, str]:
    """Fills `a` and `b`, one place each; the older queued turn was on `a`, the younger on `b`."""
    on = {_engine_of(policy.observe(_turn(f"{t}1", t), now=0.0)): t for t in ("t", "u")}
    for engine in ("a", "b"):
        policy.observe(_turn(f"other-{engine}"), now=0.05)
    for engine in ("a", "b"):
        freed = TurnLeft(turn=f"{on[engine]}1", tokens=16, seconds=0.1)
        assert _engine_of(policy.observe(freed, now=0.1)) == engine
    for engine in ("a", "b"):
        policy.observe(_turn(f"{on[engine]}2", on[engine]), now=0.2)
    return f"{on['a']}2", f"{on['b']}2"


def test_a_freed_place_goes_to_a_queued_turn_whose_prefix_is_there() -> None:
    policy = _policy(_offer("a", concurrency=1), _offer("b", concurrency=1))
    older, younger = _waiting_for_their_engines(policy)
    freed = TurnLeft(turn="other-b", tokens=16, seconds=0.1)
    (placed,) = policy.observe(freed, now=0.3)
    assert (placed.turn, placed.reason) == (younger, DispatchReason.AFFINITY)
    (placed,) = policy.observe(TurnLeft(turn="other-a", tokens=16, seconds=0.1), now=0.3)
    assert (placed.turn, placed.reason) == (older, DispatchReason.AFFINITY)


def test_first_come_first_served_where_prefixes_are_cheap() -> None:
    policy = _policy(_offer("a", concurrency=1), begun_first=False)
    policy.observe(_turn("1", "begun"), now=0.0)
    policy.observe(_turn("2", "fresh"), now=0.0)
    policy.observe(_turn("3", "begun"), now=0.0)
    (placed,) = policy.observe(TurnLeft(turn="1", tokens=16, seconds=0.1), now=0.1)
    assert placed.turn == "2"


def test_an_older_turn_is_passed_over_for_a_while_only() -> None:
    policy = _policy(_offer("a", concurrency=1), _offer("b", concurrency=1), patience_s=0.5)
    older, _ = _waiting_for_their_engines(policy)
    freed = TurnLeft(turn="other-b", tokens=16, seconds=0.1)
    (placed,) = policy.observe(freed, now=0.8)
    assert (placed.turn, placed.engine) == (older, "b")
    assert policy.queued_turns == 1


def test_queued_turns_take_dedicated_places_before_guests() -> None:
    policy = _policy(_offer("d", concurrency=1), _offer("g", GUEST, concurrency=1))
    for name in ("1", "2", "3", "4"):
        policy.observe(_turn(name), now=0.0)
    policy.observe(EngineWithdrawn(engine=EngineId("d")), now=0.0)
    policy.observe(EngineWithdrawn(engine=EngineId("g")), now=0.0)
    policy.observe(TurnLeft(turn="1", tokens=16, seconds=0.1), now=1.0)
    policy.observe(TurnLeft(turn="2", tokens=16, seconds=0.1), now=1.0)
    assert policy.queued_turns == 2
    assert _engine_of(policy.observe(_offer("g", GUEST, concurrency=1), now=1.0)) == "g"
    assert _engine_of(policy.observe(_offer("d", concurrency=1), now=1.0)) == "d"


def _measured(dedicated_s: float, guest_s: float) -> RoutingPolicy:
    """Two engines of four places, both empty again; what turns took on each."""
    policy = _policy(_offer("d", concurrency=4), _offer("g", GUEST, concurrency=4))
    placed = {name: _engine_of(policy.observe(_turn(name), now=0.0)) for name in "abcdefgh"}
    assert set(placed.values()) == {"d", "g"}
    for name, engine in placed.items():
        seconds = dedicated_s if engine == "d" else guest_s
        policy.observe(TurnLeft(turn=name, tokens=16, seconds=seconds), now=2.0)
    return policy


def _tail_on(policy: RoutingPolicy) -> list[str]:
    return [_engine_of(policy.observe(_turn(f"tail{n}"), now=3.0)) for n in range(3)]


def test_the_tail_avoids_an_engine_that_was_measured_slow() -> None:
    assert _tail_on(_measured(dedicated_s=0.05, guest_s=2.0)) == ["d"] * 3


def test_the_tail_stays_off_a_guest_unless_it_is_clearly_faster() -> None:
    assert _tail_on(_measured(dedicated_s=0.12, guest_s=0.1)) == ["d"] * 3
    assert _tail_on(_measured(dedicated_s=2.0, guest_s=0.1)) == ["g"] * 3


def test_a_guest_that_fell_silent_is_left_alone_then_tried_then_used_again() -> None:
    guest = EngineId("g")
    offers = (_offer("d", concurrency=8), _offer("g", GUEST, concurrency=8))
    policy = _policy(*offers, default_turn_tokens=16.0)
    engines = {}
    for n in range(24):
        for effect in policy.observe(_turn(str(n)), now=0.0):
            if isinstance(effect, DispatchTurn):
                engines[effect.turn] = effect.engine
    on_guest = [turn for turn, engine in engines.items() if engine == guest]
    elsewhere = [turn for turn, engine in engines.items() if engine != guest]
    assert len(on_guest) == PROBE_TURNS

    def dispatched_when_left(turn: str, now: float, **left: Any) -> list[EngineId]:
        effects = policy.observe(TurnLeft(turn=turn, **left), now=now)
        return [effect.engine for effect in effects if isinstance(effect, DispatchTurn)]

    served: dict[str, Any] = {"tokens": 16, "seconds": 0.1}
    assert guest not in dispatched_when_left(elsewhere.pop(), 0.6, **served)
    for turn in on_guest:
        assert guest not in dispatched_when_left(turn, 0.6, stalled=True)
    assert guest not in dispatched_when_left(elsewhere.pop(), 0.5 + STALL_PAUSE_S, **served)
    probes = policy.observe(TimePassed(), now=0.6 + STALL_PAUSE_S)
    assert [probe.engine for probe in probes] == [guest] * PROBE_TURNS
    assert dispatched_when_left(probes[0].turn, 1.7, **served).count(guest) > 1


def test_the_tail_leaves_a_slow_last_engine_though_its_prefix_is_there() -> None:
    policy = _policy(_offer("g", GUEST))
    policy.observe(_turn("1", "t"), now=0.0)
    policy.observe(TurnLeft(turn="1", tokens=1, seconds=2.0), now=2.0)
    policy.observe(_offer("d"), now=2.0)
    assert _engine_of(policy.observe(_turn("2", "t"), now=2.0)) == "d"


def test_at_the_tail_a_guest_keeps_no_trajectory_unless_it_is_clearly_faster() -> None:
    policy = _policy(_offer("g", GUEST))
    policy.observe(_turn("1", "t"), now=0.0)
    policy.observe(TurnLeft(turn="1", tokens=16, seconds=0.1), now=0.1)
    policy.observe(_offer("d"), now=0.1)
    assert _engine_of(policy.observe(_turn("2", "t"), now=0.1)) == "d"


def test_a_guest_takes_no_turn_within_the_margin_of_its_lease() -> None:
    policy = _policy(_offer("g", GUEST, until_s=10.0), lease_margin_s=1.0)
    assert _engine_of(policy.observe(_turn("1"), now=8.9)) == "g"
    assert policy.observe(_turn("2"), now=9.1) == (QueueTurn(turn="2"),)
    renewed = policy.observe(_offer("g", GUEST, until_s=20.0), now=9.2)
    assert _engine_of(renewed) == "g"


def test_a_reload_is_in_force_for_the_choice_of_engines_too() -> None:
    policy = _policy(_offer("g", GUEST, until_s=10.0), trajectories=8)
    for name in ("t", "t.0", "t.1"):
        assert _engine_of(policy.observe(_turn(name), now=8.0)) == "g"
        policy.observe(TurnLeft(turn=name, tokens=16, seconds=0.1), now=8.0)
    policy.reconfigure(RoutingConfig(lease_margin_s=5.0, trajectories=1))
    assert policy.observe(_turn("1"), now=8.0) == (QueueTurn(turn="1"),)
    policy.observe(_offer("g", GUEST, until_s=20.0), now=8.0)
    end = TrajectoryEnded(job=JOB, trajectory=TrajectoryId("t"))
    assert policy.observe(end, now=8.0) == ()  # The newest is remembered alone.


def test_waits_for_the_target_version_and_refuses_one_that_is_served_nowhere() -> None:
    policy = _policy()
    assert policy.observe(_turn("1", exact=1), now=0.0) == (QueueTurn(turn="1"),)
    for name, pin in (("2", {"exact": 2}), ("3", {"minimum": 2})):
        (refused,) = policy.observe(_turn(name, pin_until_s=0.0, **pin), now=0.0)
        assert isinstance(refused, RefuseTurn)
        assert refused.refusal is Refusal.VERSION
        assert "job is at 1" in refused.reason


def _deferred(policy: RoutingPolicy, name: str, **pins) -> None:
    (deferred,) = policy.observe(_turn(name, **pins), now=0.0)
    assert isinstance(deferred, DeferTurn)
    assert policy.defers(name)


def test_a_turn_pinned_to_a_version_to_come_is_deferred_until_an_engine_serves_it() -> None:
    policy = _policy(_offer("a"))
    _deferred(policy, "exact", exact=2)
    _deferred(policy, "minimum", minimum=2)
    _deferred(policy, "later", minimum=3)
    policy.observe(EngineWithdrawn(engine=EngineId("a")), now=1.0)
    published = policy.observe(_target(2), now=1.0)
    assert published == (QueueTurn(turn="exact"), QueueTurn(turn="minimum"))
    served = policy.observe(_offer("a", version=2), now=2.0)
    assert {each.turn for each in served if isinstance(each, DispatchTurn)} == {"exact", "minimum"}
    assert policy.defers("later")


def test_a_deferred_turn_is_refused_when_its_patience_ends_and_not_before() -> None:
    policy = _policy(_offer("a"))
    _deferred(policy, "1", minimum=2, pin_until_s=5.0)
    assert policy.observe(TimePassed(), now=4.9) == ()
    (refused,) = policy.observe(TimePassed(), now=5.0)
    assert (refused.turn, refused.refusal) == ("1", Refusal.VERSION)
    assert policy.deferred_turns_of(JOB) == 0


def test_a_deferred_turn_whose_exact_version_is_passed_over_is_refused_at_once() -> None:
    policy = _policy(_offer("a"))
    _deferred(policy, "1", exact=2)
    (refused,) = policy.observe(_target(3), now=1.0)
    assert (refused.turn, refused.refusal) == ("1", Refusal.GONE)


def test_deferred_turns_are_no_demand_and_put_no_turn_off_the_tail() -> None:
    policy = _policy(_offer("d", concurrency=1), _offer("g", GUEST, concurrency=1))
    _deferred(policy, "1", minimum=2)
    assert (policy.queued_turns, policy.queued_turns_of(JOB)) == (0, 0)
    (dispatched,) = policy.observe(_turn("2"), now=0.0)
    assert dispatched.reason is DispatchReason.TAIL


def test_deferred_turns_fill_the_queues_bound_and_leave_it_with_their_client() -> None:
    policy = _policy(queue_turns=1)
    _deferred(policy, "1", minimum=2)
    (refused,) = policy.observe(_turn("2"), now=0.0)
    assert refused.refusal is Refusal.FULL
    assert policy.observe(TurnWithdrawn(turn="1"), now=0.0) == ()
    assert policy.room == 1


def test_a_turn_of_equal_numerics_goes_only_where_its_label_is() -> None:
    policy = _policy(_offer("a", numerics="x"), _offer("b", numerics="y"))
    for name in ("1", "2"):
        assert _engine_of(policy.observe(_turn(name, "t", numerics="y"), now=0.0)) == "b"
    assert policy.observe(_turn("3", numerics="y"), now=0.0) == (QueueTurn(turn="3"),)
    assert _engine_of(policy.observe(_turn("4"), now=0.0)) == "a"
    assert policy.other_places(_turn("1", numerics="y"), now=0.0) == 0


def test_numerics_that_no_engine_has_yet_are_waited_for() -> None:
    policy = _policy(_offer("a", numerics="x"))
    _deferred(policy, "1", numerics="z", pin_until_s=5.0)
    _deferred(policy, "2", numerics="z", pin_until_s=9.0)
    (refused,) = policy.observe(TimePassed(), now=5.0)
    assert (refused.turn, "known: 'x'" in refused.reason) == ("1", True)
    effects = policy.observe(_offer("b", numerics="z"), now=6.0)
    assert _went(effects) == {"2": "b"}


def test_a_turn_waits_for_an_engine_of_its_numerics_that_may_come_back() -> None:
    policy = _policy(_offer("a", numerics="x"), _offer("b", numerics="y"))
    policy.observe(EngineWithdrawn(engine=EngineId("b")), now=0.0)
    moved = _turn("1", numerics="y", resumed=True, pin_until_s=0.0)
    assert policy.observe(moved, now=1.0) == (QueueTurn(turn="1"),)


def test_a_pinned_turn_never_runs_on_another_version() -> None:
    policy = _policy(_offer("old", version=0), _offer("new", version=1))
    assert _engine_of(policy.observe(_turn("1", exact=0), now=0.0)) == "old"
    assert _engine_of(policy.observe(_turn("2", exact=1), now=0.0)) == "new"
    assert _engine_of(policy.observe(_turn("3", minimum=1), now=0.0)) == "new"


def test_a_waiting_turn_is_refused_once_its_version_is_gone() -> None:
    policy = _policy(_offer("a", concurrency=1))
    policy.observe(_turn("1", exact=1), now=0.0)
    policy.observe(_turn("2", exact=1), now=0.0)
    assert policy.observe(_target(2), now=1.0) == ()
    (refused,) = policy.observe(EngineWithdrawn(engine=EngineId("a")), now=1.0)
    assert (refused.turn, refused.refusal) == ("2", Refusal.GONE)
    assert policy.queued_turns == 0


def test_refuses_turns_of_a_job_that_is_not_active() -> None:
    policy = _policy(_offer("a"))
    policy.observe(_target(job=JobId("other")), now=0.0)
    (refused,) = policy.observe(_turn("1"), now=0.0)
    assert refused.refusal is Refusal.JOB


def test_a_request_is_admitted_whole_and_its_turns_are_never_refused_for_each_other() -> None:
    policy = _policy(queue_turns=3)
    assert policy.observe(RequestArrived(turns=("a", "b")), now=0.0) == ()
    assert policy.room == 1
    assert policy.observe(_turn("alone"), now=0.0) == (QueueTurn(turn="alone"),)
    (refused,) = policy.observe(_turn("late"), now=0.0)
    assert refused.refusal is Refusal.FULL
    assert policy.observe(_turn("a"), now=0.0) == (QueueTurn(turn="a"),)
    too_many = policy.observe(RequestArrived(turns=("c", "d")), now=0.0)
    assert [effect.refusal for effect in too_many] == [Refusal.FULL] * 2
    assert policy.observe(_turn("b"), now=0.0) == (QueueTurn(turn="b"),)
    policy.observe(TurnWithdrawn(turn="b"), now=0.0)
    assert policy.room == 1
    assert policy.observe(_turn("later"), now=0.0) == (QueueTurn(turn="later"),)
    # It was placed and comes back before a token: no room is asked for again.
    assert policy.observe(_turn("b"), now=0.0) == (QueueTurn(turn="b"),)


def test_room_of_turns_that_never_arrive_is_given_back_with_their_request() -> None:
    policy = _policy(queue_turns=2)
    policy.observe(RequestArrived(turns=("a", "b")), now=0.0)
    policy.observe(RequestLeft(turns=("a", "b")), now=0.0)
    assert policy.room == 2


def test_refuses_new_turns_when_the_queue_is_full_but_never_a_resumed_one() -> None:
    policy = _policy(queue_turns=1)
    policy.observe(_turn("1"), now=0.0)
    (refused,) = policy.observe(_turn("2"), now=0.0)
    assert refused.refusal is Refusal.FULL
    assert policy.observe(_turn("3", resumed=True), now=0.0) == (QueueTurn(turn="3"),)


def test_a_withdrawn_turn_leaves_its_place_in_the_queue_to_the_next() -> None:
    policy = _policy(_offer("a", concurrency=1))
    for name in ("1", "2", "3"):
        policy.observe(_turn(name), now=0.0)
    policy.observe(TurnWithdrawn(turn="2"), now=0.5)
    (placed,) = policy.observe(TurnLeft(turn="1", tokens=1, seconds=1.0), now=1.0)
    assert placed.turn == "3"


def _measure(policy: RoutingPolicy, engine: str, *, seconds: float) -> None:
    """Turns of 16 tokens on one engine alone, until its speed is known."""
    for other in {"d", "g"} - {engine}:
        policy.observe(EngineWithdrawn(engine=EngineId(other)), now=0.0)
    for n in range(12):
        name = f"{engine}.{n}"
        assert _engine_of(policy.observe(_turn(name), now=0.0)) == engine
        policy.observe(TurnLeft(turn=name, tokens=16, seconds=seconds), now=0.0)


def test_a_slow_guest_takes_turns_only_when_the_queue_is_longer_than_it_is_slow() -> None:
    policy = _policy(_offer("d", concurrency=2), _offer("g", GUEST, concurrency=2))
    _measure(policy, "d", seconds=0.1)
    policy.observe(_offer("g", GUEST, concurrency=2), now=0.0)
    _measure(policy, "g", seconds=1.0)
    policy.observe(_offer("d", concurrency=2), now=0.0)
    placed: list[tuple[int, str]] = []
    for n in range(40):
        for effect in policy.observe(_turn(str(n)), now=0.0):
            if isinstance(effect, DispatchTurn):
                placed.append((n, effect.engine))
    assert [engine for _, engine in placed] == ["d", "d", "g", "g"]
    assert 10 < placed[2][0] < 30


def test_a_guest_of_unknown_speed_gets_a_few_turns_first() -> None:
    policy = _policy(_offer("g", GUEST, concurrency=16))
    for n in range(16):
        policy.observe(_turn(str(n)), now=0.0)
    assert policy.open_turns == 4
    policy.observe(TurnLeft(turn="0", tokens=16, seconds=0.1), now=0.1)
    assert policy.open_turns == 15


def test_the_guest_that_will_be_idle_gets_the_turn_where_no_speed_is_known() -> None:
    forecasts = {"a": 0.3, "b": 0.8, "c": 0.5}
    offers = [_offer(name, GUEST, idle_ratio=ratio) for name, ratio in forecasts.items()]
    policy = _policy(*offers)
    assert _engine_of(policy.observe(_turn("1"), now=0.0)) == "b"


def test_a_guest_s_measured_speed_counts_for_more_than_its_forecast() -> None:
    policy = _policy(
        _offer("a", GUEST, concurrency=8, idle_ratio=0.3),
        _offer("b", GUEST, concurrency=8, idle_ratio=0.9),
    )
    for guest, seconds in (("a", 0.05), ("b", 2.0)):
        for other in "ab":
            policy.observe(EngineWithdrawn(engine=EngineId(other)), now=0.0)
        policy.observe(
            _offer(guest, GUEST, concurrency=8, idle_ratio=0.3 if guest == "a" else 0.9), now=0.0
        )
        _measure(policy, guest, seconds=seconds)
    for name, ratio in (("a", 0.3), ("b", 0.9)):
        policy.observe(_offer(name, GUEST, concurrency=8, idle_ratio=ratio), now=0.0)
    assert _engine_of(policy.observe(_turn("last"), now=0.0)) == "a"


def test_a_guest_that_is_forecast_to_be_busy_is_still_tried() -> None:
    policy = _policy(_offer("d", concurrency=1), _offer("g", GUEST, idle_ratio=0.0))
    placed = [
        effect.engine
        for n in range(8)
        for effect in policy.observe(_turn(str(n)), now=0.0)
        if isinstance(effect, DispatchTurn)
    ]
    assert "g" in placed


def test_a_silent_engine_gets_no_more_turns_while_another_has_room() -> None:
    policy = _policy(_offer("g", GUEST, concurrency=8))
    _measure(policy, "g", seconds=0.05)
    assert _engine_of(policy.observe(_turn("stuck"), now=0.0)) == "g"
    policy.observe(_offer("d"), now=0.0)
    assert _engine_of(policy.observe(_turn("next", "stuck"), now=20.0)) == "d"


@dataclass
class _Fleet:
    version: int = 1
    offered: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    placed: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, TurnArrived] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)


_LABELS = {"a": "x", "b": "x", "c": "y"}


class RoutingMachine(RuleBasedStateMachine):
    """Engines come, go and change version at random while turns come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = RoutingPolicy(RoutingConfig(queue_turns=50))
        self.fleet = _Fleet()
        self.now = 0.0
        self.turns = 0
        self._observe(_target(1))

    def _observe(self, event) -> None:
        self.now += 0.1
        fleet = self.fleet
        for effect in self.policy.observe(event, now=self.now):
            match effect:
                case DeferTurn():
                    assert effect.turn in fleet.waiting
                    fleet.deferred.add(effect.turn)
                case QueueTurn():
                    assert effect.turn in fleet.waiting
                    fleet.deferred.discard(effect.turn)
                case DispatchTurn():
                    turn = fleet.waiting.pop(effect.turn)
                    assert effect.turn not in fleet.deferred
                    assert turn.numerics in ("", _LABELS[effect.engine])
                    assert effect.engine not in turn.avoid
                    version, concurrency, context = fleet.offered[effect.engine]
                    assert not context or turn.context_tokens <= context
                    assert turn.exact in (None, version)
                    assert (turn.minimum or 0) <= version == effect.version
                    fleet.placed[effect.turn] = effect.engine
                    on_it = sum(engine == effect.engine for engine in fleet.placed.values())
                    assert on_it <= concurrency
                case RefuseTurn():
                    turn = fleet.waiting.pop(effect.turn)
                    fleet.deferred.discard(effect.turn)
                    assert effect.refusal is not Refusal.VERSION or self.now >= turn.pin_until_s
                    fleet.over.add(effect.turn)

    @rule(
        engine=st.sampled_from("abc"),
        concurrency=st.integers(1, 3),
        kind=st.sampled_from(EngineKind),
        context=st.sampled_from([0, 10, 20]),
    )
    def offer(self, engine, concurrency, kind, context) -> None:
        on_it = sum(placed == engine for placed in self.fleet.placed.values())
        concurrency = max(concurrency, on_it)
        version = self.fleet.version
        self.fleet.offered[engine] = (version, concurrency, context)
        self._observe(
            _offer(
                engine,
                kind,
                concurrency=concurrency,
                version=version,
                context=context,
                numerics=_LABELS[engine],
            )
        )

    @rule(engine=st.sampled_from("abc"))
    def withdraw(self, engine) -> None:
        self.fleet.offered.pop(engine, None)
        self._observe(EngineWithdrawn(engine=EngineId(engine)))

    @rule()
    def publish(self) -> None:
        self.fleet.version += 1
        self._observe(_target(self.fleet.version))

    @rule(
        trajectory=st.sampled_from("stuvw"),
        pin=st.sampled_from(["exact", "minimum", "none"]),
        lag=st.integers(-1, 1),
        resumed=st.booleans(),
        context=st.sampled_from([5, 10, 15, 25]),
        numerics=st.sampled_from(["", "", "x", "y"]),
        patience_s=st.sampled_from([0.0, 0.5, 5.0]),
    )
    def arrive(self, trajectory, pin, lag, resumed, context, numerics, patience_s) -> None:
        self.turns += 1
        version = WeightVersion(max(0, self.fleet.version - lag))
        pins = {} if pin == "none" else {pin: version}
        pins |= {"numerics": numerics, "pin_until_s": self.now + patience_s}
        turn = _turn(str(self.turns), trajectory, resumed=resumed, context_tokens=context, **pins)
        self.fleet.waiting[turn.turn] = turn
        self._observe(turn)

    @rule(
        count=st.integers(1, 4),
        resumed=st.booleans(),
        avoid=st.sampled_from(["", "a", "b"]),
        waits_s=st.sampled_from([0.0, 1.0]),
    )
    def arrive_together(self, count, resumed, avoid, waits_s) -> None:
        """New turns, after the latest ones that gave up or lost their engine and come again."""
        fleet = self.fleet
        names = [
            name
            for name in map(str, range(1, self.turns + 1))
            if name not in fleet.waiting and name not in fleet.placed
        ][-2:]
        for _ in range(count):
            self.turns += 1
            names.append(str(self.turns))
        for name in names:
            avoids = tuple(map(EngineId, avoid))
            turn = _turn(name, resumed=resumed, avoid=avoids, context_tokens=5)
            fleet.waiting[name] = turn
            self._observe(turn)
        self.now += waits_s

    @rule()
    def wait(self) -> None:
        self._observe(TimePassed())
        assert all(self.now < self.fleet.waiting[turn].pin_until_s for turn in self.fleet.deferred)

    @rule(tokens=st.sampled_from([None, 10, 20]))
    def limit(self, tokens) -> None:
        self._observe(ContextLimited(tokens=tokens))

    @rule(pick=st.integers(0, 99), tokens=st.integers(0, 9))
    def end(self, pick, tokens) -> None:
        if placed := sorted(self.fleet.placed):
            turn = placed[pick % len(placed)]
            del self.fleet.placed[turn]
            self._observe(TurnLeft(turn=turn, tokens=tokens, seconds=0.1))

    @rule(pick=st.integers(0, 99))
    def give_up(self, pick) -> None:
        if waiting := sorted(self.fleet.waiting):
            turn = waiting[pick % len(waiting)]
            del self.fleet.waiting[turn]
            self.fleet.deferred.discard(turn)
            self._observe(TurnWithdrawn(turn=turn))

    @invariant()
    def every_turn_is_in_exactly_one_place(self) -> None:
        assert self.policy.deferred_turns_of(JOB) == len(self.fleet.deferred)
        assert self.policy.queued_turns + self.policy.deferred_turns_of(JOB) == len(
            self.fleet.waiting
        )
        assert self.policy.open_turns == len(self.fleet.placed)
        assert self.policy.queued_turns_of(JOB) == self.policy.queued_turns

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """A turn waits beside a fitting engine only if one of them is busy."""
        busy = set(self.fleet.placed.values())
        for turn in self.fleet.waiting.values():
            fitting = {
                engine
                for engine, (version, _, context) in self.fleet.offered.items()
                if turn.exact in (None, version)
                and (turn.minimum or 0) <= version
                and (not context or turn.context_tokens <= context)
                and turn.numerics in ("", _LABELS[engine])
                and engine not in turn.avoid
            }
            assert not fitting or fitting & busy


TestRoutingMachine = RoutingMachine.TestCase
TestRoutingMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_long_walks_of_turns_that_come_again_keep_each_in_one_place() -> None:
    """Queues that never empty, which the machine's short runs seldom build."""
    for seed in range(40):
        random, machine = Random(seed), RoutingMachine()
        for _ in range(150):
            choice = random.random()
            if choice < 0.35:
                machine.arrive_together(
                    count=random.randint(1, 3),
                    resumed=random.random() < 0.3,
                    avoid=random.choice(["", "a", "b"]),
                    waits_s=0.0,
                )
            elif choice < 0.5:
                machine.give_up(pick=random.randrange(100))
            elif choice < 0.8:
                machine.end(pick=random.randrange(100), tokens=3)
            elif choice < 0.9:
                machine.offer(
                    engine=random.choice("abc"),
                    concurrency=random.randint(1, 3),
                    kind=random.choice(list(EngineKind)),
                    context=0,
                )
            else:
                machine.withdraw(engine=random.choice("abc"))
            machine.every_turn_is_in_exactly_one_place()
            machine.nobody_waits_for_nothing()


def test_a_turn_that_comes_again_in_another_way_is_placed_once_and_loses_no_other() -> None:
    policy = _policy(_offer("a", concurrency=1))
    avoid = (EngineId("b"),)
    policy.observe(_turn("running"), now=0)
    for name in ("ahead", "again"):
        policy.observe(_turn(name, avoid=avoid), now=1)
    policy.observe(TurnWithdrawn(turn="again"), now=1)
    policy.observe(_turn("again"), now=2)
    policy.observe(_turn("other"), now=3)
    went = _went(policy.observe(_offer("a", concurrency=4), now=3))
    assert list(went) == ["ahead", "again", "other"]
    assert (policy.queued_turns, policy.open_turns) == (0, 4)


def test_a_turn_that_comes_again_is_placed_by_what_it_says_then() -> None:
    policy = _policy(_offer("a", concurrency=1), _offer("b", concurrency=1))
    for name in ("1", "2", "ahead", "again"):
        policy.observe(_turn(name), now=0)
    policy.observe(TurnWithdrawn(turn="again"), now=1)
    policy.observe(_turn("again", avoid=(EngineId("a"),)), now=2)
    assert _went(policy.observe(TurnLeft(turn="1"), now=3)) == {"ahead": "a"}
    assert _went(policy.observe(TurnLeft(turn="ahead"), now=4)) == {}
    assert _went(policy.observe(TurnLeft(turn="2"), now=5)) == {"again": "b"}


def test_a_turn_that_comes_again_keeps_its_place_in_the_queue_and_is_not_refused() -> None:
    policy = _policy(_offer("a", concurrency=1), queue_turns=2)
    policy.observe(_turn("running"), now=0)
    policy.observe(_turn("first"), now=1)
    policy.observe(_turn("second"), now=2)
    policy.observe(TurnWithdrawn(turn="first"), now=3)
    policy.observe(_turn("third"), now=3)
    (queued,) = policy.observe(_turn("first", since_s=1), now=3)
    assert isinstance(queued, QueueTurn), "the queue was full in the meantime"
    for ended, gets in (("running", "first"), ("first", "second"), ("second", "third")):
        assert _went(policy.observe(TurnLeft(turn=ended), now=4)) == {gets: "a"}


def test_a_turn_behind_refused_ones_is_placed_where_an_engine_is_free() -> None:
    policy = _policy(_offer("a", concurrency=4), queue_turns=1)
    for name in ("1", "2"):
        policy.observe(_turn(name), now=0)
    for name in ("1", "2"):
        policy.observe(TurnLeft(turn=name, refused_s=5.0), now=0)
    policy.observe(_turn("long", context_tokens=25), now=1)
    policy.observe(_turn("other", avoid=(EngineId("a"),), resumed=True), now=1)
    policy.observe(ContextLimited(tokens=20), now=4.9)
    (effect,) = policy.observe(_turn("new"), now=5.1)
    assert isinstance(effect, DispatchTurn), "the queue is full, and its line is empty"


def test_memory_of_a_busy_queue_is_bounded_by_the_turns_that_wait() -> None:
    policy = _policy(_offer("a", concurrency=1))
    policy.observe(_turn("running"), now=0)
    policy.observe(_turn("ahead"), now=1)
    for step in range(50):
        avoid = (EngineId(f"gone{step}"),)
        for name, pins in (("same", {}), ("other", {"avoid": avoid})):
            policy.observe(_turn(name, since_s=2, **pins), now=2 + step)
            policy.observe(TimePassed(), now=2 + step)
            policy.observe(TurnWithdrawn(turn=name), now=2 + step)
    policy.observe(TimePassed(), now=60)
    lines = policy._queue._lines.values()
    assert sum(len(waiting) for line in lines for waiting in line.waiting) <= 3
    assert len(policy._queue._lines) <= 2


def test_a_whole_batch_that_comes_again_keeps_its_order() -> None:
    policy = _policy(_offer("a", concurrency=1))
    policy.observe(_turn("running"), now=0)
    names = [str(number) for number in range(8000)]
    for at, name in enumerate(names, start=1):
        policy.observe(_turn(name), now=at)
    for at, name in enumerate(names, start=1):
        policy.observe(TurnWithdrawn(turn=name), now=9000)
        policy.observe(_turn(name, since_s=at), now=9000)
    ended = "running"
    for name in names[:20]:
        assert _went(policy.observe(TurnLeft(turn=ended), now=9001)) == {name: "a"}
        ended = name


def test_a_turn_does_not_wait_for_a_faster_engine_that_is_closed() -> None:
    policy = _policy(_offer("fast", concurrency=8), _offer("slow", concurrency=8))
    for other, seconds in (("slow", 0.1), ("fast", 0.4)):
        for name in map(str, range(10)):
            policy.observe(_turn(name, avoid=(EngineId(other),)), now=0)
            policy.observe(TurnLeft(turn=name, tokens=100, seconds=seconds), now=0)
    assert list(policy.engines.speeds()) == ["fast", "slow"]
    for name in ("1", "2"):
        assert _went(policy.observe(_turn(name, avoid=(EngineId("slow"),)), now=0)) == {
            name: "fast"
        }
    assert _went(policy.observe(TurnLeft(turn="1", refused_s=30), now=0)) == {}
    policy.observe(TurnLeft(turn="2", refused_s=30), now=0)
    assert _went(policy.observe(_turn("3"), now=0)) == {"3": "slow"}


def test_deferred_turns_of_unlike_lengths_are_judged_each_by_its_own() -> None:
    policy = _policy(_offer("a", context=10))
    pin = {"minimum": WeightVersion(9), "pin_until_s": 100.0}
    for name, tokens in (("long", 25), ("short", 15)):
        (deferred,) = policy.observe(_turn(name, context_tokens=tokens, **pin), now=0)
        assert isinstance(deferred, DeferTurn)
    (refused,) = policy.observe(ContextLimited(tokens=20), now=1)
    assert isinstance(refused, RefuseTurn)
    assert refused.turn == "long"
    assert (policy.deferred_turns_of(JOB), policy.queued_turns) == (1, 0)


def _went(effects) -> dict[str, str]:
    return {e.turn: e.engine for e in effects if isinstance(e, DispatchTurn)}


def test_one_suspect_at_a_time_is_tried_on_an_engine_and_good_turns_go_on_there() -> None:
    policy = _policy(_offer("a", concurrency=8))
    assert _went(policy.observe(_turn("s1", suspect="x"), now=0)) == {"s1": "a"}
    assert _went(policy.observe(_turn("s2", suspect="y"), now=0)) == {}
    assert _went(policy.observe(_turn("good"), now=0)) == {"good": "a"}
    assert _went(policy.observe(TurnCleared(turn="s1"), now=1)) == {"s2": "a"}


def test_two_suspected_turns_of_one_cause_are_tried_on_one_engine_only() -> None:
    policy = _policy(_offer("a", concurrency=8), _offer("b", concurrency=8))
    assert len(_went(policy.observe(_turn("s1", suspect="x"), now=0))) == 1
    assert _went(policy.observe(_turn("s2", suspect="x"), now=0)) == {}
    assert set(_went(policy.observe(TurnLeft(turn="s1"), now=1))) == {"s2"}


def test_a_turn_goes_elsewhere_than_to_what_it_avoids_or_waits() -> None:
    policy = _policy(_offer("a"), _offer("b"))
    avoid = (EngineId("a"),)
    assert _went(policy.observe(_turn("r1", avoid=avoid), now=0)) == {"r1": "b"}
    assert _went(policy.observe(_turn("r2", avoid=(*avoid, EngineId("b"))), now=0)) == {}
    assert policy.engines.may_serve(_turn("r2", avoid=(*avoid, EngineId("b"))))


def test_an_engine_that_refuses_keeps_what_it_has_and_gets_one_more_with_each_end() -> None:
    policy = _policy(_offer("a", concurrency=8))
    for n in range(4):
        policy.observe(_turn(f"t{n}"), now=0)
    policy.observe(TurnLeft(turn="t3", refused_s=1.0), now=0)
    assert _went(policy.observe(_turn("w0"), now=0)) == {}
    policy.observe(_turn("w1"), now=0)
    policy.observe(_turn("w2"), now=0)
    ended = TurnLeft(turn="t0", tokens=16, seconds=1)
    assert _went(policy.observe(ended, now=1)) == {"w0": "a", "w1": "a"}


def test_an_engine_is_left_alone_once_it_refused_two_turns_in_a_row_and_not_for_one() -> None:
    policy = _policy(_offer("a"))
    for _ in range(3):
        assert _went(policy.observe(_turn("odd"), now=0)) == {"odd": "a"}
        policy.observe(TurnLeft(turn="odd", refused_s=5.0), now=0)
    assert _went(policy.observe(_turn("good"), now=0)) == {"good": "a"}
    policy.observe(TurnLeft(turn="good", refused_s=5.0), now=0)
    assert _went(policy.observe(_turn("next"), now=4.9)) == {}
    assert _went(policy.observe(TimePassed(), now=5.1)) == {"next": "a"}


def test_a_synchronous_steps_whole_batch_finds_room_to_wait() -> None:
    policy = _policy(_offer("a"))
    effects = [policy.observe(_turn(f"t{n}"), now=0) for n in range(1024 * 16)]
    assert not any(isinstance(effect, RefuseTurn) for each in effects for effect in each)
