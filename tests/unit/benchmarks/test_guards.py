"""Operating characteristics of the guards in seeded runs; `benchmarks.guards` has them all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.guards.__main__ import measured
from benchmarks.guards.services import SERVICES
from benchmarks.guards.simulated_slot import run
from benchmarks.guards.traced_engine import TracedEngine, TracedService
from benchmarks.testbed.trace import read_trace


@pytest.mark.parametrize("seed", range(3))
def test_a_rise_of_84_percent_is_found_within_ten_minutes(seed: int) -> None:
    found = run(SERVICES["TTFT 1.2 s becomes 2.2 s, sigma 0.1, load 0.0"], seed)
    assert found["stopped_by"]
    assert found["after_min"] <= 10.0


@pytest.mark.parametrize(
    ("name", "within_min", "least"),
    [
        ("P99 of TTFT doubled, median as before", 30.0, 7),
        ("TTFT 300 ms becomes 550 ms for a middle 30 %", 20.0, 8),
        # Later than the burn rate of an hour pages.
        ("a quarter 6 s late, slices of 30 s", 35.0, 8),
    ],
)
def test_other_harm_is_found_in_time(name: str, within_min: float, least: int) -> None:
    found = [run(SERVICES[name], seed) for seed in range(8)]
    in_time = [one for one in found if one["stopped_by"] and one["after_min"] <= within_min]
    assert len(in_time) >= least


@pytest.mark.parametrize(
    ("name", "hours"),
    [("steady", 2.0), ("own misses 0.8 %", 12.0), ("own misses of 12 s, 0.5 %", 8.0)],
)
def test_a_harmless_guest_is_left_alone(name: str, hours: float) -> None:
    """Late first tokens that count to no withheld slice would stop the third after 7 hours."""
    found = run(replace(SERVICES[name], days=hours / 24.0), 0)
    assert not found["stopped_by"]
    assert found["halvings"] == 0


@pytest.fixture
def bursty(tmp_path: Path) -> Path:
    """A trace of ten minutes: bursts of requests, and pauses."""
    rng = np.random.default_rng(1)
    starts_s = np.repeat(np.arange(0.0, 600.0, 6.0), 8) + rng.exponential(1.0, 800)
    lines = [f"{t_s:.3f},{rng.integers(20, 800)},{rng.integers(10, 200)}" for t_s in starts_s]
    lines.sort(key=lambda line: float(line.split(",")[0]))
    path = tmp_path / "bursty.csv"
    path.write_text("t_s,input_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    return path


def test_an_engine_serves_each_request_of_its_trace_once(bursty: Path) -> None:
    trace = read_trace(bursty)
    engine = TracedEngine(trace, speed_ratio=0.5).whole()
    assert len(engine.ttft_s) == len(trace.t_s)
    assert len(engine.ttft_s) + len(engine.itl_s) == sum(
        max(1, each // 10) for each in trace.output_tokens.tolist()
    )
    assert min(engine.ttft_s) > 0.008
    # From another moment on, and around its end, it is the same load.
    later = TracedEngine(trace, speed_ratio=0.5, offset_s=700.0)
    later.advance(2 * 1201.0, slower_ratio=1.0)
    assert len(later.ttft_s) == pytest.approx(2 * len(trace.t_s), rel=0.02)


def test_a_replay_keeps_the_engine_busy_as_asked_and_slower_steps_longer(bursty: Path) -> None:
    service = TracedService(
        trace=read_trace(bursty), busy_ratio=0.6, slower_ratio=1.0, days=0.1, runs=1
    )
    alone = TracedEngine(service.trace, service.speed_ratio).whole()
    assert alone.busy_ratio == pytest.approx(0.6, abs=0.01)
    slower = TracedEngine(service.trace, service.speed_ratio)
    slower.advance(1000.0, slower_ratio=1.3)
    assert np.mean(slower.ttft_s) > 1.3 * np.mean(alone.ttft_s), "queues grow by more than steps"


def test_a_traced_load_is_left_alone_and_harm_to_its_engine_found(bursty: Path) -> None:
    name = "bursty.csv, steps 1.4 times as long after 2 h"
    found = measured([(name, 0)], (bursty,), None, 1)
    assert found["summary"][name]["false_stops"] == 0
    assert found["runs"][name][0]["stopped_by"]
    harmless = TracedService(
        trace=read_trace(bursty), busy_ratio=0.66, slower_ratio=1.0, days=0.1, runs=1
    )
    assert not run(harmless, 0)["stopped_by"]
