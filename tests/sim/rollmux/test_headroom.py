"""Headroom of serving, from a trace through step times."""

import numpy as np
import pytest

from benchmarks.rollmux.headroom import HARVESTED_RATIO, MEASURED_STEPS, headroom_of
from benchmarks.testbed.bursts import Bursts, generated_trace
from harvester.contracts.page import ProductionModel

TRACE = generated_trace(Bursts(), duration_s=600.0, seed=1)


def test_the_trace_is_replayed_at_the_speed_that_keeps_production_as_busy_as_wished() -> None:
    for wished in (0.2, 0.5):
        found = headroom_of(TRACE, busy_share=wished)
        assert found.busy_share == pytest.approx(wished, abs=0.01)
        assert found.mean == pytest.approx(HARVESTED_RATIO * (1 - found.busy_share))


def test_no_second_gives_more_than_the_idle_part_that_harvesting_gets() -> None:
    each = np.diff(headroom_of(TRACE).given_s)
    assert (each >= 0.0).all()
    assert (each <= HARVESTED_RATIO + 1e-9).all()
    assert each.std() > 0.05


def test_slower_steps_need_a_slower_replay_for_the_same_share() -> None:
    slower = ProductionModel(
        prefill_base_s=2 * MEASURED_STEPS.prefill_base_s,
        prefill_s_per_token=2 * MEASURED_STEPS.prefill_s_per_token,
        decode_base_s=2 * MEASURED_STEPS.decode_base_s,
        decode_s_per_request=2 * MEASURED_STEPS.decode_s_per_request,
    )
    found, other = headroom_of(TRACE), headroom_of(TRACE, model=slower)
    assert other.speed == pytest.approx(found.speed / 2, rel=0.05)


def test_the_same_trace_gives_the_same_headroom() -> None:
    assert headroom_of(TRACE).given_s.tobytes() == headroom_of(TRACE).given_s.tobytes()


@pytest.mark.parametrize("shares", [(0.0, 0.5), (1.0, 0.5), (0.5, 1.5), (float("nan"), 0.5)])
def test_refuses_shares_that_are_none(shares: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="busy_share"):
        headroom_of(TRACE, busy_share=shares[0], harvested_ratio=shares[1])
