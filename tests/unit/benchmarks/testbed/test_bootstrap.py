from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.testbed.bootstrap import STRETCH_REQUESTS, itl_of, ratio_interval, ttft_of
from benchmarks.testbed.production_request import ProductionRequest

Build = Callable[..., ProductionRequest]


def arm_of(build: Build, ttfts_s: list[float], **given: object) -> list[ProductionRequest]:
    return [build(ttft_s=s, trace_index=place, **given) for place, s in enumerate(ttfts_s)]


def test_a_constant_factor_has_an_interval_without_width(request_of: Build) -> None:
    drawn = np.random.default_rng(1).gamma(2.0, 0.02, 400)
    alone = ttft_of(arm_of(request_of, drawn.tolist()))
    slower = ttft_of(arm_of(request_of, (1.3 * drawn).tolist()))
    for percent in (50, 99):
        found = ratio_interval(slower, alone, percent=percent, seed=4)
        assert found == pytest.approx((1.3, 1.3))


def test_pairing_removes_what_both_arms_share(request_of: Build) -> None:
    rng = np.random.default_rng(2)
    heavy = np.repeat(rng.gamma(1.0, 0.05, 40), STRETCH_REQUESTS) + 0.01
    alone = ttft_of(arm_of(request_of, heavy.tolist()))
    beside = ttft_of(arm_of(request_of, (heavy * rng.normal(1.1, 0.02, 400)).tolist()))
    other = np.repeat(rng.permutation(heavy[::STRETCH_REQUESTS]), STRETCH_REQUESTS) * 1.1
    elsewhere = ttft_of(arm_of(request_of, other.tolist()))
    paired = ratio_interval(beside, alone, percent=50, seed=4)
    unpaired = ratio_interval(elsewhere, alone, percent=50, seed=4)
    assert paired is not None
    assert unpaired is not None
    assert paired[0] < 1.1 < paired[1]
    assert paired[1] - paired[0] < (unpaired[1] - unpaired[0]) / 4


def test_is_the_same_each_time_and_differs_by_seed(request_of: Build) -> None:
    rng = np.random.default_rng(3)
    alone, beside = (
        ttft_of(arm_of(request_of, rng.gamma(2.0, 0.02, 200).tolist())) for _ in range(2)
    )
    first, again, other = (ratio_interval(beside, alone, percent=99, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_blocks_are_paired_by_their_place_not_by_their_number(request_of: Build) -> None:
    drawn = np.random.default_rng(1).gamma(2.0, 0.02, 100).tolist()
    alone = [*arm_of(request_of, drawn, block=0), *arm_of(request_of, [1.0] * 100, block=3)]
    beside = [*arm_of(request_of, drawn, block=1), *arm_of(request_of, [1.0] * 100, block=4)]
    assert ratio_interval(ttft_of(beside), ttft_of(alone), percent=90, seed=1) == (1.0, 1.0)


def test_many_values_are_grouped_without_moving_the_percentile(request_of: Build) -> None:
    drawn = np.random.default_rng(8).gamma(4.0, 0.002, (200, 100))
    arm = [request_of(itl_s=tuple(row), trace_index=i) for i, row in enumerate(drawn.tolist())]
    beside = [
        request_of(itl_s=tuple(row), trace_index=i) for i, row in enumerate((drawn * 1.2).tolist())
    ]
    found = ratio_interval(itl_of(beside), itl_of(arm), percent=99, seed=1)
    assert found == pytest.approx((1.2, 1.2), rel=0.01)


def test_leaves_failed_requests_out_and_says_nothing_of_too_little(request_of: Build) -> None:
    few = ttft_of(arm_of(request_of, [0.1] * STRETCH_REQUESTS))
    assert ratio_interval(few, few, percent=50, seed=1) is None
    failed = ttft_of(arm_of(request_of, [0.1] * 50, failed=True))
    assert failed.percentile_s(50) is None
    many = ttft_of(arm_of(request_of, [0.1] * 50))
    assert ratio_interval(many, failed, percent=50, seed=1) is None
