"""The slack law against numbers worked out by hand.

Alone, a prefill of n tokens takes 10 ms + 0.1 ms * n and a decode of b requests 4 ms + 0.5 ms * b.
"""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coserve.law.engine_terms import terms_of
from coserve.law.slack import deadline_s, hung, slack_s
from harvester.contracts.page import Grant, GrantMode, ProductionModel, Pulse

MakeGrant = Callable[..., Grant]

NOW_NS = 1_000_000_000_000
IDLE = Pulse()


def ago_ns(seconds: float) -> int:
    return NOW_NS - round(seconds * 1e9)


def slack(pulse: Pulse, grant: Grant) -> float:
    return slack_s([pulse], grant, terms_of([pulse], grant), now_ns=NOW_NS)


def is_hung(pulse: Pulse, grant: Grant, *, now_ns: int = NOW_NS) -> bool:
    return hung(pulse, *terms_of([pulse], grant), now_ns=now_ns)


def test_the_deadline_is_the_smaller_of_slo_and_stretched_time_alone() -> None:
    assert deadline_s(0.5, 0.1, 0.05) == pytest.approx(0.105)
    assert deadline_s(0.1, 0.1, 0.05) == pytest.approx(0.1)
    assert deadline_s(0.5, 0.1, math.inf) == 0.5
    assert deadline_s(0.5, 0.0, math.inf) == 0.5


def test_idle_production_leaves_the_slack_of_a_phantom_request(make_grant: MakeGrant) -> None:
    # Alone the phantom takes 10 ms + 100 * 0.1 ms = 20 ms.
    assert slack(IDLE, make_grant()) == pytest.approx(1.0 - 0.020)
    assert slack(IDLE, make_grant(epsilon=0.05)) == pytest.approx(0.05 * 0.020)
    assert slack(IDLE, make_grant(ttft_slo_s=0.016)) == pytest.approx(-0.004)


def test_a_phantom_that_is_late_alone_spares_no_more_than_one_just_in_time(
    make_grant: MakeGrant,
) -> None:
    long = make_grant(epsilon=0.05, phantom_prompt_tokens=16_384)
    # Alone it takes 1.65 s of an SLO of 1 s. One of 1 s / 1.05 is in time with a twentieth on top,
    # and a twentieth of a longer one is no more.
    assert slack(IDLE, long) == pytest.approx(0.05 / 1.05)
    longer = make_grant(epsilon=0.05, phantom_prompt_tokens=1_000_000)
    assert slack(IDLE, longer) == pytest.approx(0.05 / 1.05)
    lax = make_grant(epsilon=1e6, phantom_prompt_tokens=16_384)
    assert slack(IDLE, lax) == pytest.approx(0.25 / 1.25), "nor more than a fifth of the SLO"


@pytest.mark.parametrize("slo_s", [0.0195, 0.0201, 0.0205, 0.022])
def test_a_phantom_that_is_hardly_in_time_alone_does_not_shut_an_idle_machine(
    make_grant: MakeGrant, slo_s: float
) -> None:
    # 20 ms alone; with a quarter on top it would be late in each of these.
    grant = make_grant(epsilon=0.25, ttft_slo_s=slo_s)
    assert slack(IDLE, grant) == pytest.approx(slo_s / 5)


def test_a_request_that_is_there_keeps_its_slo_however_near(make_grant: MakeGrant) -> None:
    arrived = Pulse(
        in_flight=1,
        waiting=1,
        oldest_waiting_arrival_ns=NOW_NS,
        largest_waiting_prompt_tokens=100,
    )
    grant = make_grant(epsilon=0.25, ttft_slo_s=0.0201)
    assert slack(arrived, grant) == pytest.approx(0.0001, abs=1e-6)


@given(
    tokens=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    epsilon=st.floats(0.0, 0.25),
    slo_s=st.floats(0.01, 1.0),
)
def test_a_shorter_phantom_never_leaves_more_than_a_longer_one(
    tokens: tuple[int, int], epsilon: float, slo_s: float
) -> None:
    def of(prompt_tokens: int) -> float:
        grant = Grant(
            epoch=1,
            mode=GrantMode.OPEN,
            pulses=("pulse.prod.0",),
            ttft_slo_s=slo_s,
            epsilon=epsilon,
            phantom_prompt_tokens=prompt_tokens,
            production=ProductionModel(
                prefill_base_s=0.010,
                prefill_s_per_token=0.0001,
                decode_base_s=0.004,
                decode_s_per_request=0.0005,
            ),
        )
        return slack(IDLE, grant)

    shorter, longer = sorted(tokens)
    assert 0.0 <= of(shorter) <= of(longer) + 1e-12
    assert of(longer) <= epsilon * slo_s + 1e-12


def test_without_a_model_only_an_infinite_epsilon_leaves_slack(make_grant: MakeGrant) -> None:
    unknown = ProductionModel()
    assert slack(IDLE, make_grant(production=unknown, epsilon=0.05)) == 0.0
    assert slack(IDLE, make_grant(production=unknown)) == 1.0


def test_infinite_epsilon_is_roses_law_for_a_waiting_prefill(make_grant: MakeGrant) -> None:
    pulse = Pulse(
        in_flight=3,
        waiting=1,
        decoding=2,
        oldest_waiting_arrival_ns=ago_ns(0.3),
        largest_waiting_prompt_tokens=200,
        last_step_end_ns=NOW_NS,
    )
    # Arrival + D_TTFT less now and T_prefill: 10 + 20 ms and the decodes' 4 + 2 * 0.5 ms.
    ttft = -0.3 + 1.0 - 0.035
    assert slack(pulse, make_grant(itl_slo_s=10.0)) == pytest.approx(ttft)


def test_infinite_epsilon_is_roses_law_for_a_decode(make_grant: MakeGrant) -> None:
    pulse = Pulse(in_flight=2, decoding=2, last_step_end_ns=ago_ns(0.05))
    # Last step + D_TPOT less now and T_decode.
    assert slack(pulse, make_grant()) == pytest.approx(-0.05 + 0.2 - 0.005)


def test_a_finite_epsilon_bounds_what_a_decode_may_wait(make_grant: MakeGrant) -> None:
    pulse = Pulse(in_flight=2, decoding=2, last_step_end_ns=ago_ns(0.0001))
    # 5 % of 5 ms, less the 0.1 ms since the last step.
    assert slack(pulse, make_grant(epsilon=0.05)) == pytest.approx(0.05 * 0.005 - 0.0001)


def test_a_finite_epsilon_is_shared_out_by_the_shortest_prompt_that_may_wait(
    make_grant: MakeGrant,
) -> None:
    pulse = Pulse(
        in_flight=1,
        waiting=1,
        oldest_waiting_arrival_ns=NOW_NS,
        largest_waiting_prompt_tokens=5_000,
    )
    # A request of almost no tokens takes 10 ms alone; the largest one would permit 25.5 ms.
    assert slack(pulse, make_grant(epsilon=0.05)) == pytest.approx(0.05 * 0.010)


def test_the_least_event_decides(make_grant: MakeGrant) -> None:
    decoding = Pulse(in_flight=1, decoding=1, last_step_end_ns=ago_ns(0.1))
    both = Pulse(
        in_flight=2,
        decoding=1,
        last_step_end_ns=ago_ns(0.1),
        waiting=1,
        oldest_waiting_arrival_ns=ago_ns(0.99),
    )
    assert slack(both, make_grant()) < slack(decoding, make_grant()) < slack(IDLE, make_grant())


def test_a_breached_deadline_is_negative_slack(make_grant: MakeGrant) -> None:
    pulse = Pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=ago_ns(1.5))
    assert slack(pulse, make_grant()) == pytest.approx(-0.5 - 0.010)


def test_times_that_are_unknown_are_long_ago(make_grant: MakeGrant) -> None:
    assert slack(Pulse(in_flight=1, waiting=1), make_grant()) < 0.0
    assert slack(Pulse(in_flight=1, decoding=1), make_grant()) < 0.0


def test_an_event_from_the_future_brings_no_slack_beyond_its_deadline(
    make_grant: MakeGrant,
) -> None:
    waiting = Pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=NOW_NS)
    ahead = Pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=ago_ns(-0.9))
    assert slack(ahead, make_grant()) == slack(waiting, make_grant())
    decoding = Pulse(in_flight=1, decoding=1, last_step_end_ns=NOW_NS)
    stepped_ahead = Pulse(in_flight=1, decoding=1, last_step_end_ns=ago_ns(-0.9))
    assert slack(stepped_ahead, make_grant()) == slack(decoding, make_grant())


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(
    values=st.lists(st.sampled_from([0.0, 0.001, 1.0]) | numbers, min_size=7, max_size=7),
    nan_at=st.integers(0, 6),
    pulse=st.sampled_from(
        [
            Pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=NOW_NS),
            Pulse(in_flight=1, decoding=1, last_step_end_ns=NOW_NS),
        ]
    ),
)
@example(  # A bound of minus infinity times a negative epsilon.
    values=[0.0, 0.0, 0.0, -1.0, -1.0, 0.0, -1.0],
    nan_at=0,
    pulse=Pulse(in_flight=1, decoding=1, last_step_end_ns=NOW_NS),
)
def test_a_grant_with_a_number_that_is_none_leaves_no_slack(
    values: list[float], nan_at: int, pulse: Pulse
) -> None:
    values[nan_at] = math.nan
    names = ("prefill_base_s", "prefill_s_per_token", "decode_base_s", "decode_s_per_request")
    grant = Grant(
        epoch=1,
        mode=GrantMode.OPEN,
        ttft_slo_s=values[4],
        itl_slo_s=values[5],
        epsilon=values[6],
        phantom_prompt_tokens=1,
        production=ProductionModel(**dict(zip(names, values, strict=False))),
    )
    found = slack(pulse, grant)
    assert not math.isnan(found)
    # Where nothing decodes its SLO says nothing.
    if pulse.decoding or nan_at != 5:
        assert found <= 0.0


@given(waited_s=st.floats(0.0, 2.0), more_s=st.floats(0.0, 2.0), tokens=st.integers(0, 5000))
def test_slack_only_shrinks_as_time_passes(waited_s: float, more_s: float, tokens: int) -> None:
    grant = Grant(
        epoch=1,
        mode=GrantMode.OPEN,
        ttft_slo_s=1.0,
        itl_slo_s=0.2,
        production=ProductionModel(prefill_base_s=0.01, prefill_s_per_token=1e-4),
    )
    pulse = Pulse(
        in_flight=2,
        waiting=1,
        decoding=1,
        oldest_waiting_arrival_ns=ago_ns(waited_s),
        last_step_end_ns=ago_ns(waited_s),
        largest_waiting_prompt_tokens=tokens,
    )
    later_ns = NOW_NS + round(more_s * 1e9)
    terms = terms_of([pulse], grant)
    assert slack_s([pulse], grant, terms, now_ns=later_ns) <= slack(pulse, grant)


def test_hangs_after_five_seconds_without_a_step(make_grant: MakeGrant) -> None:
    grant = make_grant()
    assert not is_hung(Pulse(in_flight=1, last_step_end_ns=ago_ns(4.9)), grant, now_ns=NOW_NS)
    assert is_hung(Pulse(in_flight=1, last_step_end_ns=ago_ns(5.1)), grant, now_ns=NOW_NS)


def test_long_steps_may_take_longer_before_they_are_called_hung(make_grant: MakeGrant) -> None:
    pulse = Pulse(
        in_flight=1,
        waiting=1,
        oldest_waiting_arrival_ns=ago_ns(20.0),
        largest_waiting_prompt_tokens=10_000,
    )
    # 20 * (10 ms + 1 s + 4 ms) = 20.28 s
    assert not is_hung(pulse, make_grant(), now_ns=NOW_NS)
    assert is_hung(pulse, make_grant(), now_ns=NOW_NS + 300_000_000)


def test_an_arrival_after_an_idle_hour_is_no_hang(make_grant: MakeGrant) -> None:
    pulse = Pulse(
        in_flight=1,
        waiting=1,
        oldest_waiting_arrival_ns=ago_ns(0.1),
        last_step_end_ns=ago_ns(900.0),
    )
    assert not is_hung(pulse, make_grant(), now_ns=NOW_NS)


def test_idle_production_never_hangs(make_grant: MakeGrant) -> None:
    assert not is_hung(Pulse(last_step_end_ns=ago_ns(900.0)), make_grant(), now_ns=NOW_NS)
