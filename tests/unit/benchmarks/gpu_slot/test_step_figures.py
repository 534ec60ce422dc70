"""Figures of arms from made-up logs."""

import pytest

from benchmarks.gpu_slot.engines.request_load import poisson_load
from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog, ServedRequest, Step
from benchmarks.gpu_slot.sharing.step_figures import arm_figures, busy_ratio, guest_figures, ratios


def _log(step_ms: float) -> ProductionLog:
    ns = int(step_ms * 1e6)
    step = Step(kind="decode", size=1, start_ns=0, end_ns=ns)
    request = ServedRequest(
        arrival_ns=0, first_ns=2 * ns, end_ns=3 * ns, prompt_tokens=1, itl_s=(step_ms * 1e-3,)
    )
    return ProductionLog(steps=(step,), requests=(request,))


def test_ratios_are_of_all_rounds_and_show_the_rounds_spread() -> None:
    found = ratios([_log(3.0), _log(2.0)], [_log(2.0), _log(2.0)])
    assert found["decode_step_mean"] == {
        "ratio": pytest.approx(1.25),
        "rounds": [pytest.approx(1.0), pytest.approx(1.5)],
    }
    assert found["prefill_step_mean"] == {"ratio": None, "rounds": None}


def test_an_arm_says_how_many_samples_it_has() -> None:
    figures = arm_figures([_log(2.0), _log(4.0)])
    assert figures["ttft"] == {
        "count": 2,
        "p50_ms": pytest.approx(6.0),
        "p99_ms": pytest.approx(7.96),
        "mean_ms": pytest.approx(6.0),
    }
    assert figures["prefill_step"] == {"count": 0}


def test_busy_time_is_that_of_steps() -> None:
    assert busy_ratio([_log(2.0), _log(4.0)], 0.06) == pytest.approx(0.1)


def test_a_guest_s_closed_decisions_are_summed_by_reason() -> None:
    step = Step(kind="decode", size=16, start_ns=0, end_ns=500_000_000)
    logs = [
        GuestLog(steps=(step,), closed={"no_slack": 2}),
        GuestLog(closed={"no_slack": 1, "no_grant": 4}),
    ]
    figures = guest_figures(logs, 2.0)
    assert figures["closed_by"] == {"no_slack": 3, "no_grant": 4}
    assert figures["tokens_per_s"] == 8.0
    assert figures["share_of_time"] == pytest.approx(0.25)


def test_a_load_is_the_same_for_the_same_seed_and_has_its_rate() -> None:
    def load(seed: int):
        return poisson_load(
            rate_per_s=50.0, seconds=20.0, prompts={8: 0.9, 64: 0.1}, output_tokens=2, seed=seed
        )

    assert load(1) == load(1) != load(2)
    assert len(load(1)) == pytest.approx(1000, rel=0.15)
    assert all(0.0 <= request.at_s < 20.0 for request in load(1))
    assert sum(r.prompt_tokens == 64 for r in load(1)) == pytest.approx(100, rel=0.4)
