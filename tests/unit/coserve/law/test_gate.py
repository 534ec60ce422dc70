"""The gate: decides whether a step may start, and its tokens."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.law.gate import Closed, GuestLoad, StepDecision, decide
from coserve.law.phantom import rest_s
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Grant, GrantMode, PageFault, ProductionModel, Pulse, Reading

MakeGrant = Callable[..., Grant]

NOW_NS = 1_000_000_000_000
IDLE = Reading(Pulse(), None)
LONG_AGO_NS = NOW_NS - 60_000_000_000
# 1 ms per decode, 0.1 ms per prefill token, 2 ms besides; no margin, so that tokens can be counted.
STEP_TIME = StepTimeModel(base_s=0.002, decode_s=0.001, prefill_s=0.0001, factor=1.0)
GUEST = GuestLoad(STEP_TIME, decodes=0, context_tokens=0, launched_s=0.0, cap=512)


def decision(
    grant: Grant | PageFault,
    *pulses: Reading[Pulse] | Pulse | PageFault,
    may_probe: bool = False,
    **changes: Any,
) -> StepDecision:
    readings: list[Reading[Pulse]] = []
    for pulse in pulses or (IDLE,):
        match pulse:
            case Reading():
                readings.append(pulse)
            case Pulse():
                readings.append(Reading(pulse, None))
            case _:
                readings.append(Reading(None, pulse))
    guest = msgspec.structs.replace(GUEST, **changes)
    reading = Reading(grant, None) if isinstance(grant, Grant) else Reading(None, grant)
    return decide(reading, readings, guest, may_probe=may_probe, now_ns=NOW_NS)


def test_opens_to_the_tokens_whose_predicted_step_fits_the_slack(make_grant: MakeGrant) -> None:
    # 24 ms of phantom leave 8 ms of 32: 2 ms besides and 60 tokens of 0.1 ms.
    found = decision(make_grant(ttft_slo_s=0.0280001))
    assert (found.tokens, found.reason) == (60, None)
    assert found.slack_s == pytest.approx(0.008, abs=1e-6)
    # With three decodes running 3 ms of these go to them and leave 30 tokens of prefill.
    assert decision(make_grant(ttft_slo_s=0.0280001), decodes=3).tokens == 33


def test_an_isolation_backend_stretches_what_a_preemption_leaves_of_the_slack(
    make_grant: MakeGrant,
) -> None:
    grant = make_grant(ttft_slo_s=0.0280001, blocking_ratio=0.5)
    # 8 ms less half a millisecond for the preemption, twice over.
    assert decision(grant).tokens == 130
    slight = make_grant(ttft_slo_s=0.0164, blocking_ratio=0.02)
    assert decision(slight).reason is Closed.NO_SLACK


def test_a_measured_preemption_takes_the_place_of_the_default(make_grant: MakeGrant) -> None:
    grant = make_grant(ttft_slo_s=0.0280001, blocking_ratio=0.5, preemption_s=0.004)
    # 8 ms less 4 for the preemption, twice over.
    assert decision(grant).tokens == 60
    whole = make_grant(ttft_slo_s=0.0280001, preemption_s=0.004)
    assert decision(whole) == decision(make_grant(ttft_slo_s=0.0280001))


def test_launched_steps_are_taken_off(make_grant: MakeGrant) -> None:
    assert decision(make_grant(ttft_slo_s=0.0280001), launched_s=0.004).tokens == 20


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [({}, 512), ({"step_tokens_cap": 100}, 100), ({"step_tokens_cap": 4000}, 512)],
)
def test_never_more_than_the_engine_and_the_grant_allow(
    make_grant: MakeGrant, changes: dict[str, int], tokens: int
) -> None:
    assert decision(make_grant(**changes)).tokens == tokens
    assert decision(make_grant(mode=GrantMode.UNGATED, **changes)).tokens == tokens


def test_an_infinite_slack_gives_a_full_step(make_grant: MakeGrant) -> None:
    assert decision(make_grant(ttft_slo_s=math.inf)).tokens == 512


def test_rests_after_a_step_that_was_longer_than_any_arrival_may_wait(
    make_grant: MakeGrant,
) -> None:
    # 20 ms alone, of which an arrival may wait 1 ms; the shortest step takes 2 ms.
    grant = make_grant(epsilon=0.05)
    found = decision(grant)
    assert found.mean_wait_s == pytest.approx(0.001)
    # Steps of three times the mean wait, 2 * 3 ms, rest twice as long.
    assert found.tokens == 40
    rest = rest_s(0.006, 0.001, grant)
    assert rest == pytest.approx(0.012)
    ended_ns = NOW_NS - 2_000_000
    resting = decision(grant, rest_s=rest, last_end_ns=ended_ns)
    assert (resting.tokens, resting.reason) == (0, Closed.RESTING)
    assert resting.rest_s == pytest.approx(0.010)
    assert decision(grant, rest_s=rest, last_end_ns=ended_ns - 10_100_000).tokens == 40


def test_a_rest_is_time_in_which_production_is_idle(make_grant: MakeGrant) -> None:
    grant = make_grant(epsilon=0.05)
    stepped = Pulse(last_step_end_ns=NOW_NS - 1_000_000)
    assert decision(grant, stepped, rest_s=0.002).reason is Closed.RESTING
    assert decision(grant, Pulse(), rest_s=0.002).open


def test_a_long_step_rests_by_the_square_of_its_time(make_grant: MakeGrant) -> None:
    grant = make_grant(epsilon=0.05)
    # 60 ms wait 30 ms on average, a twenty-fifth of the time keeps that to 1.2 ms.
    assert rest_s(0.060, 0.0012, grant) == pytest.approx(24 * 0.060)
    preempted = make_grant(epsilon=0.05, blocking_ratio=0.02)
    assert rest_s(0.060, 0.0012, preempted) == pytest.approx(2 * 0.060)
    assert rest_s(0.060, 0.0, grant) == math.inf


def test_a_step_for_which_a_request_would_miss_its_slo_never_starts(make_grant: MakeGrant) -> None:
    slow = StepTimeModel(base_s=0.3, decode_s=0.001, prefill_s=0.0001, factor=1.0)
    assert decision(make_grant(epsilon=0.05, ttft_slo_s=0.3), step_time=slow).tokens == 0
    assert decision(make_grant(epsilon=0.05), step_time=slow).open


CLOSED: list[tuple[Closed, PageFault | None, dict[str, Any], Any]] = [
    (Closed.GRANT_CLOSED, None, {"mode": GrantMode.CLOSED}, Pulse()),
    (Closed.NO_PULSE, None, {"pulses": ()}, Pulse()),
    (Closed.NO_PULSE, None, {"pulses": ("pulse.a.0", "pulse.b.0")}, Pulse()),
    *[(Closed.PULSE_FAULT, fault, {}, fault) for fault in PageFault],
    (Closed.HUNG, None, {}, Pulse(in_flight=1, last_step_end_ns=LONG_AGO_NS)),
    (Closed.NO_SLACK, None, {"ttft_slo_s": 0.016}, Pulse()),
    (Closed.NO_SLACK, None, {"ttft_slo_s": 0.021}, Pulse()),
    (
        Closed.NO_SLACK,
        None,
        {},
        Pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=NOW_NS - 1_000_000_000),
    ),
]


@pytest.mark.parametrize(("reason", "fault", "changes", "pulse"), CLOSED)
def test_stays_closed_and_says_why(
    make_grant: MakeGrant,
    reason: Closed,
    fault: PageFault | None,
    changes: dict[str, Any],
    pulse: Any,
) -> None:
    found = decision(make_grant(**changes), pulse)
    assert (found.tokens, found.open, found.reason, found.fault) == (0, False, reason, fault)


@pytest.mark.parametrize("fault", PageFault)
def test_a_grant_that_cannot_be_read_closes_the_gate(fault: PageFault) -> None:
    found = decision(fault)
    reason = Closed.NO_GRANT if fault is PageFault.MISSING else Closed.GRANT_FAULT
    assert (found.tokens, found.reason, found.fault) == (0, reason, fault)


def test_every_reason_to_close_has_a_case() -> None:
    covered = {reason for reason, *_ in CLOSED}
    covered |= {Closed.NO_GRANT, Closed.GRANT_FAULT, Closed.RESTING}
    assert covered == set(Closed)


def test_one_faulty_pulse_among_good_ones_closes_the_gate(make_grant: MakeGrant) -> None:
    grant = make_grant(pulses=("pulse.a.0", "pulse.b.0"))
    assert decision(grant, Pulse(), Pulse()).open
    assert decision(grant, Pulse(), PageFault.EXPIRED).reason is Closed.PULSE_FAULT


def test_the_least_slack_of_all_engines_counts(make_grant: MakeGrant) -> None:
    grant = make_grant(pulses=("pulse.a.0", "pulse.b.0"))
    busy = Pulse(in_flight=1, decoding=1, last_step_end_ns=NOW_NS - 100_000_000)
    assert decision(grant, Pulse(), busy).slack_s == decision(make_grant(), busy).slack_s
    assert decision(grant, busy, Pulse()).slack_s == decision(make_grant(), busy).slack_s


def test_ungated_needs_a_grant_and_no_pulse(make_grant: MakeGrant) -> None:
    assert decision(make_grant(mode=GrantMode.UNGATED), PageFault.MISSING).tokens == 512


def test_a_probe_learns_whether_a_prediction_that_admits_nothing_is_right(
    make_grant: MakeGrant,
) -> None:
    # 1 ms of slack for a step that is predicted to take 2 ms and more.
    grant = make_grant(ttft_slo_s=0.021)
    assert decision(grant).reason is Closed.NO_SLACK
    found = decision(grant, may_probe=True)
    assert (found.tokens, found.probe) == (1, True)


def test_a_probe_waits_for_idle_production_and_for_its_own_steps(make_grant: MakeGrant) -> None:
    grant = make_grant(ttft_slo_s=0.021)
    busy = Pulse(in_flight=1, running=1)
    assert not decision(grant, busy, may_probe=True).open
    assert not decision(grant, may_probe=True, launched_s=0.001).open
    assert not decision(make_grant(ttft_slo_s=0.016), may_probe=True).open
    assert not decision(grant, may_probe=True, cap=0).open


def test_a_probe_owes_a_rest_and_is_repeated_late_once_it_was_too_long_for_the_slo(
    make_grant: MakeGrant,
) -> None:
    grant = make_grant(ttft_slo_s=0.021)
    assert decision(grant, may_probe=True).mean_wait_s == pytest.approx(0.001)

    def again(step_s: float, *, after_s: float) -> bool:
        ended_ns = NOW_NS - int(after_s * 1e9)
        return decision(grant, may_probe=True, last_step_s=step_s, last_end_ns=ended_ns).probe

    assert again(0.0009, after_s=1.0)
    assert not again(0.0011, after_s=599.0)
    assert again(0.0011, after_s=600.0)


def test_a_step_that_fits_is_no_probe(make_grant: MakeGrant) -> None:
    assert not decision(make_grant(), may_probe=True).probe


seconds = st.floats(0.0, 10.0) | st.sampled_from([math.inf, math.nan])
models = st.builds(
    ProductionModel,
    prefill_base_s=seconds,
    prefill_s_per_token=seconds,
    decode_base_s=seconds,
    decode_s_per_request=seconds,
)
counts = st.integers(0, 50)
stamps = st.integers(NOW_NS - 20_000_000_000, NOW_NS + 1_000_000_000)
pulses = st.builds(
    Pulse,
    in_flight=counts,
    waiting=counts,
    decoding=counts,
    oldest_waiting_arrival_ns=stamps | st.just(0),
    largest_waiting_prompt_tokens=st.integers(0, 100_000),
    last_step_end_ns=stamps | st.just(0),
)
grants = st.builds(
    Grant,
    epoch=counts,
    mode=st.sampled_from([GrantMode.OPEN, GrantMode.CLOSED]),
    step_tokens_cap=st.integers(-5, 1000),
    pulses=st.just(("pulse.a.0", "pulse.b.0")),
    ttft_slo_s=seconds,
    itl_slo_s=seconds,
    epsilon=seconds,
    phantom_prompt_tokens=st.integers(0, 100_000),
    production=models,
    blocking_ratio=seconds,
)
step_times = st.builds(
    StepTimeModel,
    base_s=st.floats(0.0, 1.0),
    decode_s=st.floats(1e-9, 0.1),
    prefill_s=st.floats(1e-9, 0.1),
    factor=st.floats(1.0, 4.0),
)
faults = st.sampled_from(list(PageFault))
booleans = st.booleans()


@given(grant=grants, fault=faults, pulse=pulses, first=booleans, probe=booleans)
def test_never_opens_on_any_faulty_page(
    grant: Grant, fault: PageFault, pulse: Pulse, first: bool, probe: bool
) -> None:
    readings = (fault, pulse) if first else (pulse, fault)
    assert not decision(grant, *readings, may_probe=probe).open
    assert not decision(fault, pulse, pulse, may_probe=probe).open


@given(grant=grants, pulse=pulses, step_time=step_times)
def test_no_probe_rests_for_ever(grant: Grant, pulse: Pulse, step_time: StepTimeModel) -> None:
    """Where nothing is known of production, arrivals may not wait at all, and there is no slack."""
    found = decision(grant, pulse, pulse, step_time=step_time, may_probe=True)
    assert not found.probe or (found.mean_wait_s or 0.0) > 0.0


@given(grant=grants, pulse=pulses, step_time=step_times, launched_s=seconds, decodes=counts)
def test_decides_something_for_whatever_pages_hold(
    grant: Grant, pulse: Pulse, step_time: StepTimeModel, launched_s: float, decodes: int
) -> None:
    found = decision(
        grant, pulse, pulse, step_time=step_time, launched_s=launched_s, decodes=decodes
    )
    assert 0 <= found.tokens <= 512
    assert found.open == (found.reason is None)
    assert not (found.open and found.slack_s <= 0.0)
    assert not math.isnan(found.slack_s)


@given(
    slo_s=st.floats(0.0, 2.0),
    more_s=st.floats(0.0, 2.0),
    step_time=step_times,
    decodes=counts,
    launched_s=st.floats(0.0, 0.1),
)
def test_more_slack_never_gives_fewer_tokens(
    slo_s: float, more_s: float, step_time: StepTimeModel, decodes: int, launched_s: float
) -> None:
    def tokens(ttft_slo_s: float) -> int:
        grant = Grant(
            epoch=1,
            mode=GrantMode.OPEN,
            pulses=("pulse.a.0",),
            ttft_slo_s=ttft_slo_s,
            epsilon=math.inf,
        )
        return decision(grant, step_time=step_time, decodes=decodes, launched_s=launched_s).tokens

    assert tokens(slo_s + more_s) >= tokens(slo_s)


@given(
    grant=grants,
    pulse=pulses,
    step_time=step_times,
    launched_s=st.floats(0.0, 1.0),
    more_s=st.floats(0.0, 1.0),
    decodes=counts,
    probe=booleans,
)
def test_launched_steps_only_take_tokens_away(
    grant: Grant,
    pulse: Pulse,
    step_time: StepTimeModel,
    launched_s: float,
    more_s: float,
    decodes: int,
    probe: bool,
) -> None:
    def tokens(launched_s: float) -> int:
        return decision(
            grant,
            pulse,
            pulse,
            step_time=step_time,
            launched_s=launched_s,
            decodes=decodes,
            may_probe=probe,
        ).tokens

    assert tokens(launched_s + more_s) <= tokens(launched_s)
