"""The newest word on each core of an engine, and the room that a page has for all of them."""

import msgspec

from harvester.contracts.page import (
    MOST_GPUS,
    Calibration,
    EngineCore,
    ProductionModel,
    Pulse,
    PulseHead,
    latest_cores,
)
from harvester.contracts.page.seal import MAX_RECORD_BYTES
from harvester.contracts.process import ProcessId

SECOND_NS = 1_000_000_000


def word(rank: int, running: int, told_s: float) -> PulseHead:
    told_ns = round(told_s * SECOND_NS)
    return PulseHead(cores=(EngineCore(rank=rank, told_ns=told_ns, running=running),))


def running(*pulses: PulseHead) -> dict[int, int]:
    return {core.rank: core.running for core in latest_cores(pulses)}


def test_one_process_is_believed_as_it_is() -> None:
    assert running(word(0, 4, 1.0)) == {0: 4}
    assert running(PulseHead()) == {}


def test_the_newest_word_counts_rank_by_rank_whatever_the_order() -> None:
    words = word(0, 4, 1.0), word(0, 7, 2.0), word(1, 3, 1.5)
    assert running(*words) == running(*reversed(words)) == {0: 7, 1: 3}


def test_words_that_are_too_near_to_be_put_in_order_count_as_the_least() -> None:
    assert running(word(0, 1, 1.02), word(0, 0, 1.0)) == {0: 0}
    assert running(word(0, 1, 1.3), word(0, 0, 1.0)) == {0: 1}


def test_the_fullest_pulse_fits_into_its_page() -> None:
    most = 2**62
    told = Calibration(steps=512, over_ratio=0.1, p50_ratio=0.1, p90_ratio=0.1, p99_ratio=0.1)
    core = EngineCore(rank=2**20, told_ns=most, kv_usage_ratio=0.1, running=2**20, waiting=2**20)
    pulse = Pulse(
        in_flight=2**31, waiting=2**31, decoding=2**31, oldest_waiting_arrival_ns=most,
        largest_waiting_prompt_tokens=most, last_step_end_ns=most, requests_total=most,
        kv_usage_ratio=0.1, prompt_tokens_p99=most, cores=(core,) * 16, sockets=2**20,
        unseen_step_ns=most, running=2**31, steps_total=most, prompt_tokens_total=most,
        generation_tokens_total=most, ttft_s_recent=(0.1,) * 32, itl_s_recent=(0.1,) * 32,
        samples_total=most, itl_samples_total=most, model_samples=most, processes=2**16,
        shape="x" * 120, unseen_steps_total=most, middleware=False, unfit="x" * 300,
        unanswered_s_recent=(0.1,) * 32, unanswered_total=most, itl_slo_s=0.1,
        itl_late_s_recent=(0.1,) * 8, itl_late_total=most, prompt_tokens_quantiles=(2**31,) * 10,
        prefill_calibration=told, decode_calibration=told, busy_s_total=0.1, step_s_mean=0.1,
        root=ProcessId(pid=2**22, start_ticks=most),
        model=ProductionModel(
            prefill_base_s=0.1, prefill_s_per_token=0.1, decode_base_s=0.1, decode_s_per_request=0.1
        ),
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(pulse)) <= MAX_RECORD_BYTES
    # An unfit engine states no GPUs.
    uuids = (f"GPU-{'x' * 36}",) * MOST_GPUS
    fit = msgspec.structs.replace(pulse, unfit="", gpus=uuids)
    assert len(msgspec.msgpack.encode(fit)) <= MAX_RECORD_BYTES
