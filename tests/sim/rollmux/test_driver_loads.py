"""When a simulated job's states come to nodes and leave them: under its permits, as a client's."""

from typing import Any

import numpy as np
import pytest

from harvester.contracts.ids import JobId
from scheduler.model import JobSpec
from scheduler.sim.rollmux.arms import ARMS, run_arm
from scheduler.sim.rollmux.workload import PAPER_WORLD, SimulatedJob, phases

ROLLOUT_S, TRAINING_S = 100.0, 60.0
HALF_S = PAPER_WORLD.cold_start_s / 2


def _job(name: str, *, arrival_s: float, iterations: int = 3) -> SimulatedJob:
    return SimulatedJob(
        job=JobSpec(job=JobId(name), phases=phases(120.0, 80.0, 1, 1), slo=1.0, host_bytes=1),
        arrival_s=arrival_s,
        lengths_s=np.tile([ROLLOUT_S, TRAINING_S], (iterations, 1)),
        means_s=(ROLLOUT_S, TRAINING_S),
    )


def _phases(*jobs: SimulatedJob) -> dict[str, list[tuple[float, float, str]]]:
    """Per job: start, end and node of each phase, in order."""
    ledger = run_arm(ARMS["ours"], list(jobs), seed=0, record=True).ledger
    found: dict[str, list[tuple[float, float, str]]] = {}
    began_s: dict[str, float] = {}
    event: dict[str, Any]
    for event in ledger.in_order():
        if event["type"] == "phase_start":
            began_s[event["job"]] = event["t"]
        elif event["type"] == "phase_end":
            phase = (began_s[event["job"]], event["t"], event["node"])
            found.setdefault(event["job"], []).append(phase)
    return found


def test_a_first_rollout_and_a_first_training_load_under_their_permits() -> None:
    ran = _phases(_job("a", arrival_s=5.0))["a"]
    assert ran[0][0] == 5.0, "it loads on nodes that it holds"
    lasted_s = [ended_s - began_s for began_s, ended_s, _ in ran]
    assert lasted_s[:2] == pytest.approx([ROLLOUT_S + HALF_S, TRAINING_S + HALF_S])
    assert lasted_s[2:] == pytest.approx([ROLLOUT_S, TRAINING_S] * 2)


@pytest.mark.parametrize("at", [0, 1])
def test_a_departed_job_leaves_nothing_that_the_next_job_has_to_take_off(at: int) -> None:
    ran = _phases(_job("a", arrival_s=0.0), _job("b", arrival_s=5_000.0))
    first, second = ran["a"][at], ran["b"][at]
    assert second[2] == first[2], "on the same node"
    assert second[1] - second[0] == pytest.approx(first[1] - first[0])
