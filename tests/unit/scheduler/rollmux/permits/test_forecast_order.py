"""Permits start phases in the order and at the times of a forecast of the same jobs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.rollmux.forecast.execution import advance
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.stages import (
    EVENT,
    ROLLOUT_STARTED,
    TRAINING_STARTED,
    Rules,
    empty_nodes,
    empty_permits,
)
from tests.unit.scheduler.rollmux.forecast.stage_jobs import occupant
from tests.unit.scheduler.rollmux.permits.cycling import CyclingJobs
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, TRAINING, terms

PLAIN = Rules(migrate=False, warm_s=0.0, migrate_s=0.0)
UNTIL_S = 4000.0
KINDS = {ROLLOUT_STARTED: ROLLOUT, TRAINING_STARTED: TRAINING}
JOBS = "abcde"
_job = st.tuples(
    st.integers(20, 400), st.integers(20, 400), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2))
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_job, min_size=2, max_size=5))
def test_permits_start_what_the_forecast_starts_when_it_does(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    """On one or two nodes of each pool. Lengths are fractions of two, so that sums are exact and
    phases which end at one moment do so in both."""
    lengths_s = [
        (rollout_s + 2.0 ** -(2 * at + 1), training_s + 2.0 ** -(2 * at + 2))
        for at, (rollout_s, training_s, _, _) in enumerate(drawn)
    ]
    masks = [(rollout, training) for _, _, rollout, training in drawn]
    jobs = CyclingJobs(
        tuple(
            terms(job, rollout=_nodes("r", rollout), training=_nodes("t", training))
            for job, (rollout, training) in zip(JOBS, masks, strict=False)
        ),
        dict(zip(JOBS, lengths_s, strict=False)),
    )
    jobs.begin(*JOBS[: len(drawn)])
    jobs.run(UNTIL_S)
    starts = _forecast(lengths_s, masks)
    assert [(job, kind) for _, job, kind in jobs.grants] == [(job, kind) for _, job, kind in starts]
    assert [at for at, _, _ in jobs.grants] == pytest.approx([at for at, _, _ in starts])


def _nodes(prefix: str, mask: int) -> str:
    return " ".join(f"{prefix}{bit}" for bit in range(2) if mask >> bit & 1)


def _forecast(
    lengths_s: list[tuple[float, float]], masks: list[tuple[int, int]]
) -> list[tuple[float, str, str]]:
    members = [
        occupant(*length_s, rollout=rollout, training=training << 2)
        for length_s, (rollout, training) in zip(lengths_s, masks, strict=True)
    ]
    jobs = Roster.of(members).jobs
    jobs["offset"], jobs["length"] = np.arange(jobs.size), 1
    log = np.zeros(4096, dtype=EVENT)
    _, logged, _ = advance(
        jobs, empty_nodes(), empty_permits(), np.array(lengths_s), PLAIN, 0.0, UNTIL_S, log
    )
    return [
        (float(event["t_s"]), JOBS[event["job"]], KINDS[int(event["kind"])])
        for event in log[:logged]
        if event["kind"] in KINDS
    ]
