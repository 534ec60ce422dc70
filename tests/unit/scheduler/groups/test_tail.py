"""The learned threshold: the one that frees the most accelerator time, in whole accelerators."""

import pytest

from scheduler.policy.groups.tail import (
    PAPER_THRESHOLD,
    UNDIVIDED,
    Completion,
    best_shape,
    shape_at,
)

W1 = (Completion(0.5, 0.8),)


def test_the_paper_s_threshold_on_the_workload_s_curve_is_half_the_time_and_a_quarter() -> None:
    shape = shape_at(PAPER_THRESHOLD, W1, accelerators=8)
    assert shape is not None
    assert (shape.bulk_ratio, shape.share) == (0.5, 0.25)


def test_a_curve_that_completes_early_moves_its_tail_earlier_than_the_paper_would() -> None:
    early = (Completion(0.1, 0.9), Completion(0.5, 0.92))
    best, paper = best_shape(early, accelerators=8), shape_at(0.8, early, accelerators=8)
    assert paper is not None
    assert best.node_ratio < paper.node_ratio


@pytest.mark.parametrize("curve", [(), (Completion(0.999, 0.01),)])
def test_a_rollout_without_a_tail_is_undivided(curve: tuple[Completion, ...]) -> None:
    assert best_shape(curve, accelerators=1) == UNDIVIDED
