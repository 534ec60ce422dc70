"""Steps of production while nothing is in flight, as the node policy judges them."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harvester.contracts.page import EngineCore, ProductionModel, Pulse
from harvester.contracts.wire.leases import SlotState
from harvester.policy.production import ProductionView, ProductionWatch
from harvester.policy.sample import PulseReading
from harvester.policy.settings import ProfileSettings, SlotSettings
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition, State

GrantIn = Callable[..., Any]
BEAT_S = 0.1


class Served:
    """An engine of several API servers, beat by beat."""

    def __init__(self, servers: int = 1, **fields: Any) -> None:
        model = ProductionModel(decode_base_s=0.004, prefill_base_s=0.01)
        pulse = Pulse(model=model, model_samples=1000, middleware=True, processes=servers)
        self.pulses = [msgspec.structs.replace(pulse, **fields) for _ in range(servers)]
        self.watch, self.now = ProductionWatch(SlotSettings()), 100.0

    def change(self, server: int = 0, **fields: Any) -> None:
        self.pulses[server] = msgspec.structs.replace(self.pulses[server], **fields)

    def unseen_steps(self, count: int, server: int = 0) -> None:
        pulse = self.pulses[server]
        self.change(
            server,
            steps_total=pulse.steps_total + count,
            unseen_steps_total=pulse.unseen_steps_total + count,
        )

    def beat(self) -> ProductionView:
        self.now += BEAT_S
        readings = tuple(
            PulseReading(name=f"pulse.prod.{place}", record=record)
            for place, record in enumerate(self.pulses)
        )
        return self.watch.observe(readings, now=self.now)


def test_a_profile_and_a_lost_flag_never_open_a_slot(
    make_scene: Callable[..., Any], grant_in: GrantIn
) -> None:
    scene = make_scene(profile=ProfileSettings(prefill_base_s=0.01, decode_base_s=0.02))
    scene.set_pulse(model_samples=0, middleware=False)
    assert grant_in(scene.beats_for(5.0)).mode == "closed"
    assert (scene.policy.state, scene.policy.condition) == (State.COOLDOWN, Condition.UNSEEN)
    assert "--middleware coserve.vllm.middleware.PulseMiddleware" in scene.policy.reason
    assert scene.policy.slot_state() is SlotState.OFF
    scene.set_pulse(middleware=True)
    assert grant_in(scene.beats_for(2.5)).mode == "open"


def test_steps_while_nothing_is_in_flight_close_the_slot_and_end_its_lease(
    open_scene: Any, grant_in: GrantIn, ended_in: GrantIn
) -> None:
    def beat() -> Any:
        steps = open_scene.pulse.unseen_steps_total + 5
        open_scene.set_pulse(steps_total=steps, unseen_steps_total=steps)
        return open_scene.beat()

    assert grant_in(beat()).mode == "open", "one beat is no evidence"
    grant = grant_in(beat())
    assert grant.mode == "closed"
    assert "10 steps while nothing is in flight" in grant.reason
    assert "--middleware" in grant.reason, "the probable cause"
    ended = [reason for _ in range(60) for reason in ended_in(beat())]
    assert ended
    assert set(ended) == {"production_lost"}


def test_the_slot_opens_again_once_they_have_ceased_and_quiet_time_has_passed(
    open_scene: Any, grant_in: GrantIn
) -> None:
    for steps in (5, 10):
        open_scene.set_pulse(steps_total=steps, unseen_steps_total=steps)
        open_scene.beat()
    assert grant_in(open_scene.beats_for(1.9)).mode == "closed"
    assert grant_in(open_scene.beats_for(2.5)).mode == "open"


@pytest.mark.parametrize(("middleware", "cause"), [(True, "background"), (None, "--middleware")])
def test_the_reason_names_the_probable_cause(middleware: bool | None, cause: str) -> None:
    engine = Served(middleware=middleware)
    for _ in range(3):
        engine.unseen_steps(4)
        found = engine.beat()
    assert found.condition is Condition.UNSEEN
    assert cause in found.reason


@pytest.mark.parametrize("beats", [1, 2, 5])
def test_a_step_or_two_after_the_last_reply_are_nothing(beats: int) -> None:
    """A reply may end before its last step is counted, here once a beat over and over."""
    engine = Served()
    for count in range(40):
        engine.change(requests_total=count, in_flight=1 if count % 3 == 0 else 0)
        if count % beats == 0:
            engine.unseen_steps(1)
        assert engine.beat().condition is None


def test_slow_steps_are_evidence_though_not_in_each_beat() -> None:
    engine = Served()
    found = None
    for _ in range(6):
        engine.unseen_steps(1)
        found = engine.beat()
        for _ in range(5):
            found = engine.beat()
    assert found is not None
    assert found.condition is Condition.UNSEEN


def test_steps_of_one_api_server_are_those_of_a_siblings_requests() -> None:
    """While any sibling has requests the engine steps for these, whichever server gets the
    report.
    """
    engine = Served(servers=2)
    engine.change(1, in_flight=2, decoding=2, requests_total=2)
    for _ in range(30):
        engine.change(0, steps_total=engine.pulses[0].steps_total + 5)
        engine.change(1, steps_total=engine.pulses[1].steps_total + 5)
        assert engine.beat().condition is None


def test_requests_that_begin_and_end_between_two_beats_are_seen() -> None:
    engine = Served()
    for count in range(30):
        engine.change(requests_total=count, steps_total=20 * count)
        assert engine.beat().condition is None


def test_one_engine_without_a_middleware_is_found_beside_one_with_it() -> None:
    engine = Served(servers=1)
    readings = (
        PulseReading(name="pulse.a.0", record=engine.pulses[0]),
        PulseReading(
            name="pulse.b.0", record=msgspec.structs.replace(engine.pulses[0], middleware=False)
        ),
    )
    found = engine.watch.observe(readings, now=100.1)
    assert (found.condition, found.reason[:2]) == (Condition.UNSEEN, "b:")


def test_unseen_requests_without_a_step_are_a_hung_engine() -> None:
    engine = Served(cores=(EngineCore(told_ns=1, running=3),))
    found = [engine.beat().condition for _ in range(40)]
    assert found[0] is None
    assert found[-1] is Condition.HUNG


def test_an_open_websocket_without_work_is_no_hung_engine_and_leaves_production_idle() -> None:
    engine = Served(in_flight=1, sockets=1)
    for _ in range(60):
        found = engine.beat()
        assert found.condition is None
        assert found.idle_at_s == engine.now


def test_an_open_websocket_hides_no_unseen_steps() -> None:
    engine = Served(servers=2, in_flight=1, sockets=1)
    for _ in range(3):
        engine.unseen_steps(4)
        found = engine.beat()
    assert found.condition is Condition.UNSEEN
    engine.change(in_flight=2, requests_total=2)
    engine.unseen_steps(4)
    assert engine.beat().condition is None, "a request that was seen explains them"


@pytest.mark.parametrize(
    "work",
    [
        {"in_flight": 1, "waiting": 1},
        {"cores": (EngineCore(told_ns=1, running=1),)},
        {"cores": (EngineCore(told_ns=1, waiting=1),)},
    ],
)
def test_production_with_work_was_not_idle_a_moment_ago(work: dict[str, Any]) -> None:
    engine = Served()
    idle_at_s = engine.beat().idle_at_s
    engine.change(**work)
    for _ in range(5):
        assert engine.beat().idle_at_s == idle_at_s


def test_a_restart_begins_the_evidence_anew() -> None:
    engine = Served(unseen_steps_total=500, steps_total=900, requests_total=40)
    engine.beat()
    engine.change(unseen_steps_total=0, steps_total=0, requests_total=0)
    assert engine.beat().condition is Condition.RESTARTED
    for _ in range(40):
        found = engine.beat()
    assert found.condition is None


def test_the_evidence_survives_a_replay_of_the_journal(open_scene: Any) -> None:
    for steps in (5, 10, 15):
        open_scene.set_pulse(steps_total=steps, unseen_steps_total=steps)
        open_scene.beat()
    again = SlotPolicy(open_scene.settings)
    again.restore(open_scene.policy.snapshot())
    assert again.condition is Condition.UNSEEN
    effects = again.observe(open_scene.sample(), now=open_scene.now + BEAT_S)
    assert again.condition is Condition.UNSEEN
    assert effects
