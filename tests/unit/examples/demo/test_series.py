from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.testbed.production_request import ProductionRequest
from examples.demo.records import ArmBlock, DemoArm, GrantSample, Record
from examples.demo.series import axis_of, grant_series, itl_series, ttft_series

Requests = Callable[..., ProductionRequest]


def block(arm: DemoArm, index: int, start_s: float, end_s: float) -> ArmBlock:
    return ArmBlock(arm=arm, index=index, start_s=start_s, end_s=end_s)


def sample(t_s: float, tokens: int, cap: int) -> GrantSample:
    return GrantSample(
        t_s=t_s,
        arm=DemoArm.HARVEST,
        block=0,
        mode="harvest",
        reason="",
        step_tokens_cap=cap,
        gate_open=cap > 0,
        gate_reason="",
        guest_tokens_total=tokens,
        guest_running=1,
        production_in_flight=2,
    )


def test_blocks_of_an_arm_lie_end_to_end() -> None:
    records: list[Record] = [
        block(DemoArm.FIXED, 1, 50.0, 54.0),
        block(DemoArm.HARVEST, 0, 20.0, 25.0),
        block(DemoArm.FIXED, 0, 10.0, 13.0),
        block(DemoArm.FIXED, -1, 0.0, 9.0),
    ]
    axis = axis_of(records, DemoArm.FIXED)
    assert axis.length_s == 7
    assert axis.seams_s == (3.0,)
    placed = axis.at(np.array([10.5, 51.0, 13.0, 20.0, 5.0]))
    assert placed[:2].tolist() == [0.5, 4.0]
    assert np.isnan(placed[2:]).all()


def test_each_second_has_its_own_percentiles_and_an_empty_one_none(request_of: Requests) -> None:
    records: list[Record] = [
        block(DemoArm.FIXED, 0, 10.0, 13.0),
        *(request_of(DemoArm.FIXED, due_s=10.2, ttft_s=s) for s in (0.1, 0.2, 0.3)),
        request_of(DemoArm.FIXED, due_s=12.9, ttft_s=0.5),
        request_of(DemoArm.FIXED, due_s=12.5, ttft_s=9.0, failed=True),
        request_of(DemoArm.HARVEST, due_s=10.2, ttft_s=7.0),
    ]
    series = ttft_series(records, DemoArm.FIXED)
    assert series.p50_s == pytest.approx([0.2, np.nan, 0.5], nan_ok=True)
    assert series.p99_s == pytest.approx([0.298, np.nan, 0.5], nan_ok=True)


def test_a_token_counts_in_the_second_in_which_it_came(request_of: Requests) -> None:
    records: list[Record] = [
        block(DemoArm.FIXED, 0, 0.0, 4.0),
        request_of(DemoArm.FIXED, due_s=0.5, ttft_s=0.4, itl_s=(0.05, 1.5, 0.2)),
    ]
    series = itl_series(records, DemoArm.FIXED)
    assert series.p50_s == pytest.approx([0.05, np.nan, 0.85, np.nan], nan_ok=True)


def test_harvested_speed_is_the_growth_of_the_guests_count() -> None:
    records: list[Record] = [
        block(DemoArm.HARVEST, 0, 0.0, 3.0),
        *(sample(t, n, cap) for t, n, cap in ((0.0, 0, 8), (0.5, 100, 8), (1.5, 300, 0))),
        sample(2.5, 10, 4),
    ]
    series = grant_series(records)
    assert series.tokens_per_s.tolist() == [200.0, 200.0, 0.0]
    assert series.cap_tokens.tolist() == [8.0, 0.0, 4.0]
    assert series.open_share.tolist() == [1.0, 0.0, 1.0]
    assert series.in_flight.tolist() == [2.0, 2.0, 2.0]


def test_a_run_without_blocks_has_empty_series() -> None:
    assert len(grant_series([]).tokens_per_s) == 0
    assert len(ttft_series([], DemoArm.FIXED).p50_s) == 0
