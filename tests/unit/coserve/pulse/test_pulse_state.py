"""The state of one API-server process of production, event by event."""

from random import Random
from statistics import fmean
from time import thread_time
from typing import Any

import pytest

from coserve.law.phantom import phantom
from coserve.pulse.engine_cores import NO_SIBLINGS, EngineStep, Siblings
from coserve.pulse.pulse_state import PulseState
from harvester.contracts.page import Pulse

START_NS = 1_000_000_000_000


class Production:
    """An engine whose clock advances by the duration of each event."""

    def __init__(self) -> None:
        self.state = PulseState()
        self.now_ns = START_NS
        self.waiting_ns: dict[int, int] = {}
        self.arrivals = 0

    def after(self, seconds: float) -> "Production":
        self.now_ns += round(seconds * 1e9)
        return self

    def arrive(self, key: int, *, body_bytes: int = 300) -> None:
        # vLLM has each request a little later than the middleware, and each at its own time.
        self.arrivals += 1
        self.waiting_ns[key] = self.now_ns + 3_000 * self.arrivals
        self.state.arrive(key, body_bytes=body_bytes, now_ns=self.now_ns)

    def finish(self, key: int) -> None:
        self.waiting_ns.pop(key, None)
        self.state.finish(key, now_ns=self.now_ns)

    def step(
        self,
        beside: Siblings | None = NO_SIBLINGS,
        *,
        first_tokens: int = 0,
        ttft_s: tuple[float, ...] = (),
        **fields: Any,
    ) -> None:
        """`first_tokens` of the requests that wait longest; `ttft_s` of others, as vLLM has it."""
        for key in list(self.waiting_ns)[:first_tokens]:
            ttft_s += ((self.now_ns - self.waiting_ns.pop(key)) * 1e-9,)
        defaults: dict[str, Any] = {
            "running": None,
            "kv_usage_ratio": None,
            "ttft_s": ttft_s,
            "wall_s": self.now_ns * 1e-9,
            "prompt_tokens": 0,
            "generation_tokens": 0,
            "inter_token_s": (),
            "finished_prompt_tokens": (),
        }
        step = EngineStep(**(defaults | fields))
        self.state.step(step, now_ns=self.now_ns, beside=beside)

    def pulse(self) -> Pulse:
        return self.state.pulse(now_ns=self.now_ns)


@pytest.fixture
def production() -> Production:
    return Production()


def test_a_request_waits_then_decodes_then_is_gone(production: Production) -> None:
    production.arrive(1)
    pulse = production.pulse()
    assert (pulse.in_flight, pulse.waiting, pulse.decoding) == (1, 1, 0)
    assert pulse.oldest_waiting_arrival_ns == START_NS
    production.after(0.02).step(first_tokens=1, prompt_tokens=50, generation_tokens=1, running=1)
    pulse = production.pulse()
    assert (pulse.in_flight, pulse.waiting, pulse.decoding, pulse.running) == (1, 0, 1, 1)
    assert pulse.oldest_waiting_arrival_ns == 0
    assert pulse.last_step_end_ns == production.now_ns
    production.finish(1)
    pulse = production.pulse()
    assert (pulse.in_flight, pulse.waiting, pulse.decoding, pulse.requests_total) == (0, 0, 0, 1)


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


def test_a_request_that_is_not_streamed_still_has_a_first_token(production: Production) -> None:
    production.arrive(1)
    production.after(0.02).step(first_tokens=1, prompt_tokens=50)
    production.after(0.02).step(inter_token_s=(0.02,), finished_prompt_tokens=(50,))
    assert production.pulse().decoding == 1
    production.finish(1)
    assert production.pulse().ttft_s_recent == pytest.approx((0.02,), abs=1e-4)


def test_the_pulse_has_the_distribution_of_prompts(production: Production) -> None:
    production.state.refit()
    assert production.pulse().prompt_tokens_quantiles == ()
    production.step(finished_prompt_tokens=(70, 30))
    production.state.refit()
    assert production.pulse().prompt_tokens_quantiles == (1, 30, 70), "and one of a single token"
    production.step(finished_prompt_tokens=tuple(range(1000, 0, -1)))
    production.state.refit()
    found = production.pulse().prompt_tokens_quantiles
    assert found == (1, 52, 103, 154, 205, 257, 308, 359, 410, 461), "of the last 512"


def test_a_request_that_fails_before_its_first_token_leaves_no_sample(
    production: Production,
) -> None:
    production.arrive(1)
    production.finish(1)
    production.arrive(2)
    production.after(0.01).step(first_tokens=1, prompt_tokens=5)
    assert production.pulse().ttft_s_recent == pytest.approx((0.01,), abs=1e-4)


def test_a_request_that_ends_before_its_first_token_leaves_the_time_that_it_waited(
    production: Production,
) -> None:
    production.arrive(1)
    production.arrive(2)
    production.after(0.5).arrive(3)
    production.after(1.5).finish(1)
    production.finish(1)
    production.step(ttft_s=(2.0,), prompt_tokens=5)
    production.after(0.5).finish(2)
    production.finish(3)
    pulse = production.pulse()
    assert pulse.unanswered_s_recent == pytest.approx((2.0, 2.0))
    assert (pulse.unanswered_total, pulse.samples_total) == (2, 1)


def test_keeps_the_newest_waits_and_counts_them_all(production: Production) -> None:
    for key in range(40):
        production.arrive(key)
        production.after(0.01 * key).finish(key)
    pulse = production.pulse()
    assert pulse.unanswered_s_recent == pytest.approx([0.01 * key for key in range(8, 40)])
    assert pulse.unanswered_total == 40


def test_counts_each_late_token_of_a_batch_that_many_tokens_in_time_follow(
    production: Production,
) -> None:
    production.state.itl_slo_s = 0.05
    production.step(inter_token_s=(0.8,) * 63 + (0.01,))
    for _ in range(10):
        production.step(inter_token_s=(0.05,) * 64)
    pulse = production.pulse()
    assert set(pulse.itl_s_recent) == {0.05}
    assert (pulse.itl_late_total, pulse.itl_late_s_recent) == (63, (0.8,) * 8)
    assert pulse.itl_slo_s == 0.05


def test_without_an_slo_no_token_is_late(production: Production) -> None:
    production.step(inter_token_s=(0.8,))
    pulse = production.pulse()
    assert (pulse.itl_slo_s, pulse.itl_late_total, pulse.itl_late_s_recent) == (0.0, 0, ())


def test_ending_a_request_twice_counts_once(production: Production) -> None:
    production.arrive(1)
    production.after(1.0).finish(1)
    production.after(1.0).finish(1)
    assert production.pulse().busy_s_total == pytest.approx(1.0)


def test_busy_time_is_the_time_with_a_request_in_flight(production: Production) -> None:
    production.arrive(1)
    production.after(1.0).arrive(2)
    production.after(1.0).finish(1)
    assert production.pulse().busy_s_total == pytest.approx(2.0)
    production.after(1.0).finish(2)
    production.after(5.0)
    assert production.pulse().busy_s_total == pytest.approx(3.0)
    production.arrive(3)
    assert production.after(0.5).pulse().busy_s_total == pytest.approx(3.5)


def test_the_mean_step_leaves_idle_time_out(production: Production) -> None:
    for key in range(200):
        production.arrive(key)
        for _ in range(3):
            production.after(0.010).step()
        production.finish(key)
        production.after(60.0)
    assert production.pulse().step_s_mean == pytest.approx(0.010, rel=0.01)


def test_counts_steps_tokens_and_the_cache(production: Production) -> None:
    production.step(running=3, kv_usage_ratio=0.25, prompt_tokens=7, generation_tokens=2)
    production.step(generation_tokens=3)
    pulse = production.pulse()
    assert (pulse.steps_total, pulse.prompt_tokens_total, pulse.generation_tokens_total) == (
        2,
        7,
        5,
    )
    assert (pulse.running, pulse.kv_usage_ratio) == (3, 0.25)


def test_keeps_the_newest_samples_and_counts_them_all(production: Production) -> None:
    for sample in range(50):
        production.step(inter_token_s=(float(sample),))
    pulse = production.pulse()
    assert pulse.itl_s_recent == tuple(float(sample) for sample in range(18, 50))
    assert pulse.itl_samples_total == 50


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


def test_the_p99_prompt_is_that_of_finished_requests(production: Production) -> None:
    production.step(finished_prompt_tokens=tuple(range(1, 101)))
    assert production.pulse().prompt_tokens_p99 == 0, "slow figures come with refit"
    production.state.refit()
    assert production.pulse().prompt_tokens_p99 == 100


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
    production.state.step_tokens = 512
    production.arrive(1)
    production.arrive(2)
    production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    for _ in range(50):
        production.after(0.01).step(inter_token_s=(0.01,))
    production.after(0.04).step(first_tokens=1, prompt_tokens=400)
    assert not production.state.times.prefills


def test_a_step_that_may_hold_a_piece_of_a_prompt_is_no_decode(production: Production) -> None:
    production.arrive(1)
    production.after(0.01).step(first_tokens=1, prompt_tokens=20)
    production.arrive(2)
    production.after(0.05).step(inter_token_s=(0.05,))
    assert not production.state.times.decodes
    production.after(0.05).step(inter_token_s=(0.05,), first_tokens=1, prompt_tokens=900)
    production.after(0.01).step(inter_token_s=(0.01, 0.01))
    assert list(production.state.times.decodes) == [(2, 0.01)]


def test_learns_decodes_from_steps_without_a_prefill(production: Production) -> None:
    for _ in range(30):
        production.step(inter_token_s=(0.004, 0.005, 0.006))
        production.step(inter_token_s=(0.040, 0.040), ttft_s=(0.040,), prompt_tokens=100)
    production.state.refit()
    assert production.pulse().model.decode_s(3) == pytest.approx(0.005)


def test_the_pulse_says_how_well_its_model_held(production: Production) -> None:
    for _ in range(30):
        production.step(inter_token_s=(0.005,))
    assert production.pulse().decode_calibration.steps == 0
    production.state.refit()
    for _ in range(10):
        production.step(inter_token_s=(0.010,))
    production.state.refit()
    pulse = production.pulse()
    assert (pulse.decode_calibration.steps, pulse.decode_calibration.over_ratio) == (10, 1.0)
    assert pulse.decode_calibration.p90_ratio == pytest.approx(2.0)
    assert pulse.prefill_calibration.steps == 0


def test_a_step_beside_a_guest_is_not_learned(production: Production) -> None:
    times = production.state.times
    production.arrive(1)
    production.state.alone_since_ns = None
    production.after(0.05).step(first_tokens=1, prompt_tokens=100)
    production.after(0.01).step(inter_token_s=(0.01,))
    assert not times.prefills
    assert not times.decodes
    production.after(0.005)
    production.state.alone_since_ns = production.now_ns
    production.after(0.005).step(inter_token_s=(0.01,))
    assert not times.decodes, "it began while a guest was let in"
    production.after(0.01).step(inter_token_s=(0.01,))
    assert len(times.decodes) == 1
    production.arrive(2)
    production.after(0.01).step(inter_token_s=(0.01,))
    production.after(0.04).step(first_tokens=1, prompt_tokens=100)
    assert len(times.prefills) == 1


def test_the_model_rests_on_no_more_than_its_lesser_half(production: Production) -> None:
    for key in range(25):
        production.arrive(key)
        production.after(0.05).step(first_tokens=1, prompt_tokens=100)
        production.after(0.01).finish(key)
        assert production.pulse().model_samples == 0
    for seen in range(1, 30):
        production.step(inter_token_s=(0.004,))
        assert production.pulse().model_samples == (seen if seen < 20 else 25 + seen)


def test_publishes_no_model_before_there_are_enough_samples(production: Production) -> None:
    for _ in range(19):
        production.step(inter_token_s=(0.005,))
    production.state.refit()
    assert production.pulse().model.decode_s(1) == 0.0


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
    state.step_tokens = 512
    before = Siblings(in_flight=1, decoding=1, requests_total=1, steps_total=100)
    state.arrive(1, body_bytes=300, now_ns=production.now_ns, beside=before)
    later = Siblings(in_flight=1, decoding=1, requests_total=1, steps_total=160)
    production.after(3.0).step(beside=later, first_tokens=1, prompt_tokens=50)
    assert not state.times.prefills


def test_decodes_of_other_api_servers_are_in_the_batch(production: Production) -> None:
    state = production.state
    for beside in (None, Siblings(in_flight=4, waiting=1, decoding=3, requests_total=4)):
        production.step(beside=beside, inter_token_s=(0.01, 0.01))
        production.step(beside=beside, inter_token_s=(0.01, 0.01))
    assert not state.times.decodes, "what they have is not known, or may be a prefill"
    for _ in range(2):
        decoding = Siblings(in_flight=3, decoding=3, requests_total=4)
        production.after(0.01).step(beside=decoding, inter_token_s=(0.01, 0.01))
    assert list(state.times.decodes) == [(5, 0.01)]


def test_engine_cores_that_step_side_by_side_teach_only_what_was_one_cores(
    production: Production,
) -> None:
    times = production.state.times
    production.step(rank=0, inter_token_s=(0.01,))
    production.after(0.002).step(rank=1, inter_token_s=(0.02,))
    production.after(0.002).step(rank=0, inter_token_s=(0.012, 0.012))
    assert list(times.decodes)[-1] == (2, 0.012)
    production.arrive(1)
    production.arrive(2)
    production.after(0.05).step(rank=0, first_tokens=1, prompt_tokens=50)
    production.after(0.01).step(rank=1, first_tokens=1, prompt_tokens=50)
    assert not times.prefills, "they prefilled at once"
    production.finish(1)
    production.finish(2)
    production.after(1.0).arrive(3)
    production.after(0.05).step(rank=1, first_tokens=1, prompt_tokens=50)
    assert list(times.prefills) == [(50, pytest.approx(0.05))]


def test_a_pulse_has_the_age_of_each_core_s_report(production: Production) -> None:
    production.step(rank=1, running=2, kv_usage_ratio=0.5)
    told_ns = production.now_ns
    production.after(1.0).step(rank=1, inter_token_s=(0.01,))
    (core,) = production.pulse().cores
    assert (core.rank, core.told_ns, core.kv_usage_ratio) == (1, told_ns, 0.5)
