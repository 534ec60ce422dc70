"""The node's control law, seen through samples and effects only."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.ids import Epoch, LeaseId
from harvester.contracts.page import Guest, PageFault, Pulse
from harvester.contracts.wire.leases import SlotState
from harvester.contracts.wire.stops import Stop, StopOrder, StopSource
from harvester.policy.effects import Quarantine
from harvester.policy.sample import (
    SCRAPED_PULSE,
    GuestReading,
    KillSwitch,
    LeaseView,
    MemoryReading,
    PulseReading,
    SlotSample,
)
from harvester.policy.settings import (
    BudgetSettings,
    Mode,
    ProfileSettings,
    ProofSettings,
    SlotSettings,
)
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import TRANSITIONS, Condition, State
from tests.unit.harvester.conftest import MODEL


def test_opens_for_a_lease_with_a_guest_beside_believable_production(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene(step_tokens_max=512, kv_budget_tokens=4096, ttft_slo_s=0.3, epsilon=0.1)

    grant = grant_in(scene.beats_for(0.5))

    assert grant.mode == "open"
    assert grant.epoch == 1
    assert (grant.step_tokens_cap, grant.kv_budget_tokens) == (512, 4096)
    assert (grant.ttft_slo_s, grant.epsilon) == (0.3, 0.1)
    assert grant.pulses == ("pulse.prod.0",)
    assert grant.production == scene.pulse.model
    assert grant.phantom_prompt_tokens == 0, "drawn from the pulses, by the guest"


def test_never_opens_in_its_first_beat(make_scene: Any, grant_in: Any) -> None:
    assert grant_in(make_scene().beat()).mode == "closed"


@pytest.mark.parametrize("fault", list(PageFault))
def test_closes_in_the_beat_in_which_a_pulse_is_not_there(
    open_scene: Any, grant_in: Any, fault: PageFault
) -> None:
    open_scene.pulse_fault = fault

    grant = grant_in(open_scene.beat())

    assert grant.mode == "closed"
    assert fault.value in grant.reason
    assert "pulse.prod.0" in grant.reason


def test_closes_when_no_pulse_is_expected_or_present(open_scene: Any, grant_in: Any) -> None:
    bare = SlotSample(pulses=(), guest=GuestReading(record=Guest()), lease=open_scene.lease)
    effects = open_scene.policy.observe(bare, now=open_scene.now + 0.1)
    assert grant_in(effects).mode == "closed"


def test_opens_again_only_after_the_quiet_time(open_scene: Any, grant_in: Any) -> None:
    open_scene.pulse_fault = PageFault.EXPIRED
    open_scene.beat()
    open_scene.pulse_fault = None

    assert grant_in(open_scene.beats_for(1.8)).mode == "closed"
    assert grant_in(open_scene.beats_for(0.4)).mode == "open"


@pytest.mark.parametrize(
    "counter",
    ["steps_total", "requests_total", "samples_total", "itl_samples_total", "busy_s_total"],
)
def test_takes_a_counter_that_went_backwards_for_a_restart_and_not_for_idleness(
    open_scene: Any, grant_in: Any, counter: str
) -> None:
    open_scene.set_pulse(**{counter: 500})
    open_scene.beat()
    open_scene.set_pulse(**{counter: 0})

    assert grant_in(open_scene.beat()).mode == "closed"
    assert open_scene.policy.state is State.LEARNING
    assert grant_in(open_scene.beats_for(1.5)).mode == "closed"
    assert grant_in(open_scene.beats_for(1.0)).mode == "open"


def test_stays_closed_until_productions_model_rests_on_enough_steps(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene(model_samples_min=64)
    scene.set_pulse(model_samples=63)
    assert grant_in(scene.beats_for(5)).mode == "closed"
    assert scene.policy.slot_state() is SlotState.LEARNING

    scene.set_pulse(model_samples=64)
    assert grant_in(scene.beats_for(0.3)).mode == "open"


def test_closes_when_production_has_requests_and_makes_no_step(
    open_scene: Any, grant_in: Any
) -> None:
    open_scene.set_pulse(in_flight=3, decoding=3)

    assert grant_in(open_scene.beats_for(1.5)).mode == "open"
    grant = grant_in(open_scene.beats_for(1.0))
    assert grant.mode == "closed"
    assert "no step" in grant.reason


def test_does_not_call_an_engine_hung_that_was_idle_before(open_scene: Any, grant_in: Any) -> None:
    open_scene.beats_for(30)
    open_scene.set_pulse(in_flight=1, waiting=1)
    assert grant_in(open_scene.beats_for(1.5)).mode == "open"


def test_waits_for_several_predicted_steps_before_it_calls_a_long_prefill_hung(
    open_scene: Any, grant_in: Any
) -> None:
    open_scene.set_pulse(in_flight=1, waiting=1, largest_waiting_prompt_tokens=100_000)
    assert grant_in(open_scene.beats_for(7)).mode == "open"
    assert grant_in(open_scene.beats_for(2)).mode == "closed"


@pytest.mark.parametrize("switch", [KillSwitch.HOLD, KillSwitch.DRAIN])
def test_closes_on_the_kill_switch_and_offers_nothing(
    open_scene: Any, grant_in: Any, switch: KillSwitch
) -> None:
    open_scene.kill_switch = switch
    assert grant_in(open_scene.beat()).mode == "closed"
    assert open_scene.policy.slot_state() is SlotState.OFF


def test_a_slot_opens_again_only_after_quiet_time_without_the_kill_switch(
    open_scene: Any, grant_in: Any
) -> None:
    open_scene.kill_switch = KillSwitch.HOLD
    open_scene.beats_for(60)
    open_scene.kill_switch = KillSwitch.NONE
    assert grant_in(open_scene.beats_for(1.8)).mode == "closed"
    assert open_scene.policy.state is State.COOLDOWN
    assert grant_in(open_scene.beats_for(0.4)).mode == "open"


def test_without_a_lease_the_slot_is_closed_and_offered(open_scene: Any, grant_in: Any) -> None:
    open_scene.lease = LeaseView(epoch=Epoch(2))
    grant = grant_in(open_scene.beat())
    assert (grant.mode, grant.epoch, grant.reason) == ("closed", 2, "no lease")
    assert open_scene.policy.slot_state() is SlotState.OFFERED


def test_a_guest_whose_page_is_late_keeps_its_grant(open_scene: Any, grant_in: Any) -> None:
    open_scene.guest = None
    assert grant_in(open_scene.beats_for(2)).mode == "open"
    assert grant_in(open_scene.beat()).mode == "closed"


def crash(scene: Any, *, down_s: float) -> list[str]:
    """Production crashes beside the guest as it is, and comes back; reasons for a quarantine."""
    beats: list[Any] = []
    for _ in range(10):
        scene.guest_steps()
        scene.latencies(ttft=(0.05,))
        beats.append(scene.beat())
    scene.pulse, scene.pulse_fault = Pulse(model=MODEL, model_samples=1000), PageFault.EXPIRED
    beats += [scene.beat() for _ in range(round(down_s / scene.settings.beat_s))]
    scene.pulse_fault = None
    beats += [scene.beat() for _ in range(60)]
    return [effect.reason for each in beats for effect in each if isinstance(effect, Quarantine)]


@pytest.mark.parametrize("down_s", [0.0, 2.0, 20.0])
def test_production_that_crashes_again_and_again_beside_the_guest_quarantines_the_slot(
    open_scene: Any, down_s: float
) -> None:
    assert [crash(open_scene, down_s=down_s) for _ in range(2)] == [[], []]
    assert crash(open_scene, down_s=down_s) == [
        "production was lost or restarted 3 times in 600 s beside a stepping guest"
    ]
    assert open_scene.policy.slot_state() is SlotState.QUARANTINED


@pytest.mark.parametrize(
    ("settings", "scene"),
    [
        ({"mode": Mode.OBSERVE}, {}),
        ({}, {"lease": LeaseView(epoch=Epoch(2))}),
        ({"quarantine_window_s": 10.0}, {}),
    ],
    ids=["observe", "closed grant", "rarely"],
)
def test_crashes_without_a_step_under_a_grant_or_far_between_quarantine_nothing(
    make_scene: Any, settings: Any, scene: Any
) -> None:
    made = make_scene(**settings)
    vars(made).update(scene)
    made.beats_for(1)
    assert [crash(made, down_s=8.0) for _ in range(4)] == [[]] * 4


def test_a_pulse_that_is_late_for_a_moment_is_no_crash(open_scene: Any) -> None:
    for _ in range(10):
        open_scene.guest_steps()
        open_scene.beats_for(1)
        open_scene.pulse_fault = PageFault.EXPIRED
        open_scene.beats_for(2)
        open_scene.pulse_fault = None
        open_scene.beats_for(5)
    assert open_scene.policy.slot_state() is SlotState.OFFERED


@pytest.mark.parametrize("late", [{"ttft": (0.9, 0.9)}, {"itl": (0.2, 0.2)}])
def test_halves_the_step_cap_at_once_and_gives_it_back_slowly(
    open_scene: Any, grant_in: Any, late: dict[str, tuple[float, ...]]
) -> None:
    for _ in range(3):
        open_scene.guest_steps()
        open_scene.latencies(**late)
        grant = grant_in(open_scene.beat())
    assert (grant.mode, grant.step_tokens_cap) == ("open", 1024)

    assert grant_in(open_scene.beats_for(4)).step_tokens_cap == 1024
    assert 1024 < grant_in(open_scene.beats_for(2.5)).step_tokens_cap <= 1024 + 3 * 205
    assert grant_in(open_scene.beats_for(10)).step_tokens_cap == 2048


def test_misses_without_a_guest_step_shrink_nothing(open_scene: Any, grant_in: Any) -> None:
    for _ in range(50):
        open_scene.latencies(ttft=(0.9,), itl=(0.3,))
        open_scene.beat()
    assert grant_in(open_scene.beat()).step_tokens_cap == 2048
    assert open_scene.policy.accounted[1] == 0


def test_a_miss_is_harvestings_only_when_its_request_overlapped_a_guest_step(
    open_scene: Any,
) -> None:
    open_scene.guest_steps()
    open_scene.beats_for(5)
    open_scene.latencies(ttft=(0.9,))
    open_scene.beat()
    assert open_scene.policy.accounted == (1.0, 0.0, 0.0)
    open_scene.latencies(ttft=(6.0,))
    open_scene.beat()
    assert open_scene.policy.accounted == (2.0, 1.0, 0.0)


def test_late_tokens_count_as_no_more_requests_than_were_decoding(open_scene: Any) -> None:
    open_scene.set_pulse(decoding=2)
    open_scene.guest_steps()
    open_scene.latencies(itl=(0.2,) * 10)
    open_scene.beat()
    assert open_scene.policy.accounted == (0.0, 2.0, 0.0)


def test_a_batch_that_stalled_counts_by_its_requests_though_newer_tokens_were_in_time(
    open_scene: Any, grant_in: Any
) -> None:
    open_scene.set_pulse(decoding=64, itl_slo_s=open_scene.settings.itl_slo_s)
    open_scene.beat()
    open_scene.guest_steps()
    open_scene.latencies(itl=(0.8,) * 64 + (0.01,) * 64 * 10)
    open_scene.set_pulse(decoding=0, itl_late_s_recent=(0.8,) * 8, itl_late_total=64)
    cap = grant_in(open_scene.beat()).step_tokens_cap
    assert open_scene.policy.accounted == (0.0, 64.0, 0.0)
    assert cap == 1024, "64 late of 704 tokens are a breach"


def test_late_tokens_that_a_pulse_counts_by_another_slo_are_those_of_its_samples(
    open_scene: Any,
) -> None:
    open_scene.set_pulse(decoding=64, itl_slo_s=2 * open_scene.settings.itl_slo_s)
    open_scene.beat()
    open_scene.guest_steps()
    open_scene.latencies(itl=(0.01,) * 48 + (0.08,) * 16)
    open_scene.beat()
    assert open_scene.policy.accounted == (0.0, pytest.approx(32.0), 0.0)


def give_up(scene: Any, *waits_s: float) -> None:
    total = scene.pulse.unanswered_total + len(waits_s)
    scene.set_pulse(
        unanswered_s_recent=(*scene.pulse.unanswered_s_recent, *waits_s)[-32:],
        unanswered_total=total,
        requests_total=scene.pulse.requests_total + len(waits_s),
    )


def test_a_request_that_ends_without_a_first_token_is_a_miss_where_it_waited_past_its_slo(
    open_scene: Any, grant_in: Any
) -> None:
    slo_s = open_scene.settings.ttft_slo_s
    for _ in range(4):
        open_scene.guest_steps()
        give_up(open_scene, 8 * slo_s, slo_s, 0.1 * slo_s)
        grant = grant_in(open_scene.beat())
    assert open_scene.policy.accounted == (4.0, 4.0, 8.0)
    assert grant.step_tokens_cap == 1024, "a breach of the level"


def test_waits_that_a_pulse_could_not_hold_count_like_those_it_held(open_scene: Any) -> None:
    open_scene.guest_steps()
    give_up(open_scene, *(0.01,) * 32, *(0.9,) * 16, *(0.1,) * 16)
    open_scene.beat()
    assert open_scene.policy.accounted == (32.0, 32.0, 32.0)


def sides(scene: Any, *, harm: Any) -> tuple[Any, Any]:
    """Counts of half an hour in which `harm` acts in granted slices only, and its policy."""
    for step in range(round(1800 / scene.settings.beat_s)):
        granted = scene.policy.condition is Condition.CLEAR
        if granted:
            scene.guest_steps()
        if step % 5 == 0:
            harm(scene, granted)
        scene.beat()
    return scene.policy.budget_report("s", number=0, leased=True).served, scene.policy


def test_requests_given_up_count_to_the_slice_in_which_they_arrived(make_scene: Any) -> None:
    """Clients wait 2 s; the guest makes a fifth of first tokens come after 3 s."""
    turn = iter(range(10**6))

    def harm(scene: Any, granted: bool) -> None:
        if granted and next(turn) % 5 == 0:
            give_up(scene, 2.0)
        else:
            scene.latencies(ttft=(0.1,))

    proof = ProofSettings(share_ratio=0.25, slice_s=20.0, seed=1)
    served, policy = sides(make_scene(beat_s=0.25, ttft_slo_s=1.0, proof=proof), harm=harm)
    assert served.granted_misses / served.granted == pytest.approx(0.2, abs=0.05)
    assert served.withheld_misses / served.withheld < 0.03
    assert policy.guards.proof.harmful or policy.guards.budget.stopped


def test_a_batch_that_stalls_is_charged_to_the_slice_in_which_the_stall_began(
    make_scene: Any,
) -> None:
    """32 requests decode; each 1.25 s the guest stalls a step, and steps in time follow."""

    def harm(scene: Any, granted: bool) -> None:
        scene.latencies(ttft=(0.1,), itl=(0.01,) * 320)
        if granted:
            late = scene.pulse.itl_late_total + 32
            scene.set_pulse(itl_late_s_recent=(0.4,) * 8, itl_late_total=late)

    proof = ProofSettings(share_ratio=0.25, slice_s=20.0, seed=1)
    scene = make_scene(beat_s=0.25, ttft_slo_s=1.0, proof=proof)
    scene.set_pulse(decoding=32, itl_slo_s=scene.settings.itl_slo_s)
    scene.beat()
    served, policy = sides(scene, harm=harm)
    assert served.granted_late_beats / served.granted_beats > 0.95
    assert served.withheld_late_beats / served.withheld_beats < 0.05
    assert served.excess > 0.9 * served.granted
    assert policy.guards.proof.harmful or policy.guards.budget.stopped


def test_samples_that_a_pulse_could_not_hold_count_like_those_it_held(open_scene: Any) -> None:
    open_scene.guest_steps()
    open_scene.latencies(ttft=(0.9,) * 8 + (0.1,) * 32 + (0.9,) * 16)
    open_scene.beat()
    assert open_scene.policy.accounted == (56.0, pytest.approx(28.0), 0.0)


def test_a_few_misses_among_many_good_samples_shrink_nothing(
    open_scene: Any, grant_in: Any
) -> None:
    for beat in range(200):
        open_scene.guest_steps()
        open_scene.latencies(ttft=(0.9 if beat % 50 == 0 else 0.1,), itl=(0.01,) * 4)
        open_scene.beat()
    assert grant_in(open_scene.beat()).step_tokens_cap == 2048


def test_halves_the_kv_budget_when_productions_cache_is_nearly_full(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene(kv_budget_tokens=10_000)
    scene.memory = MemoryReading(used_bytes=50, limit_bytes=100)
    scene.beats_for(1)
    scene.set_pulse(kv_usage_ratio=0.95)
    assert grant_in(scene.beat()).kv_budget_tokens == 5000
    scene.set_pulse(kv_usage_ratio=0.1)
    assert grant_in(scene.beats_for(29)).kv_budget_tokens == 5000


DRAIN = Stop(order=StopOrder.DRAIN, source=StopSource.FILE)


@pytest.mark.parametrize(
    ("stopped", "all_work"),
    [
        (lambda scene: setattr(scene, "kill_switch", KillSwitch.HOLD), True),
        (lambda scene: setattr(scene, "stop", DRAIN), True),
        (lambda scene: scene.policy.quarantine("for a test"), True),
        (lambda scene: scene.set_pulse(unfit="several nodes"), True),
        (lambda scene: setattr(scene.policy.guards.proof.state, "stopped_at_s", scene.now), True),
        (lambda scene: setattr(scene, "pulse_fault", PageFault.EXPIRED), False),
        (lambda scene: setattr(scene, "lease", LeaseView(epoch=Epoch(2))), False),
    ],
    ids=["killed", "drained", "quarantined", "unfit", "harmful", "silent", "unleased"],
)
def test_orders_and_verdicts_stop_the_guests_weight_work_as_well_as_its_steps(
    open_scene: Any, grant_in: Any, stopped: Any, all_work: bool
) -> None:
    stopped(open_scene)
    grant = grant_in(open_scene.beat())
    assert (grant.mode, grant.withheld) == ("closed", all_work)


def test_observe_mode_decides_but_grants_and_offers_nothing(make_scene: Any, grant_in: Any) -> None:
    scene = make_scene(mode=Mode.OBSERVE)
    scene.lease = LeaseView(epoch=Epoch(0))
    scene.guest = None
    grant = grant_in(scene.beats_for(1))
    assert grant.mode == "closed"
    assert grant.reason == "observe only, else open"
    assert scene.policy.slot_state() is SlotState.OFF


def test_stops_when_the_error_budget_is_overspent(
    make_scene: Any, grant_in: Any, ended_in: Any
) -> None:
    scene = make_scene(budget=BudgetSettings(minimum_misses=3), proof=ProofSettings(share_ratio=0))
    scene.beats_for(1)
    for _ in range(3):
        scene.guest_steps()
        scene.latencies(ttft=(0.9,))
        effects = scene.beat()
    assert grant_in(effects).mode == "closed"
    assert ended_in(effects) == ["budget"]
    assert "allowed in 28 d" in grant_in(effects).reason


@pytest.mark.parametrize("decoding", [0, 4, 64])
def test_late_first_tokens_are_a_breach_however_many_tokens_are_in_time(
    make_scene: Any, grant_in: Any, decoding: int
) -> None:
    scene = make_scene(proof=ProofSettings(share_ratio=0))
    cap = grant_in(scene.beats_for(1)).step_tokens_cap
    for _ in range(20):
        scene.guest_steps()
        scene.latencies(ttft=(2.0,), itl=(0.03,) * 3 * decoding)
        grant = grant_in(scene.beat())
    assert grant.step_tokens_cap < cap


def test_withholds_the_grant_in_proof_slices_and_opens_again_right_after(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene(proof=ProofSettings(share_ratio=0.2, proving_s=0, slice_s=1.0, seed=3))
    modes = [(scene.now, grant_in(scene.beat())) for _ in range(3000)]
    withheld = [grant for _, grant in modes if grant.reason == "proof slice of at most 1 s"]
    assert 0.1 < len(withheld) / len(modes) < 0.3
    assert {grant.mode for grant in withheld} == {"closed"}
    assert all(grant.withheld == (grant in withheld) for _, grant in modes[2:])
    assert len([g for _, g in modes if g.mode == "closed"]) <= len(withheld) + 2


def test_estimates_how_idle_production_is(open_scene: Any) -> None:
    busy_s = 0.0
    for _ in range(600):
        busy_s += 0.06
        open_scene.set_pulse(busy_s_total=busy_s)
        open_scene.beat()
    assert open_scene.policy.idle_ratio == pytest.approx(0.4, abs=0.02)


def test_knows_no_idleness_right_after_a_restart(open_scene: Any) -> None:
    open_scene.set_pulse(busy_s_total=5.0)
    open_scene.beat()
    open_scene.set_pulse(busy_s_total=0.0)
    open_scene.beat()
    assert open_scene.policy.idle_ratio is None


def test_every_state_and_condition_has_a_transition_and_a_breach_never_leads_to_open() -> None:
    assert set(TRANSITIONS) == {(s, c) for s in State for c in Condition}
    into_open = {c for (_, c), target in TRANSITIONS.items() if target is State.OPEN}
    assert into_open == {Condition.CLEAR}


pulses = st.builds(
    Pulse,
    in_flight=st.integers(0, 3),
    steps_total=st.integers(0, 50),
    samples_total=st.integers(0, 5),
    requests_total=st.integers(0, 5),
    ttft_s_recent=st.lists(st.floats(0, 1), max_size=3).map(tuple),
    unanswered_s_recent=st.lists(st.floats(0, 1), max_size=3).map(tuple),
    unanswered_total=st.integers(0, 5),
    itl_slo_s=st.sampled_from([0.0, 0.05]),
    itl_late_s_recent=st.lists(st.floats(0.05, 1), max_size=3).map(tuple),
    itl_late_total=st.integers(0, 5),
    itl_samples_total=st.integers(0, 5),
    decoding=st.integers(0, 3),
    kv_usage_ratio=st.floats(0, 1),
    model_samples=st.sampled_from([0, 100]),
)
readings = st.one_of(
    pulses.map(lambda pulse: PulseReading(name="pulse.prod.0", record=pulse)),
    st.sampled_from(PageFault).map(lambda f: PulseReading(name="pulse.prod.0", fault=f)),
)
samples = st.builds(
    SlotSample,
    pulses=st.lists(readings, max_size=1).map(tuple),
    guest=st.sampled_from([GuestReading(record=Guest()), GuestReading(fault=PageFault.MISSING)]),
    lease=st.sampled_from(
        [LeaseView(epoch=Epoch(1), lease=LeaseId("l")), LeaseView(epoch=Epoch(2))]
    ),
    kill_switch=st.sampled_from([*KillSwitch, KillSwitch.NONE, KillSwitch.NONE]),
)


@given(st.lists(st.tuples(samples, st.floats(0.01, 3.0)), max_size=60))
def test_an_open_grant_has_a_lease_a_guest_fresh_pulses_and_no_kill_switch(
    script: list[tuple[SlotSample, float]],
) -> None:
    policy, now, guest_seen_at = SlotPolicy(SlotSettings()), 0.0, float("-inf")
    for sample, elapsed_s in script:
        now += elapsed_s
        guest_seen_at = now if sample.guest.record is not None else guest_seen_at
        for effect in policy.observe(sample, now=now):
            grant = getattr(effect, "grant", None)
            if grant is not None and grant.mode != "closed":
                assert sample.kill_switch is KillSwitch.NONE
                assert sample.lease.lease is not None
                assert now - guest_seen_at <= policy.settings.guest_away_s
                assert sample.pulses
                assert all(reading.record is not None for reading in sample.pulses)
                assert 1 <= grant.step_tokens_cap <= policy.settings.step_tokens_max


@given(st.lists(st.tuples(samples, st.floats(0.01, 3.0)), max_size=40), st.integers(0, 40))
def test_a_restored_policy_goes_on_exactly_as_the_recorded_one(
    script: list[tuple[SlotSample, float]], cut: int
) -> None:
    policy, now = SlotPolicy(SlotSettings(proof=ProofSettings(share_ratio=0.3))), 50.0
    twin = policy
    for number, (sample, elapsed_s) in enumerate(script):
        now += elapsed_s
        if number == cut:
            config = msgspec.json.decode(msgspec.json.encode(policy.settings))
            twin = SlotPolicy.from_config(config)
            twin.restore(msgspec.json.decode(msgspec.json.encode(policy.snapshot())))
        expected = policy.observe(sample, now=now)
        if twin is not policy:
            wire = msgspec.json.encode(sample)
            again = msgspec.json.decode(wire, type=SlotPolicy.SAMPLE)
            assert twin.observe(again, now=now) == expected


def test_a_profile_stands_in_until_production_has_shown_its_own_times(
    make_scene: Any, grant_in: Any
) -> None:
    profile = ProfileSettings(prefill_base_s=0.5, decode_base_s=0.25)
    scene = make_scene(profile=profile)
    scene.set_pulse(model_samples=3)
    grant = grant_in(scene.beats_for(0.5))
    assert grant.mode == "open"
    assert (grant.production.prefill_base_s, grant.production.decode_base_s) == (0.5, 0.25)
    scene.set_pulse(model_samples=1000)
    assert grant_in(scene.beat()).production == scene.pulse.model


def test_a_profile_of_another_model_or_machine_is_not_believed(
    make_scene: Any, grant_in: Any
) -> None:
    profile = ProfileSettings(decode_base_s=0.25, shapes=("small on A", "large on A"))
    scene = make_scene(profile=profile)
    scene.set_pulse(model_samples=3, shape="small on B")
    assert grant_in(scene.beats_for(0.5)).mode == "closed"
    assert scene.policy.reason.startswith("the profile is of another engine; model rests on 3")
    scene.set_pulse(shape="small on A")
    assert grant_in(scene.beats_for(5.0)).mode == "open"
    scene.set_pulse(shape="")
    assert grant_in(scene.beat()).mode == "open", "what is not known is not held against it"


@pytest.mark.parametrize("beside", [(), ("pulse.prod.0",)])
def test_no_profile_opens_a_slot_that_is_scraped(
    make_scene: Any, grant_in: Any, beside: tuple[str, ...]
) -> None:
    scene = make_scene(profile=ProfileSettings(prefill_base_s=0.5, decode_base_s=0.25))
    pulses = (PulseReading(name=SCRAPED_PULSE, record=Pulse()),)
    pulses += tuple(PulseReading(name=name, record=scene.pulse) for name in beside)
    for _ in range(50):
        scene.now += 0.1
        sample = msgspec.structs.replace(scene.sample(), pulses=pulses)
        assert grant_in(scene.policy.observe(sample, now=scene.now)).mode == "closed"
    assert "a scrape" in scene.policy.reason


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_profile_that_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="decode_base_s must be"):
        ProfileSettings(decode_base_s=wrong)


def test_without_a_record_the_slot_is_withdrawn_and_comes_back_by_itself(
    open_scene: Any, grant_in: Any, ended_in: Any
) -> None:
    open_scene.record_fault = "journal: No space left on device"
    effects = open_scene.beat()
    assert (grant_in(effects).mode, ended_in(effects)) == ("closed", ["drain"])
    assert grant_in(effects).reason == "journal: No space left on device"
    assert open_scene.policy.slot_state() is SlotState.OFF
    open_scene.record_fault = ""
    assert grant_in(open_scene.beats_for(0.3)).mode == "open"


def test_the_last_record_of_a_guest_that_stops_in_a_step_is_no_step_without_end(
    open_scene: Any,
) -> None:
    open_scene.guest = Guest(steps_launched=7, steps_finished=6, leaving=True)
    open_scene.beats_for(5)
    assert not open_scene.policy.guest.stepped_during(0.5, now=open_scene.now)


def test_an_operator_s_release_ends_a_quarantine_and_forgets_its_losses(
    open_scene: Any, grant_in: Any
) -> None:
    open_scene.policy.quarantine("guest lost 3 times")
    open_scene.policy.guest.state.losses_s = [open_scene.now] * 3
    assert grant_in(open_scene.beats_for(1)).mode == "closed"
    open_scene.release = "driver replaced"
    open_scene.beat()
    open_scene.release = ""
    assert grant_in(open_scene.beats_for(0.3)).mode == "open"
    assert open_scene.policy.guest.state.losses_s == []


def judged_s(scene: Any, disturb: Callable[[Any, int], None]) -> float:
    """Seconds that the proof judges of two minutes in which something goes on."""
    for number in range(1200):
        disturb(scene, number)
        scene.latencies(ttft=(0.05,))
        scene.beat()
    return scene.policy.guards.proof.state.judged_s


def silent(scene: Any, number: int) -> None:
    scene.guest = None if number % 50 < 30 else Guest()


def starved(scene: Any, number: int) -> None:
    scene.guest_runs_below_production = True
    silent(scene, number)


def stopping(scene: Any, number: int) -> None:
    scene.guest = Guest(leaving=number % 50 < 10)


def leased_for_moments(scene: Any, number: int) -> None:
    epoch, held = Epoch(1 + number // 10), number % 20 < 10
    scene.lease = LeaseView(epoch=epoch, lease=LeaseId(f"l{epoch}") if held else None)


@pytest.mark.parametrize("disturb", [silent, starved, stopping, leased_for_moments])
def test_no_act_of_a_guest_or_its_job_hides_a_slice_from_the_proof(
    make_scene: Any, disturb: Callable[[Any, int], None]
) -> None:
    scene = make_scene(proof=ProofSettings())
    assert judged_s(scene, disturb) == pytest.approx(120.0, rel=0.15)


def test_slices_without_a_lease_are_not_judged(make_scene: Any) -> None:
    scene = make_scene(proof=ProofSettings())
    scene.lease = LeaseView(epoch=Epoch(1))
    assert judged_s(scene, lambda _scene, _number: None) == 0.0


@pytest.mark.parametrize(
    ("below", "leased", "counted"), [(False, True, 1), (True, True, 0), (False, False, 0)]
)
def test_a_guest_that_falls_silent_in_its_step_still_steps_under_its_lease(
    open_scene: Any, below: bool, leased: bool, counted: int
) -> None:
    scene = open_scene
    scene.guest = Guest(steps_launched=1)
    scene.beat()
    scene.guest, scene.guest_runs_below_production = None, below
    if not leased:
        scene.lease = LeaseView(epoch=Epoch(2))
    scene.beats_for(4.0)
    scene.latencies(ttft=(2.0,))
    scene.beat()
    (_, misses, _) = scene.policy.accounted
    assert misses == counted
