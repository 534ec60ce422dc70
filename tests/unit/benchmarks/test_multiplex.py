"""The multiplex benchmark's figures, from steps that never happened."""

import math
from typing import Any

import pytest

from benchmarks.multiplex.arms import JOBS, NODES, Arm
from benchmarks.multiplex.figures import ArmDone, JobDone, figures, reward_gap_se
from scheduler.demo.job.events import StepDone, Trajectories
from scheduler.policy.phases.terms import terms_fault


def step(*, reward: float = 0.5, error: float = 0.03) -> StepDone:
    return StepDone(
        step=1,
        end_s=0.0,
        version=2,
        step_s=9.0,
        rollout_s=6.0,
        train_s=3.0,
        publish_s=0.0,
        switch_s=0.0,
        reward_mean=reward,
        reward_se=error,
        rollout_tokens=1,
        prefill_tokens=1,
        turns=1,
        tokens_by_engine={},
        logprob_gap={},
        stale_tokens=0,
        trajectories=Trajectories(started=1, completed=1, lost=0, duplicated=0, migrated=0),
        bytes_sent=0,
        bytes_dense=0,
        kl_mean=0.0,
        clip_share=0.0,
        entropy_mean=0.0,
        gradient_norm=0.0,
    )


def start(kind: str, resume_s: float, *, cold: bool = False) -> dict[str, Any]:
    return {"kind": kind, "cold": cold, "waited_s": 1.0, "resume_s": resume_s}


def done(makespan_s: float, *, reward: float = 0.5, starts: Any = ()) -> ArmDone:
    job = JobDone(steps=(step(), step(reward=reward)), load_s=10.0, starts=starts)
    return ArmDone(makespan_s=makespan_s, jobs={"a": job})


STARTS = (
    start("rollout", 9.0, cold=True),
    start("rollout", 0.02),
    start("training", 0.03),
)


def test_ratios_are_of_the_others_over_ours() -> None:
    arms = {
        Arm.SEQUENTIAL: done(30.0),
        Arm.NAIVE: done(24.0),
        Arm.MULTIPLEXED: done(20.0, reward=0.53, starts=STARTS),
    }
    result = figures(arms, engine_cold_s=40.0)
    assert result["makespan_ratio"] == {"sequential": 1.5, "naive": 1.2}
    assert result["warm_start_speedup"] == pytest.approx(50.0 / 0.05)
    assert result["reward_gaps_se"]["a"] == pytest.approx(1 / math.sqrt(2))
    assert result["reward_gap_se"] == result["reward_gaps_se"]["a"]
    # Two rollouts of 6 s, then the last training of 3 s.
    assert result["over_bound"] == pytest.approx(20.0 / 15.0)
    assert result["arms"]["multiplexed"]["jobs"]["a"]["waited_s"] == 3.0


def test_rewards_without_spread_have_no_gap() -> None:
    assert reward_gap_se(step(error=0.0), step(error=0.0)) == 0.0


def test_the_jobs_differ_in_length_and_their_terms_can_be_met() -> None:
    assert len({job.steps(6) for job in JOBS}) == len(JOBS)
    for job in JOBS:
        terms = job.terms(Arm.MULTIPLEXED)
        assert terms_fault(terms) == ""
        assert [phase.nodes for phase in terms.phases] == [(node,) for node in NODES.values()]
