"""Blocks over a stack of stand-ins, in virtual time."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

import pytest

from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.trace import Arrival
from examples.demo.blocks import BlockPlan, BlockRunner, another_fits, prompts_within
from examples.demo.records import ArmBlock, DemoArm, Record, TrainingStep
from examples.grpo.events import StepDone, Trajectories
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Pulse

PLAN = BlockPlan(rounds=3, serving_s=40.0, steps=2)
EXCERPT = Excerpt(
    trace="given",
    arrivals=tuple(
        Arrival(index=index, t_s=t_s, input_tokens=10, output_tokens=5)
        for index, t_s in enumerate((0.0, 1.0, 4.0))
    ),
    duration_s=10.0,
    start_s=0.0,
)
PROMPTS = 20
STEP_S = 6.0
BUSY_RATIO = 0.4


class LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Scene:
    """All collaborators of a runner. `calls` lists its calls in order."""

    calls: list[Any] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    sent: list[tuple[DemoArm, int]] = field(default_factory=list)
    guest_stays: bool = False
    arm: DemoArm = DemoArm.SERVING_ONLY
    block: int = -1

    async def activate(self, job: str) -> None:
        self.calls.append(("activate", job))

    async def harvesting(self, job: str, *, enabled: bool) -> None:
        self.calls.append(("harvesting", job, enabled))

    async def guest_gone(self, engine: str, *, timeout_s: float) -> bool:
        self.calls.append(("guest_gone", engine))
        return not self.guest_stays

    async def replay(
        self,
        arrivals: Iterable[Arrival],
        *,
        arm: DemoArm,
        block: int,
        start_s: float,
        stopped: asyncio.Event,
    ) -> None:
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start_s + arrival.t_s - LoopClock().now()))
            if stopped.is_set():
                return
            self.sent.append((arm, arrival.index))

    def pulse(self) -> Pulse:
        return Pulse(busy_s_total=100.0 + BUSY_RATIO * LoopClock().now())

    async def step(self, prompts: int | None) -> StepDone:
        assert prompts == PROMPTS
        await asyncio.sleep(STEP_S)
        return StepDone(
            step=1,
            end_s=LoopClock().now(),
            version=2,
            step_s=STEP_S,
            rollout_s=4.0,
            train_s=1.0,
            publish_s=0.5,
            switch_s=0.5,
            reward_mean=0.5,
            reward_se=0.1,
            rollout_tokens=100,
            prefill_tokens=10,
            turns=4,
            tokens_by_engine={"guest-0": 40, "dedicated-0": 60},
            logprob_gap={"guest-0": (0.2, 40), "dedicated-0": (0.1, 60)},
            stale_tokens=0,
            trajectories=Trajectories(started=4, completed=3, lost=1, duplicated=0, migrated=2),
            bytes_sent=10,
            bytes_dense=20,
            kl_mean=0.0,
            clip_share=0.0,
            entropy_mean=1.0,
            gradient_norm=1.0,
        )

    def runner(self) -> BlockRunner:
        fake = cast(Any, self)
        return BlockRunner(
            stack=fake,
            gateway=fake,
            client=fake,
            trainers={DemoArm.FIXED: fake, DemoArm.HARVEST: fake},
            watch=fake,
            clock=LoopClock(),
            record=self.records.append,
            on_progress=lambda _: None,
            prompts=PROMPTS,
        )


@pytest.mark.parametrize(
    ("seconds", "step_s", "rounds"),
    [(1000.0, 10.0, 3), (200.0, 10.0, 2), (200.0, 90.0, 1), (-5.0, 1.0, 1)],
)
def test_a_slow_machine_gets_fewer_rounds(seconds: float, step_s: float, rounds: int) -> None:
    assert PLAN.within(seconds, step_s=step_s) == replace(PLAN, rounds=rounds)


@pytest.mark.parametrize(("found_s", "prompts"), [(5.0, 36), (10.0, 24), (19.0, 12), (60.0, 12)])
def test_a_slow_machine_gets_smaller_steps(found_s: float, prompts: int) -> None:
    assert prompts_within(20.0, found_s=found_s, found=12, most=36) == prompts


@pytest.mark.parametrize(("seconds", "steps"), [(200.0, 6), (100.0, 3), (-5.0, 2)])
def test_a_single_round_that_does_not_fit_gets_fewer_steps(seconds: float, steps: int) -> None:
    """Two have a first and a last reward."""
    plan = BlockPlan(rounds=1, serving_s=40.0, steps=6)
    assert plan.within(seconds, step_s=10.0) == replace(plan, steps=steps)


@pytest.mark.parametrize(
    ("rounds_s", "left_s", "fits"),
    [([], -5.0, True), ([110.0, 120.0], 120.0, True), ([110.0, 120.0], 119.0, False)],
)
def test_a_round_that_would_end_too_late_is_left_out(
    rounds_s: list[float], left_s: float, fits: bool
) -> None:
    assert another_fits(rounds_s, left_s=left_s) is fits


def test_a_excerpt_goes_on_lap_after_lap_with_new_indices() -> None:
    arrivals = list(islice(EXCERPT.endless(), 7))
    assert [arrival.index for arrival in arrivals] == list(range(7))
    assert [arrival.t_s for arrival in arrivals] == [0.0, 1.0, 4.0, 10.0, 11.0, 14.0, 20.0]
    assert EXCERPT.until(11.0) == tuple(arrivals[:4])


async def test_a_block_of_serving_alone_lasts_its_time_and_leaves_no_lease() -> None:
    scene = Scene()
    await scene.runner().run(DemoArm.SERVING_ONLY, 1, EXCERPT, PLAN)
    assert scene.calls == [("harvesting", "harvest", False), ("guest_gone", "guest-0")]
    (block,) = scene.records
    assert isinstance(block, ArmBlock)
    assert (block.arm, block.index) == (DemoArm.SERVING_ONLY, 1)
    assert block.end_s - block.start_s == pytest.approx(PLAN.serving_s)
    assert block.production_busy_share == pytest.approx(BUSY_RATIO)
    assert (scene.arm, scene.block) == (DemoArm.SERVING_ONLY, 1), "samples are labelled"
    assert [index for _, index in scene.sent][:12] == list(range(12))


@pytest.mark.parametrize(
    ("arm", "calls"),
    [
        (
            DemoArm.FIXED,
            [
                ("activate", "fixed"),
                ("harvesting", "harvest", False),
                ("guest_gone", "guest-0"),
            ],
        ),
        (DemoArm.HARVEST, [("activate", "harvest"), ("harvesting", "harvest", True)]),
    ],
)
async def test_a_block_with_a_job_lasts_its_steps(arm: DemoArm, calls: list[Any]) -> None:
    scene = Scene()
    await scene.runner().run(arm, 2, EXCERPT, PLAN)
    assert scene.calls == calls
    *steps, block = scene.records
    assert [type(record) for record in scene.records] == [TrainingStep, TrainingStep, ArmBlock]
    assert block.end_s - block.start_s == pytest.approx(PLAN.steps * STEP_S)
    assert {(step.arm, step.block) for step in steps} == {(arm, 2)}
    assert {label for label, _ in scene.sent} == {arm}


async def test_a_step_is_recorded_with_every_engines_gap_and_every_trajectory() -> None:
    scene = Scene()
    await scene.runner().step(DemoArm.HARVEST, 0)
    (step,) = scene.records
    assert isinstance(step, TrainingStep)
    assert [(gap.engine, gap.sum_abs, gap.tokens) for gap in step.gaps] == [
        ("dedicated-0", 0.1, 60),
        ("guest-0", 0.2, 40),
    ]
    assert (step.started, step.completed, step.lost, step.duplicated) == (4, 3, 1, 0)


async def test_a_guest_that_serves_on_stops_an_arm_that_does_not_harvest() -> None:
    scene = Scene(guest_stays=True)
    with pytest.raises(ConfigError, match="still serves"):
        await scene.runner().run(DemoArm.FIXED, 0, EXCERPT, PLAN)
    assert scene.records == []


@pytest.mark.parametrize("arm", DemoArm)
async def test_a_block_that_is_given_up_ends_its_replay(arm: DemoArm) -> None:
    scene = Scene()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scene.runner().run(arm, 0, EXCERPT, PLAN), STEP_S)
    sent = len(scene.sent)
    await asyncio.sleep(100.0)
    assert len(scene.sent) == sent
    assert not [record for record in scene.records if isinstance(record, ArmBlock)]


async def test_a_part_of_a_trace_without_a_request_sends_none() -> None:
    scene = Scene()
    await scene.runner().run(DemoArm.HARVEST, 0, replace(EXCERPT, arrivals=()), PLAN)
    assert scene.sent == []
    assert isinstance(scene.records[-1], ArmBlock)
