"""The laws of others beside ours, on the same pages."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.law.engine_terms import terms_of
from coserve.law.gate import (
    ROSE_CHUNK_TOKENS,
    Closed,
    GuestLoad,
    StepDecision,
    decide,
    rose_law,
    saturation_law,
    slack_law,
)
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Grant, Law, ProductionModel, Pulse, Reading

MakeGrant = Callable[..., Grant]

NOW_NS = 1_000_000_000_000
MODEL = ProductionModel(
    prefill_base_s=0.01, prefill_s_per_token=1e-4, decode_base_s=0.01, decode_s_per_request=0.0
)
STEP_TIME = StepTimeModel(base_s=0.002, decode_s=0.001, prefill_s=0.0001, factor=1.0)


def guest(decodes: int = 0, cap: int = 2048) -> GuestLoad:
    return GuestLoad(STEP_TIME, decodes, 0, 0.0, cap)


def rose(pulses: list[Pulse], grant: Grant, load: GuestLoad) -> StepDecision:
    return rose_law(pulses, grant, load, terms=terms_of(pulses, grant), now_ns=NOW_NS)


def slack(pulses: list[Pulse], grant: Grant, load: GuestLoad) -> StepDecision:
    return slack_law(pulses, grant, load, terms=terms_of(pulses, grant), now_ns=NOW_NS)


def decoding(since_s: float) -> Pulse:
    return Pulse(in_flight=1, decoding=1, last_step_end_ns=NOW_NS - round(since_s * 1e9))


def test_rose_admits_a_chunk_while_every_slack_to_the_slo_is_positive(
    make_grant: MakeGrant,
) -> None:
    grant = make_grant(itl_slo_s=0.05, production=MODEL)
    # The next token may come 50 ms after the last and takes 10.
    assert rose([decoding(0.039)], grant, guest()).tokens == ROSE_CHUNK_TOKENS
    assert rose([decoding(0.041)], grant, guest()).tokens == 0
    both = [decoding(0.0), decoding(0.041)]
    assert rose(both, grant, guest()).tokens == 0


def test_rose_lets_production_be_as_late_as_its_slo_where_we_do_not(make_grant: MakeGrant) -> None:
    grant = make_grant(itl_slo_s=0.05, epsilon=0.05, production=MODEL)
    assert slack([decoding(0.001)], grant, guest()).tokens == 0
    assert rose([decoding(0.001)], grant, guest()).tokens > 0


def test_rose_knows_no_phantom(make_grant: MakeGrant) -> None:
    grant = make_grant(ttft_slo_s=0.02, phantom_prompt_tokens=10_000, production=MODEL)
    admitted = rose([Pulse()], grant, guest(cap=100))
    assert (admitted.tokens, admitted.slack_s) == (100, math.inf)


@pytest.mark.parametrize(
    ("pulse", "probability"),
    [
        (Pulse(), 0.0),
        (Pulse(waiting=1), 300 * 0.2**5),
        (Pulse(waiting=2), 1.0),
        (Pulse(kv_usage_ratio=0.2), 300 * 0.25**5),
        (Pulse(kv_usage_ratio=0.4), 1.0),
    ],
)
def test_saturation_sheds_as_llm_d_does(pulse: Pulse, probability: float) -> None:
    def admits(chance: float) -> bool:
        return saturation_law([pulse], guest(cap=256), chance=chance).tokens == 256

    assert admits(min(probability, 0.999) + 0.0009) == (probability < 1.0)
    assert admits(0.0) == (probability == 0.0)


def test_saturation_is_the_mean_over_engines_as_llm_d_takes_it_over_endpoints() -> None:
    full, idle = Pulse(waiting=2), Pulse()
    assert saturation_law([full, idle], guest(), chance=0.5).tokens == 2048
    assert saturation_law([full, full], guest(), chance=0.5).tokens == 0


def test_shedding_leaves_the_guests_running_requests_their_steps() -> None:
    assert saturation_law([Pulse(waiting=5)], guest(decodes=7), chance=0.5).tokens == 7
    assert saturation_law([Pulse(waiting=5)], guest(), chance=0.5).tokens == 0


@pytest.mark.parametrize(
    ("law", "open_"), [(Law.SLACK, False), (Law.ROSE, True), (Law.SATURATION, True)]
)
def test_the_gate_obeys_the_law_of_the_grant(make_grant: MakeGrant, law: Law, open_: bool) -> None:
    grant = make_grant(law=law, itl_slo_s=0.05, epsilon=0.05, production=MODEL)
    decision = decide(
        Reading(grant, None),
        [Reading(decoding(0.001), None)],
        guest(cap=256),
        may_probe=False,
        now_ns=NOW_NS,
        chance=lambda: 0.5,
    )
    assert decision.open is open_
    assert decision.reason is (None if open_ else Closed.NO_SLACK)


@given(
    waiting=st.integers(0, 100),
    kv=st.floats(0, 1),
    decodes=st.integers(0, 300),
    cap=st.integers(1, 4096),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_no_law_admits_more_than_the_grant_allows(
    waiting: int, kv: float, decodes: int, cap: int, chance: float
) -> None:
    pulse = Pulse(waiting=waiting, kv_usage_ratio=kv)
    assert 0 <= saturation_law([pulse], guest(decodes, cap), chance=chance).tokens <= cap
