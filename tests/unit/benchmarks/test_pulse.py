import pytest

from benchmarks.pulse.figures import ARMS, Arm, Figures
from scheduler.demo.records import ProductionRequest


def requests_of(arm: Arm, *, slower: float, failed: bool = False) -> list[ProductionRequest]:
    return [
        ProductionRequest(
            arm=arm,
            block=turn,
            due_s=0.0,
            input_tokens=10,
            output_tokens=3,
            ttft_s=slower * (0.05 + 1e-4 * index),
            itl_s=(slower * 0.010,),
            failed=failed,
            trace_index=index,
        )
        for turn in range(2)
        for index in range(40)
    ]


def test_what_the_pulse_costs_stands_beside_what_nothing_costs() -> None:
    figures = Figures()
    for arm, slower in zip(ARMS, (1.0, 1.1, 1.02, 0.99), strict=True):
        figures.requests += requests_of(arm, slower=slower)
        figures.closed[arm] = [10.0 / slower, 20.0 / slower, 30.0 / slower]
        figures.core_s[arm] = [{"api: loop": slower, "api: beat": 0.0, "core: main": 0.6}] * 3
    result = figures.result(seed=1)
    assert result["requests"] == dict.fromkeys(ARMS, 80)
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        low, high = result["pulse"][name]["interval"]
        assert result["pulse"][name]["ratio"] == pytest.approx(1.1)
        assert low <= 1.1 + 1e-9
        assert high >= 1.1 - 1e-9
        assert result["twin"][name]["ratio"] == pytest.approx(0.99)
    assert result["pulse"]["throughput"]["ratio"] == pytest.approx(1 / 1.1)
    assert result["metrics"]["ttft_p50"]["ratio"] == pytest.approx(1.02)
    assert result["pulse"]["core_time"]["ratio"] == pytest.approx(1.7 / 1.6)
    assert result["core_ms_per_request"][Arm.PULSE] == pytest.approx(
        {"api": 1e3 * 3.3 / 80, "core": 1e3 * 1.8 / 80}
    )
    assert result["twin"]["throughput"]["range"] == pytest.approx((1 / 0.99, 1 / 0.99))


def test_what_failed_is_counted_and_what_was_not_measured_is_null() -> None:
    figures = Figures()
    figures.requests += requests_of(Arm.STOCK, slower=1.0, failed=True)
    result = figures.result(seed=1)
    assert result["failed"] == 80
    assert result["pulse"]["ttft_p50"] == {"ratio": None, "interval": None}
    assert result["pulse"]["throughput"] == {"ratio": None, "range": None}
    assert result["core_ms_per_request"][Arm.PULSE] == {}
