"""Replay speed and scale of the trace, from the step times of the machine alone."""

import pytest

from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.calibration import mean_busy_share, scaled
from benchmarks.testbed.gpu_hardware import GpuHardware
from benchmarks.testbed.hardware import CpuHardware, Hardware
from benchmarks.testbed.load import REQUESTS_MIN, Aim, Load
from benchmarks.testbed.memory_split import GpuMemory
from coserve.guest.gpus import ComputeMode, Gpu
from harvester.contracts.page import ProductionModel

GPU = GpuHardware(
    Gpu("GPU-1", ComputeMode.DEFAULT), GpuMemory(total_bytes=140 << 30, free_bytes=140 << 30)
)
AN_8B_ON_A_GPU = ProductionModel(
    prefill_base_s=0.008,
    prefill_s_per_token=30e-6,
    decode_base_s=0.006,
    decode_s_per_request=20e-6,
)
A_SMALL_MODEL_ON_A_CORE = ProductionModel(
    prefill_base_s=0.015,
    prefill_s_per_token=80e-6,
    decode_base_s=0.012,
    decode_s_per_request=1e-3,
)
FIRST_RATE = 3.0


def aimed(
    hardware: Hardware, model: ProductionModel, *, rounds: int, slice_s: float, busy: float = 0.5
) -> Load:
    trace = generated_trace(Bursts(), duration_s=3600.0, seed=1)
    aim = Aim(
        scales=hardware.scales,
        slice_s=slice_s,
        rounds=rounds,
        step_tokens=hardware.step_tokens,
        busy_share=busy,
    )
    return aim.load(Load(trace=trace, sizes=hardware.scales[0], rate=FIRST_RATE), model)


@pytest.mark.parametrize("busy", [0.5, 0.7])
@pytest.mark.parametrize(
    ("hardware", "model"), [(GPU, AN_8B_ON_A_GPU), (CpuHardware(), A_SMALL_MODEL_ON_A_CORE)]
)
def test_production_is_as_busy_as_asked_by_what_its_steps_take(
    hardware: Hardware, model: ProductionModel, busy: float
) -> None:
    load = aimed(hardware, model, rounds=4, slice_s=10.0, busy=busy)
    excerpts = load.excerpts(10.0, count=4)
    share = mean_busy_share(excerpts, model, step_tokens=hardware.step_tokens)
    assert share == pytest.approx(busy, abs=0.05)


def test_a_gpu_serves_whole_prompts_at_several_a_second_even_in_a_short_run() -> None:
    load = aimed(GPU, AN_8B_ON_A_GPU, rounds=4, slice_s=10.0)
    assert load.sizes.input_scale == 1.0
    assert load.rate > 5.0
    longest = max(a.input_tokens for w in load.excerpts(10.0, count=4) for a in w.arrivals)
    assert longest > 2048, "the law's phantom is a prompt of several steps"


def test_a_faster_gpu_is_sent_more_or_larger_requests() -> None:
    fast = aimed(GPU, scaled(AN_8B_ON_A_GPU, 0.25), rounds=10, slice_s=20.0)
    slow = aimed(GPU, AN_8B_ON_A_GPU, rounds=10, slice_s=20.0)
    assert fast.sizes.output_scale > slow.sizes.output_scale or fast.rate > slow.rate
    sent = sum(len(excerpt.arrivals) for excerpt in fast.excerpts(20.0, count=10))
    assert sent >= REQUESTS_MIN


def test_a_long_run_keeps_larger_requests_than_a_short_one() -> None:
    short = aimed(GPU, AN_8B_ON_A_GPU, rounds=2, slice_s=10.0)
    long = aimed(GPU, AN_8B_ON_A_GPU, rounds=30, slice_s=20.0)
    assert long.sizes.output_scale > short.sizes.output_scale
