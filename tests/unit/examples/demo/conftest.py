"""A run of the demo that never happened, seeded, in the records' own types."""

import asyncio
from collections.abc import Callable, Mapping

import async_solipsism
import numpy as np
import pytest

from benchmarks.testbed.production_request import ProductionRequest
from examples.demo.records import ArmBlock, DemoArm, EngineGap, GrantSample, Record, TrainingStep
from examples.demo.result import DemoFacts, result_of
from examples.demo.schema import Result
from tests.unit.benchmarks.testbed.made_request import made_request

BLOCK_S = 40.0
STEPS_PER_BLOCK = 8


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Virtual time: a sleep of a minute takes none."""
    return {"virtual": async_solipsism.EventLoop}


@pytest.fixture(scope="session")
def facts() -> DemoFacts:
    return DemoFacts(
        trace="a <trace>.csv",
        scale=1.5,
        scaling={"input_scale": 0.25, "output_scale": 0.25},
        ttft_slo_s=0.08,
        itl_slo_s=0.03,
        guests=frozenset({"guest-0"}),
        hash_mismatches=0,
        migrated=7,
        seconds_total=480.0,
        seconds_to_first_harvested_token=66.0,
    )


@pytest.fixture
def request_of() -> Callable[..., ProductionRequest]:
    return made_request


@pytest.fixture
def step_of() -> Callable[..., TrainingStep]:
    def build(arm: DemoArm = DemoArm.FIXED, **given: object) -> TrainingStep:
        fields: dict[str, object] = {
            "arm": arm,
            "block": 0,
            "step": 1,
            "end_s": 0.0,
            "step_s": 4.0,
            "rollout_s": 3.0,
            "train_s": 0.8,
            "publish_s": 0.1,
            "switch_s": 0.1,
            "reward_mean": 0.5,
            "reward_se": 0.02,
            "rollout_tokens": 3000,
            "tokens_by_engine": {"dedicated-0": 3000},
            "gaps": (),
            "stale_tokens": 0,
            "started": 64,
            "completed": 64,
            "lost": 0,
            "duplicated": 0,
            "version": 1,
            "bytes_sent": 400_000,
            "bytes_dense": 12_000_000,
        }
        return TrainingStep(**(fields | given))  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def whole_result(whole_run: tuple[Record, ...], facts: DemoFacts) -> Result:
    return result_of(whole_run, facts)


@pytest.fixture(scope="session")
def whole_run() -> tuple[Record, ...]:
    """Three rounds of three arms; harvesting speeds rollouts by half and costs production 1 %."""
    rng = np.random.default_rng(5)
    records: list[Record] = []
    now = 5000.0
    tokens_total = 0
    for index in range(3):
        due = np.sort(rng.uniform(0, BLOCK_S, 400))
        base = 0.02 + rng.gamma(2.0, 0.006, 400)
        for arm in DemoArm:
            cost = 1.01 if arm is DemoArm.HARVEST else 1.0
            for place in range(400):
                noise = rng.normal(1.0, 0.03)
                itl = 0.006 * cost * rng.gamma(20.0, 0.05, 20)
                records.append(
                    ProductionRequest(
                        arm=arm,
                        block=index,
                        due_s=now + float(due[place]),
                        input_tokens=100,
                        output_tokens=21,
                        ttft_s=float(base[place] * cost * noise),
                        itl_s=tuple(itl.tolist()),
                        failed=False,
                        trace_index=place,
                    )
                )
            for beat in range(int(BLOCK_S * 5)):
                at = now + beat / 5
                flying = int(rng.poisson(2.0))
                is_open = arm is DemoArm.HARVEST and flying < 4
                tokens_total += int(rng.integers(200, 500)) if is_open else 0
                records.append(
                    GrantSample(
                        t_s=at,
                        arm=arm,
                        block=index,
                        mode="harvest",
                        reason="slack",
                        step_tokens_cap=64 if is_open else 0,
                        gate_open=is_open,
                        gate_reason="",
                        guest_tokens_total=tokens_total,
                        guest_running=8,
                        production_in_flight=flying,
                    )
                )
            if arm is not DemoArm.SERVING_ONLY:
                records += _steps(arm, index, now, rng)
            records.append(
                ArmBlock(
                    arm=arm,
                    index=index,
                    start_s=now,
                    end_s=now + BLOCK_S,
                    production_busy_share=0.5,
                )
            )
            now += BLOCK_S + 3
    return tuple(records)


def _steps(arm: DemoArm, index: int, start_s: float, rng: np.random.Generator) -> list[Record]:
    harvest = arm is DemoArm.HARVEST
    rollout_s = 2.0 if harvest else 3.0
    steps: list[Record] = []
    for place in range(STEPS_PER_BLOCK):
        number = 1 + index * STEPS_PER_BLOCK + place
        jitter = float(rng.normal(1.0, 0.03))
        tokens = {"dedicated-0": 2000, "guest-0": 1000} if harvest else {"dedicated-0": 3000}
        steps.append(
            TrainingStep(
                arm=arm,
                block=index,
                step=number,
                end_s=start_s + 4.0 * (place + 1),
                step_s=rollout_s * jitter + 1.0,
                rollout_s=rollout_s * jitter,
                train_s=0.8,
                publish_s=0.1,
                switch_s=0.1,
                reward_mean=0.3 + 0.02 * number + float(rng.normal(0, 0.005)),
                reward_se=0.015,
                rollout_tokens=3000,
                tokens_by_engine=tokens,
                gaps=tuple(
                    EngineGap(engine=engine, sum_abs=0.004 * count, tokens=count)
                    for engine, count in tokens.items()
                ),
                stale_tokens=0,
                started=64,
                completed=64,
                lost=0,
                duplicated=0,
                version=number,
                bytes_sent=int(rng.integers(300_000, 500_000)),
                bytes_dense=12_000_000,
            )
        )
    return steps
