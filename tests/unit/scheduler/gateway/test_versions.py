"""Order of version switches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.ids import EngineId, JobId, WeightVersion
from harvester.contracts.wire.rollouts import VersionSwitchState
from scheduler.gateway.policy.versions import (
    TRANSITIONS,
    EngineState,
    VersionPolicy,
)
from scheduler.gateway.policy.versions_events import (
    EngineEmptied,
    EngineJoined,
    EngineLeft,
    EngineUpdated,
    JobActivated,
    QuiesceEngine,
    RefusePublish,
    Retarget,
    ServeEngine,
    SettlePublish,
    TimePassed,
    UpdateEngine,
    VersionPublished,
    VersionsConfig,
)
from scheduler.model import EngineKind

JOB, OTHER = JobId("job"), JobId("other")
DEDICATED, GUEST = EngineKind.DEDICATED, EngineKind.GUEST


def _publish(version: int, job: JobId = JOB, store: str = "store", **more: Any) -> VersionPublished:
    return VersionPublished(job=job, store=f"{job}.{store}", version=WeightVersion(version), **more)


def _join(engine: str, kind: EngineKind = DEDICATED) -> EngineJoined:
    return EngineJoined(engine=EngineId(engine), kind=kind)


def _emptied(engine: str) -> EngineEmptied:
    return EngineEmptied(engine=EngineId(engine))


def _updated(
    engine: str, version: int, job: JobId = JOB, fault: str = "", state_hash: str = ""
) -> EngineUpdated:
    return EngineUpdated(
        engine=EngineId(engine),
        job=job,
        version=WeightVersion(version),
        fault=fault,
        state_hash=state_hash,
    )


def _kinds(effects: tuple[Any, ...]) -> list[type]:
    return [type(effect) for effect in effects]


def _serving(*engines: EngineJoined, version: int = 1, **config: Any) -> VersionPolicy:
    policy = VersionPolicy(VersionsConfig(**config))
    policy.observe(_publish(version), now=0.0)
    for joined in engines:
        policy.observe(joined, now=0.0)
        policy.observe(_updated(joined.engine, version), now=0.0)
        assert policy.state(joined.engine) is EngineState.SERVING
    return policy


@pytest.mark.parametrize("announced", ["ours", ""])
def test_a_number_is_of_one_run_for_good(announced: str) -> None:
    """As it was announced, else as the first engine that serves it holds it."""
    policy = VersionPolicy(VersionsConfig())
    policy.observe(_publish(1, state_hash=announced), now=0.0)
    (update,) = policy.observe(_join("d"), now=0.0)
    assert (update.version, update.state_hash) == (1, announced)
    policy.observe(_updated("d", 1, state_hash="ours"), now=0.0)
    assert policy.state_hash(JOB, WeightVersion(1)) == "ours"
    assert "another run" in policy.refusal(_publish(1, state_hash="another"))
    assert policy.refusal(_publish(1, state_hash="ours")) == policy.refusal(_publish(1)) == ""
    policy.observe(_publish(1), now=0.0)
    again = VersionPolicy(VersionsConfig())
    again.restore(policy.snapshot())
    assert again.state_hash(JOB, WeightVersion(1)) == "ours"
    again.observe(_publish(2, state_hash="another"), now=0.0)
    (update,) = again.observe(_emptied("d"), now=0.0)
    assert (update.version, update.state_hash) == (2, "another")


def test_a_publish_quiesces_then_updates_then_serves() -> None:
    policy = _serving(_join("d"))
    effects = policy.observe(_publish(2), now=1.0)
    assert _kinds(effects) == [Retarget, QuiesceEngine]
    (update,) = policy.observe(_emptied("d"), now=1.1)
    assert update == UpdateEngine(
        engine=EngineId("d"), job=JOB, store="job.store", version=WeightVersion(2)
    )
    assert _kinds(policy.observe(_updated("d", 2), now=1.2)) == [ServeEngine, SettlePublish]


def test_a_target_is_failing_once_every_engine_behind_it_has_failed_to_load_it() -> None:
    policy = _serving(_join("d1"), _join("d2"), _join("d3"), _join("g", GUEST))
    policy.observe(_publish(2), now=1.0)
    policy.observe(_emptied("d1"), now=1.0)
    policy.observe(_updated("d1", 2, fault="none"), now=1.1)
    assert not policy.failing, "d2 has turns"
    for engine in ("d2", "d3"):
        policy.observe(_emptied(engine), now=1.2)
    policy.observe(_updated("d2", 2), now=1.3)
    policy.observe(_publish(3, store="another"), now=1.4)
    policy.observe(_updated("d3", 2, fault="none"), now=1.5)
    assert not policy.failing, "d3 has failed to load the version before"
    policy = _serving(_join("d1"), _join("d2"), _join("g", GUEST))
    policy.observe(_publish(2), now=1.0)
    for engine, fault in (("d1", ""), ("d2", "none")):
        policy.observe(_emptied(engine), now=1.0)
        policy.observe(_updated(engine, 2, fault=fault), now=1.1)
    assert policy.failing
    policy.observe(TimePassed(), now=1.1 + VersionsConfig().retry_s)
    assert not policy.failing, "it is tried again"


def test_a_publish_waits_for_every_dedicated_engine_and_for_no_guest() -> None:
    policy = _serving(_join("d1"), _join("d2"), _join("g", GUEST))
    policy.observe(_publish(2), now=1.0)
    for engine in ("d1", "d2", "g"):
        policy.observe(_emptied(engine), now=1.0)
    assert _kinds(policy.observe(_updated("d1", 2), now=1.1)) == [ServeEngine]
    assert _kinds(policy.observe(_updated("d2", 2), now=1.2)) == [ServeEngine, SettlePublish]
    assert policy.switch_states(JOB, WeightVersion(2)) == {
        "d1": "switched",
        "d2": "switched",
        "g": "catching_up",
    }
    assert _kinds(policy.observe(_updated("g", 2), now=1.3)) == [ServeEngine]


def test_a_dead_dedicated_engine_holds_no_publish_up_unless_none_is_left() -> None:
    policy = _serving(_join("d1"), _join("d2"), min_dedicated=1)
    policy.observe(_publish(2), now=1.0)
    policy.observe(_emptied("d1"), now=1.0)
    policy.observe(_updated("d1", 2), now=1.0)
    assert _kinds(policy.observe(EngineLeft(engine=EngineId("d2")), now=1.1)) == [SettlePublish]
    policy.observe(EngineLeft(engine=EngineId("d1")), now=1.2)
    assert SettlePublish not in _kinds(policy.observe(_publish(3), now=1.3))
    policy.observe(_join("d1"), now=1.4)
    assert SettlePublish in _kinds(policy.observe(_updated("d1", 3), now=1.5))


def test_an_engine_that_comes_back_is_updated_before_it_serves() -> None:
    policy = _serving(_join("d"))
    policy.observe(EngineLeft(engine=EngineId("d")), now=1.0)
    assert _kinds(policy.observe(_join("d"), now=2.0)) == [UpdateEngine]
    assert policy.state(EngineId("d")) is EngineState.UPDATING


def test_a_target_that_moves_on_during_an_update_is_followed_before_serving() -> None:
    policy = _serving(_join("d"))
    policy.observe(_publish(2), now=1.0)
    policy.observe(_emptied("d"), now=1.0)
    assert _kinds(policy.observe(_publish(3), now=1.1)) == [Retarget]
    (update,) = policy.observe(_updated("d", 2), now=1.2)
    assert isinstance(update, UpdateEngine)
    assert update.version == 3
    assert _kinds(policy.observe(_updated("d", 3), now=1.3)) == [ServeEngine, SettlePublish]


def test_a_failed_update_is_tried_again_after_its_pause_and_never_serves_meanwhile() -> None:
    policy = _serving(_join("d"), retry_s=2.0)
    policy.observe(_publish(2), now=1.0)
    policy.observe(_emptied("d"), now=1.0)
    assert policy.observe(_updated("d", 2, fault="torn"), now=1.0) == ()
    assert policy.state(EngineId("d")) is EngineState.FAILED
    assert policy.observe(TimePassed(), now=2.9) == ()
    assert _kinds(policy.observe(TimePassed(), now=3.0)) == [UpdateEngine]


def test_a_failed_update_of_a_version_that_was_passed_meanwhile_delays_no_newer_one() -> None:
    policy = _serving(_join("d"), retry_s=2.0)
    policy.observe(_publish(2), now=1.0)
    policy.observe(_emptied("d"), now=1.0)
    policy.observe(_publish(3), now=1.1)
    (update,) = policy.observe(_updated("d", 2, fault="torn"), now=1.2)
    assert isinstance(update, UpdateEngine)
    assert update.version == 3
    assert policy.observe(_updated("d", 3, fault="torn"), now=1.3) == ()
    assert policy.state(EngineId("d")) is EngineState.FAILED


def test_versions_only_rise_and_a_repeated_publish_settles_again() -> None:
    policy = _serving(_join("d"), version=5)
    assert _kinds(policy.observe(_publish(4), now=1.0)) == [RefusePublish]
    assert _kinds(policy.observe(_publish(5), now=1.0)) == [SettlePublish]


def test_another_store_takes_the_place_of_one_that_no_engine_has_served() -> None:
    policy = _serving(_join("d"))
    policy.observe(_publish(50, OTHER, store="wrong"), now=1.0)
    assert policy.observe(_publish(1, OTHER), now=1.1) == ()
    policy.observe(JobActivated(job=OTHER), now=1.2)
    (update,) = policy.observe(_emptied("d"), now=1.3)
    assert (update.store, update.version) == ("other.store", 1)
    policy.observe(_updated("d", 1, OTHER), now=1.4)
    (refused,) = policy.observe(_publish(1, OTHER, store="wrong"), now=1.5)
    assert isinstance(refused, RefusePublish)


def test_versions_of_one_store_only_rise_although_no_engine_has_served_them() -> None:
    policy = _serving(_join("d"))
    policy.observe(_publish(6), now=1.0)
    assert _kinds(policy.observe(_publish(5), now=1.1)) == [RefusePublish]


def test_the_store_of_the_previous_process_keeps_its_place() -> None:
    policy = VersionPolicy(VersionsConfig())
    policy.observe(_publish(5, resumed=True), now=0.0)
    assert _kinds(policy.observe(_publish(4, store="again"), now=1.0)) == [RefusePublish]


def test_an_engine_that_loads_a_version_of_the_former_store_does_not_serve_it() -> None:
    policy = _serving(_join("d"))
    policy.observe(_publish(2, store="wrong"), now=1.0)
    policy.observe(_emptied("d"), now=1.1)
    policy.observe(_publish(2), now=1.2)
    (update,) = policy.observe(_updated("d", 2), now=1.3)
    assert isinstance(update, UpdateEngine)
    assert update.store == "job.store"
    assert _kinds(policy.observe(_updated("d", 2), now=1.4)) == [ServeEngine, SettlePublish]


@pytest.mark.parametrize("version", [4, 5])
def test_a_version_of_another_store_is_refused_unless_it_is_a_higher_one(version: int) -> None:
    policy = _serving(_join("d"), version=5)
    (refused,) = policy.observe(_publish(version, store="again"), now=1.0)
    assert isinstance(refused, RefusePublish)
    assert "store job.store" in refused.reason
    assert policy.target is not None
    assert policy.target.store == "job.store"
    assert _kinds(policy.observe(_publish(6, store="again"), now=1.1)) == [Retarget, QuiesceEngine]
    (update,) = policy.observe(_emptied("d"), now=1.2)
    assert (update.store, update.version) == ("job.again", 6)


def test_the_publisher_may_cut_turns_pinned_to_the_old_version() -> None:
    policy = _serving(_join("d"))
    (_, quiesce) = policy.observe(_publish(2), now=1.0)
    assert isinstance(quiesce, QuiesceEngine)
    assert not quiesce.cut_exact
    cuts = policy.observe(_publish(2, cut_exact=True), now=1.1)
    assert [effect.cut_exact for effect in cuts if isinstance(effect, QuiesceEngine)] == [True]


def test_an_inactive_jobs_publish_changes_no_engine_until_it_is_activated() -> None:
    policy = _serving(_join("d"))
    assert policy.observe(_publish(7, OTHER), now=1.0) == ()
    effects = policy.observe(JobActivated(job=OTHER), now=2.0)
    assert _kinds(effects) == [Retarget, QuiesceEngine]
    (update,) = policy.observe(_emptied("d"), now=2.1)
    assert (update.job, update.store, update.version) == (OTHER, "other.store", 7)


def test_a_job_without_a_version_cannot_take_engines_that_hold_anothers_weights() -> None:
    policy = _serving(_join("d"))
    assert _kinds(policy.observe(JobActivated(job=OTHER), now=1.0)) == [RefusePublish]
    assert policy.state(EngineId("d")) is EngineState.SERVING


events = st.one_of(
    st.builds(_join, st.sampled_from("dg"), st.just(DEDICATED)),
    st.builds(lambda engine: EngineLeft(engine=EngineId(engine)), st.sampled_from("dg")),
    st.builds(_publish, st.integers(1, 4), st.sampled_from([JOB, OTHER]), st.sampled_from("ab")),
    st.builds(lambda job: JobActivated(job=job), st.sampled_from([JOB, OTHER])),
    st.builds(_emptied, st.sampled_from("dg")),
    st.just("update"),
    st.builds(TimePassed),
)


@settings(max_examples=300, deadline=None)
@given(plan=st.lists(st.tuples(events, st.booleans()), max_size=30))
def test_whatever_happens_only_engines_at_the_target_serve_and_updates_follow_an_emptying(
    plan,
) -> None:
    policy = VersionPolicy(VersionsConfig(retry_s=0.5))
    pending: dict[str, UpdateEngine] = {}
    quiesced: set[str] = set()
    held: dict[str, UpdateEngine] = {}
    for step, (drawn, fails) in enumerate(plan):
        event = drawn
        if event == "update":
            if not pending:
                continue
            engine, asked = sorted(pending.items())[0]
            del pending[engine]
            fault = "broken" if fails else ""
            held[engine] = held[engine] if fails and engine in held else asked
            event = _updated(engine, asked.version, asked.job, fault)
        elif isinstance(event, EngineEmptied) and event.engine not in quiesced:
            continue
        elif isinstance(event, EngineLeft | EngineJoined):
            pending.pop(event.engine, None)
            quiesced.discard(event.engine)
        for effect in policy.observe(event, now=float(step)):
            match effect:
                case QuiesceEngine():
                    quiesced.add(effect.engine)
                case UpdateEngine():
                    assert effect.engine not in pending
                    pending[effect.engine] = effect
                    quiesced.discard(effect.engine)
                case ServeEngine():
                    target = policy.target
                    assert target is not None
                    assert (effect.job, effect.version) == (target.job, target.version)
        if (target := policy.target) is not None:
            for engine, state in policy.switch_states(target.job, target.version).items():
                assert (
                    state is not VersionSwitchState.SWITCHED or held[engine].store == target.store
                )
        snapshot = policy.snapshot()
        copy = VersionPolicy(VersionsConfig(retry_s=0.5))
        copy.restore(snapshot)
        assert copy.snapshot() == snapshot


@pytest.mark.parametrize("state", EngineState)
def test_every_state_of_the_table_can_be_left(state: EngineState) -> None:
    assert any(at is state for at, _ in TRANSITIONS)
    assert any(to is EngineState.UPDATING for to in TRANSITIONS.values())
