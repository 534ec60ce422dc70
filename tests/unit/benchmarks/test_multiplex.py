"""The multiplex benchmark's figures, from steps that never happened."""

import math
from typing import Any

import pytest

from benchmarks.multiplex.arms import JOBS, NODES, MultiplexArm, Run, runs
from benchmarks.multiplex.figures import MultiplexFacts, figures, reward_gap_se
from benchmarks.multiplex.outcomes import ArmDone, JobDone
from benchmarks.multiplex.serving_node import ServingFigures
from benchmarks.testbed.production_request import ProductionRequest
from examples.grpo.events import StepDone, Trajectories
from scheduler.rollmux.permits.terms import terms_fault

FACTS = MultiplexFacts(steps=2, cores=2, engine_cold_s=40.0)


def step(*, reward: float = 0.5, error: float = 0.03, **tokens: int) -> StepDone:
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
        rollout_tokens=100,
        prefill_tokens=1,
        turns=1,
        tokens_by_engine={"rollout-large": 100, **tokens},
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


def one_round(turn: int = 0, *, factor: float = 1.0) -> dict[Run, ArmDone]:
    return {
        Run(MultiplexArm.SEQUENTIAL, turn): done(30.0),
        Run(MultiplexArm.MULTIPLEXED, turn): done(20.0 * factor, reward=0.53, starts=STARTS),
        Run(MultiplexArm.NAIVE, turn): done(24.0),
    }


def request(arm: MultiplexArm, index: int, ttft_s: float) -> ProductionRequest:
    return ProductionRequest(
        arm=arm,
        block=0,
        due_s=float(index),
        input_tokens=10,
        output_tokens=2,
        ttft_s=ttft_s,
        itl_s=(0.01,),
        failed=False,
        trace_index=index,
    )


def test_ratios_are_of_the_others_over_ours() -> None:
    result = figures(one_round(), FACTS)
    assert result["makespan_ratio"] == {"sequential": 1.5, "naive": 1.2}
    assert result["warm_start_speedup"] == pytest.approx(50.0 / 0.05)
    assert result["reward_gaps_se"]["a"] == pytest.approx(1 / math.sqrt(2))
    assert result["reward_gap_se"] == result["reward_gaps_se"]["a"]
    # Two rollouts of 6 s, then the last training of 3 s.
    assert result["over_bound"] == pytest.approx(20.0 / 15.0)
    assert result["arms"]["multiplexed"]["jobs"]["a"]["waited_s"] == 3.0
    assert "lease" not in result


def test_over_rounds_ratios_are_medians_of_each_round_s_own() -> None:
    rounds = {}
    for turn, factor in enumerate((0.5, 1.0, 3.0)):
        rounds |= one_round(turn, factor=factor)
    result = figures(rounds, FACTS)
    assert result["makespan_ratio"]["sequential"] == 1.5
    assert result["spread"]["sequential"] == [0.5, 3.0]
    assert result["arms"]["multiplexed"]["makespans_s"] == [10.0, 20.0, 60.0]
    assert result["facts"]["rounds"] == 3


def test_the_lease_is_held_against_the_same_without_it_and_production_beside() -> None:
    leased = JobDone(
        steps=(step(**{"rollout-large": 75, "guest.slot-0": 25}),) * 2,
        load_s=10.0,
        tails={"moved": 2, "seconds": 3.0, "returned": 1, "lost": 0},
    )
    arms = one_round() | {
        Run(MultiplexArm.SERVING): done(22.0),
        Run(MultiplexArm.LEASED): ArmDone(makespan_s=16.0, jobs={"a": leased}),
    }
    served = [
        ServingFigures(run=Run(arm), seconds=20.0, production_busy_s=4.0, guest_tokens=tokens)
        for arm, tokens in ((MultiplexArm.SERVING, 0), (MultiplexArm.LEASED, 300))
    ]
    requests = [
        request(arm, index, ttft_s)
        for arm, ttft_s in ((MultiplexArm.SERVING, 0.02), (MultiplexArm.LEASED, 0.021))
        for index in range(30)
    ]
    lease = figures(arms, FACTS, served, requests)["lease"]
    assert lease["makespan_ratio"] == {
        "sequential": 30 / 16,
        "multiplexed": 20 / 16,
        "serving": 22 / 16,
        "naive": 24 / 16,
    }
    assert lease["leased_tokens_ratio"] == 0.25
    assert lease["tails"] == {"moved": 2, "seconds": 3.0, "returned": 1, "lost": 0}
    # 18 s of phases on two cores; production has a fifth of one of them.
    assert lease["over_bound"] == pytest.approx(16.0 / (18.0 / 1.8))
    assert lease["production"]["ratios"]["ttft_p50"] == pytest.approx(1.05)
    assert set(lease["production"]["intervals"].values()) == {None}, "of one round"
    assert lease["production"]["arms"]["leased"]["guest_tokens_per_s"] == 15.0
    assert lease["production"]["arms"]["leased"]["busy_ratio"] == 0.2


def test_a_figure_of_an_arm_that_was_not_run_is_left_out() -> None:
    result = figures({Run(MultiplexArm.MULTIPLEXED): done(20.0, starts=STARTS)}, FACTS)
    assert result["makespan_ratio"] == {}
    assert "over_bound" not in result
    assert "reward_gap_se" not in result


def test_rewards_without_spread_have_no_gap() -> None:
    assert reward_gap_se(step(error=0.0), step(error=0.0)) == 0.0


def test_every_round_has_every_arm_and_begins_with_another() -> None:
    arms = tuple(MultiplexArm)
    plan = runs(arms, 3)
    for turn in range(3):
        assert {run.arm for run in plan if run.round == turn} == set(arms)
    assert [plan[turn * len(arms)].arm for turn in range(3)] == list(arms[:3])
    # The lease's SLO is what production attains without it.
    assert plan.index(Run(MultiplexArm.SERVING)) < plan.index(Run(MultiplexArm.LEASED))
    assert len({run.name for run in plan}) == len(plan)


def test_the_jobs_differ_in_length_and_their_terms_can_be_met() -> None:
    assert len({job.steps(6) for job in JOBS}) == len(JOBS)
    for job in JOBS:
        for arm in MultiplexArm:
            terms = job.terms(Run(arm))
            assert terms_fault(terms) == ""
            assert [phase.nodes for phase in terms.phases] == [(node,) for node in NODES.values()]
