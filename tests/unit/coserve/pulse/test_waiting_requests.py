"""A first token ends the right request's wait, and prompts that wait have a bound."""

from random import Random
from time import thread_time

import pytest

from tests.unit.coserve.pulse.conftest import START_NS, Production


def test_first_tokens_go_to_the_requests_that_wait_longest(production: Production) -> None:
    for key in (1, 2, 3):
        production.arrive(key, body_bytes=100 * key)
        production.after(0.01)
    production.step(first_tokens=2, prompt_tokens=10)
    pulse = production.pulse()
    assert pulse.ttft_s_recent == pytest.approx((0.03, 0.02), abs=1e-4)
    assert pulse.oldest_waiting_arrival_ns == START_NS + 20_000_000
    production.after(0.01).step(first_tokens=1, prompt_tokens=10)
    assert production.pulse().ttft_s_recent == pytest.approx((0.03, 0.02, 0.02), abs=1e-4)
    assert production.pulse().samples_total == 3


def test_samples_of_one_request_take_no_first_token_of_others(production: Production) -> None:
    production.arrive(1, body_bytes=40_000)
    for key in (2, 3, 4, 5):
        production.after(0.01).arrive(key)
    production.after(0.26).step(ttft_s=(0.3 - 3e-6,) * 3, prompt_tokens=4000)
    production.after(0.1).step(ttft_s=(0.4 - 3e-6,))
    pulse = production.pulse()
    assert (pulse.waiting, pulse.decoding, pulse.samples_total) == (4, 1, 4)
    assert pulse.oldest_waiting_arrival_ns == START_NS + 10_000_000


def test_a_burst_whose_first_tokens_come_in_another_order_leaves_none_waiting(
    production: Production,
) -> None:
    """vLLM has each request 1 ms after the middleware; the second comes 1.5 ms after the first."""
    production.arrive(1)
    production.after(0.0015).arrive(2)
    production.after(0.0485).step(ttft_s=(0.0475,), prompt_tokens=50)
    production.after(0.01).step(ttft_s=(0.059,), prompt_tokens=50)
    pulse = production.pulse()
    assert (pulse.waiting, pulse.decoding) == (0, 2)


def test_a_request_that_others_overtake_keeps_its_own_time(production: Production) -> None:
    production.arrive(1, body_bytes=40_000)
    for key in range(2, 22):
        production.after(0.1).arrive(key)
        production.after(0.05).step(ttft_s=(0.05 - 3e-6,), prompt_tokens=50)
        assert production.pulse().oldest_waiting_arrival_ns == START_NS
    production.after(2.0).step(ttft_s=(5.0 - 3e-6,), prompt_tokens=8000)
    pulse = production.pulse()
    assert pulse.waiting == 0
    assert [round(ttft_s, 2) for ttft_s in pulse.ttft_s_recent] == [0.05] * 20 + [5.0]


def test_the_largest_waiting_prompt_is_known_in_whatever_order_they_go(
    production: Production,
) -> None:
    rng, waiting = Random(1), dict[int, int]()
    for key in range(2000):
        production.after(0.001)
        body_bytes = rng.randrange(200, 90_000)
        production.arrive(key, body_bytes=body_bytes)
        waiting[key] = max(1, int((body_bytes - 100) / 2.0))
        while waiting and rng.random() < 0.49:
            gone = rng.choice([*waiting])
            production.finish(gone)
            del waiting[gone]
        pulse = production.pulse()
        assert pulse.largest_waiting_prompt_tokens == max(waiting.values(), default=0)
        assert pulse.waiting == len(waiting)


def test_a_pulse_costs_the_same_however_many_requests_wait() -> None:
    def pulse_s(waiting: int) -> float:
        production = Production()
        for key in range(waiting):
            production.arrive(key)
        times = []
        for _ in range(20):
            began_s = thread_time()
            production.pulse()
            times.append(thread_time() - began_s)
        return min(times)

    assert pulse_s(20_000) < 10 * pulse_s(20)


def test_the_prompt_bound_follows_smaller_ratios_fast_and_larger_ones_slowly(
    production: Production,
) -> None:
    def bound_after(body_bytes: int, prompt_tokens: int, requests: int) -> int:
        for key in range(requests):
            production.arrive(key, body_bytes=body_bytes)
            production.after(0.01).step(first_tokens=1, prompt_tokens=prompt_tokens)
            production.finish(key)
        production.arrive(10_000, body_bytes=1300)
        bound = production.pulse().largest_waiting_prompt_tokens
        production.finish(10_000)
        return bound

    assert bound_after(1300, 1200, 0) == 600, "two bytes a token before the first prompt"
    assert bound_after(1300, 1200, 20) > 1180, "one byte a token"
    assert 550 < bound_after(1300, 300, 20) < 1180, "four bytes a token, believed slowly"
    assert bound_after(1300, 300, 400) < 310


def test_a_body_of_unknown_length_is_a_prompt_of_one_token_and_no_error(
    production: Production,
) -> None:
    production.arrive(1, body_bytes=0)
    assert production.pulse().largest_waiting_prompt_tokens == 1
    production.step(first_tokens=1, prompt_tokens=40)
    production.arrive(2, body_bytes=1300)
    assert production.pulse().largest_waiting_prompt_tokens == 600
