"""The state of one API-server process of production, event by event."""

import pytest

from coserve.pulse.engine_cores import Siblings
from tests.unit.coserve.pulse.conftest import START_NS, Production


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


def test_the_p99_prompt_is_that_of_finished_requests(production: Production) -> None:
    production.step(finished_prompt_tokens=tuple(range(1, 101)))
    assert production.pulse().prompt_tokens_p99 == 0, "slow figures come with refit"
    production.state.refit()
    assert production.pulse().prompt_tokens_p99 == 100


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
