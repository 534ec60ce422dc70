"""Runs of prefills that teach step times, and runs that teach nothing."""

from random import Random
from statistics import fmean

import pytest

from coserve.law.phantom import phantom
from coserve.pulse.engine_cores import Siblings
from coserve.pulse.pulse_state import EngineShape
from tests.unit.coserve.pulse.conftest import Production


def test_learns_prefills_from_requests_that_were_alone_until_their_first_token(
    production: Production,
) -> None:
    for key in range(30):
        production.arrive(key)
        production.after(0.05).step(first_tokens=1, prompt_tokens=100)
        production.after(0.01).finish(key)
    production.state.refit()
    assert production.pulse().model.prefill_s(100) == pytest.approx(0.05)


@pytest.mark.parametrize("hit_ratio", [0.5, 0.8, 0.95])
def test_a_prefix_cache_makes_no_arrival_wait_longer_than_promised(
    production: Production, hit_ratio: float
) -> None:
    """Prompts of about 2,000 tokens, of which a hit computes 16: 20 ms, without a hit 420 ms."""
    epsilon, rng, alone_s = 0.05, Random(1), list[float]()
    for key in range(512):
        prompt = rng.randint(1500, 2500)
        computed = 16 if rng.random() < hit_ratio else prompt
        alone_s.append(0.02 + 2e-4 * computed)
        production.arrive(key)
        production.after(alone_s[-1]).step(
            first_tokens=1, prompt_tokens=prompt, cached_tokens=prompt - computed
        )
        production.after(0.015).step(inter_token_s=(0.015,), finished_prompt_tokens=(computed,))
        production.finish(key)
    production.state.refit()
    pulse = production.pulse()
    waits = phantom(
        pulse.prompt_tokens_quantiles, pulse.prompt_tokens_p99, pulse.model, 1.0, epsilon
    )
    for wait_s in (waits.each_s, waits.mean_s):
        assert wait_s > 0.0
        assert fmean(1 + wait_s / each for each in alone_s) <= 1 + epsilon


def test_learns_prefills_of_an_engine_that_is_never_idle(production: Production) -> None:
    """Measured from the end of the step that ran at the arrival, less the decodes' share."""
    for requests in (1, 2) * 15:
        production.step(inter_token_s=(0.003 + 0.001 * requests,) * requests)
    production.state.refit()
    production.arrive(0)
    production.arrive(1)
    production.after(0.04).step(first_tokens=2, prompt_tokens=100)
    for key in range(2, 32):
        production.after(0.003).arrive(key)
        production.after(0.002).step(inter_token_s=(0.005, 0.005))
        production.after(0.042).step(first_tokens=1, prompt_tokens=100, inter_token_s=(0.042,) * 2)
        production.after(0.005).finish(key)
    production.state.refit()
    assert production.pulse().model.prefill_s(100) == pytest.approx(0.04)


def test_learns_prefills_that_wait_for_one_another_from_all_of_them(
    production: Production,
) -> None:
    """Three prompts of 400 tokens, 512 a step, 0.1 ms a token: the cut prompts' shares cancel."""
    production.arrive(1)
    production.after(0.01).arrive(2)
    production.arrive(3)
    production.after(0.0412).step(first_tokens=1, prompt_tokens=400)
    production.after(0.0512).step(first_tokens=1, prompt_tokens=400)
    assert not production.state.times.prefills
    production.after(0.0176).step(first_tokens=1, prompt_tokens=400)
    assert production.state.times.prefills.pop() == (400, pytest.approx(0.04))


def test_an_engine_that_never_catches_up_teaches_too(production: Production) -> None:
    for key in range(40):
        production.arrive(key)
    for _ in range(39):
        production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    assert list(production.state.times.prefills) == [(400, pytest.approx(0.04))] * 2


def test_prefills_teach_nothing_where_a_request_went_away(production: Production) -> None:
    production.arrive(1)
    production.arrive(2)
    production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    production.after(0.02).finish(2)
    production.after(0.02).arrive(3)
    production.after(0.01).step(inter_token_s=(0.03,))
    production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    assert list(production.state.times.prefills) == [(400, pytest.approx(0.04))]


def test_waiting_for_room_is_no_prefill(production: Production) -> None:
    production.state.engine = EngineShape(step_tokens=512)
    production.arrive(1)
    production.arrive(2)
    production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    for _ in range(50):
        production.after(0.01).step(inter_token_s=(0.01,))
    production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    assert not production.state.times.prefills


def test_a_prefill_beside_one_of_another_api_server_teaches_nothing(
    production: Production,
) -> None:
    state = production.state
    state.arrive(1, body_bytes=300, now_ns=production.now_ns, beside=Siblings())
    production.after(0.05).step(
        beside=Siblings(in_flight=1, decoding=1, requests_total=1),
        ttft_s=(0.05,),
        prompt_tokens=50,
    )
    assert not state.times.prefills, "the other's prompt may have been in the step"
    production.after(0.01).finish(1)
    quiet = Siblings(in_flight=1, decoding=1, requests_total=1)
    state.arrive(2, body_bytes=300, now_ns=production.now_ns, beside=quiet)
    production.after(0.05).step(beside=quiet, ttft_s=(0.05,), prompt_tokens=50)
    assert list(state.times.prefills) == [(50, pytest.approx(0.05))]


def test_a_prompt_that_waits_for_room_that_others_hold_teaches_nothing(
    production: Production,
) -> None:
    state = production.state
    state.engine = EngineShape(step_tokens=512)
    before = Siblings(in_flight=1, decoding=1, requests_total=1, steps_total=100)
    state.arrive(1, body_bytes=300, now_ns=production.now_ns, beside=before)
    later = Siblings(in_flight=1, decoding=1, requests_total=1, steps_total=160)
    production.after(3.0).step(beside=later, first_tokens=1, prompt_tokens=50)
    assert not state.times.prefills
