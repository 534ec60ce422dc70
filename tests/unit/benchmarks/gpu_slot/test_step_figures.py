"""Figures of arms from made-up logs."""

import pytest

from benchmarks.gpu_slot.engines.request_load import poisson_load
from benchmarks.gpu_slot.engines.step_log import GuestLog, LoggedStep, ProductionLog, ServedRequest
from benchmarks.gpu_slot.sharing.arm_table import ArmTable
from benchmarks.gpu_slot.sharing.step_figures import (
    arm_figures,
    busy_ratio,
    guest_figures,
    over_alone,
)


def _log(step_ms: float) -> ProductionLog:
    ns = int(step_ms * 1e6)
    step = LoggedStep(kind="decode", size=1, start_ns=0, end_ns=ns)
    request = ServedRequest(
        arrival_ns=0, first_ns=2 * ns, end_ns=3 * ns, prompt_tokens=1, itl_s=(step_ms * 1e-3,)
    )
    return ProductionLog(steps=(step,), requests=(request,))


def test_steps_are_compared_with_their_own_form_and_requests_with_themselves() -> None:
    found = over_alone([_log(3.0), _log(2.0)], [_log(2.0), _log(2.0)], {("decode", 1): 0.002})
    assert found["step"]["mean"] == pytest.approx(1.25)
    assert found["step"]["rounds"] == [pytest.approx(1.5), pytest.approx(1.0)]
    assert found["ttft"]["count"] == 2
    assert found["ttft"]["max"] == pytest.approx(1.5)


def test_a_larger_batch_is_no_slower_step() -> None:
    alone_s = {("decode", 1): 0.002, ("decode", 2): 0.004}
    larger = LoggedStep(kind="decode", size=2, start_ns=0, end_ns=4_000_000)
    found = over_alone([ProductionLog(steps=(larger,))], [_log(2.0)], alone_s)
    assert found["step"]["p50"] == pytest.approx(1.0)
    assert found["ttft"] == {"count": 0, "rounds": []}


def test_few_samples_have_no_p99() -> None:
    figures = arm_figures([_log(2.0), _log(4.0)])
    assert figures["ttft"] == {
        "count": 2,
        "mean": pytest.approx(6.0),
        "p50": pytest.approx(6.0),
        "p90": pytest.approx(7.6),
        "p99": None,
        "max": pytest.approx(8.0),
    }
    assert figures["prefill_step"] == {"count": 0}


def test_a_request_that_ends_after_the_slice_is_not_counted() -> None:
    log = _log(2.0)
    assert log.until(2_000_000).steps == log.steps
    assert log.until(1_999_999).steps == ()
    assert log.until(2_000_000).requests == ()


def test_a_table_has_figures_after_each_arm_and_keeps_what_failed() -> None:
    table = ArmTable(slice_s=1.0)
    table.add("alone", _log(2.0), GuestLog())
    table.failed("shipped", "the agent gave no lease within 60 s")
    table.add("ungated", _log(3.0), GuestLog())
    figures = table.figures()
    assert figures["shipped"] == {
        "rounds": 0,
        "failures": ["the agent gave no lease within 60 s"],
    }
    assert figures["ungated"]["over_alone"]["step"]["p50"] == pytest.approx(1.5)
    assert not figures["ungated"]["guest_says_enough"]


def test_busy_time_is_that_of_steps() -> None:
    assert busy_ratio([_log(2.0), _log(4.0)], 0.06) == pytest.approx(0.1)


def test_a_guest_s_closed_decisions_are_summed_by_reason() -> None:
    step = LoggedStep(kind="decode", size=16, start_ns=0, end_ns=500_000_000)
    logs = [
        GuestLog(steps=(step,), closed={"no_slack": 2}, probes=1),
        GuestLog(closed={"no_slack": 1, "no_grant": 4}),
    ]
    figures = guest_figures(logs, 2.0)
    assert figures["closed_by"] == {"no_slack": 3, "no_grant": 4}
    assert figures["tokens_per_s"] == 8.0
    assert figures["share_of_time"] == pytest.approx(0.25)
    assert figures["probes"] == 1


def test_a_load_is_the_same_for_the_same_seed_and_has_its_rate() -> None:
    def load(seed: int):
        return poisson_load(
            rate_per_s=50.0, seconds=20.0, prompts={8: 0.9, 64: 0.1}, output_tokens=2, seed=seed
        )

    assert load(1) == load(1) != load(2)
    assert len(load(1)) == pytest.approx(1000, rel=0.15)
    assert all(0.0 <= request.at_s < 20.0 for request in load(1))
    assert sum(r.prompt_tokens == 64 for r in load(1)) == pytest.approx(100, rel=0.4)
