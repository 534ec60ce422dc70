"""The preparation of a run on a simulated machine, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.calibration import TARGET_BUSY_SHARE, busy_share, mean_busy_share, scaled
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import ServiceLevel
from benchmarks.testbed.trace import Arrival
from examples.demo.blocks import WARM_UP_BLOCK, BlockPlan
from examples.demo.preparation import SCALES, DemoPreparation
from examples.demo.records import DemoArm
from harvester.contracts.page import ProductionModel, Pulse

TRACE = generated_trace(Bursts(), duration_s=900.0, seed=2)
MODEL = ProductionModel(
    prefill_base_s=0.01, prefill_s_per_token=4e-5, decode_base_s=0.006, decode_s_per_request=3e-4
)
STEP_S = 9.0
COLD = 3.0
BLOCKS = BlockPlan(rounds=4, serving_s=25.0, steps=2)


class LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Machine:
    """Its steps take `longer` than their model says, and `COLD` times that until it has served."""

    longer: float
    busy_s: float = 0.0
    cold: bool = True
    samples: int = 0
    """Steps that its model rests on."""
    samples_per_replay: int = 100
    promised: list[ServiceLevel] = field(default_factory=list)
    steps: list[tuple[DemoArm, int]] = field(default_factory=list)

    def pulse(self) -> Pulse:
        return Pulse(busy_s_total=self.busy_s, model=MODEL, model_samples=self.samples)

    def promise(self, level: ServiceLevel) -> None:
        self.promised.append(level)

    def serve(self, arrivals: Iterable[Arrival], seconds: float) -> None:
        model = scaled(MODEL, self.longer * (COLD if self.cold else 1.0))
        self.busy_s += busy_share(list(arrivals), model, excerpt_s=seconds) * seconds
        self.cold = False
        self.samples += self.samples_per_replay

    @asynccontextmanager
    async def replaying(self, arm: DemoArm, index: int, excerpt: Excerpt) -> AsyncIterator[None]:
        self.steps.append((arm, index))
        self._excerpt = excerpt
        yield

    async def step(self, arm: DemoArm, index: int) -> float:
        await asyncio.sleep(STEP_S)
        self.serve(self._excerpt.until(STEP_S), STEP_S)
        return STEP_S

    _excerpt: Excerpt = field(init=False)


@dataclass(slots=True)
class Client:
    machine: Machine
    record: Callable[[ProductionRequest], None]

    async def replay(
        self, arrivals: tuple[Arrival, ...], *, arm: DemoArm, block: int, start_s: float
    ) -> None:
        seconds = arrivals[-1].t_s
        await asyncio.sleep(seconds)
        self.machine.serve(arrivals, seconds)
        for arrival in arrivals:
            self.record(
                ProductionRequest(
                    arm=arm,
                    block=block,
                    due_s=start_s + arrival.t_s,
                    input_tokens=arrival.input_tokens,
                    output_tokens=arrival.output_tokens,
                    ttft_s=0.035,
                    itl_s=(0.0055,),
                    failed=False,
                )
            )


def never(_: ProductionRequest) -> None:
    raise AssertionError("a preparation's requests stay out of the records")


def preparation_of(machine: Machine) -> DemoPreparation:
    fake = cast(Any, machine)
    return DemoPreparation(
        stack=fake,
        trace=TRACE,
        client=cast(Any, Client(machine, never)),
        watch=fake,
        clock=LoopClock(),
    )


@pytest.mark.parametrize("longer", [0.4, 0.7, 1.0, 1.3])
async def test_the_blocks_keep_production_as_busy_as_they_should(longer: float) -> None:
    machine = Machine(longer)
    preparation = preparation_of(machine)
    await preparation.first_replay(10.0)
    assert await preparation.fixed_step(cast(Any, machine)) == STEP_S
    await preparation.harvesting_step(cast(Any, machine))
    excerpts = await preparation.last_replay(20.0, blocks=BLOCKS)
    assert [excerpt.duration_s for excerpt in excerpts] == [BLOCKS.serving_s] * BLOCKS.rounds
    share = mean_busy_share(excerpts, scaled(MODEL, longer))
    assert share == pytest.approx(TARGET_BUSY_SHARE, abs=0.05)
    assert machine.steps == [(DemoArm.FIXED, WARM_UP_BLOCK), (DemoArm.HARVEST, WARM_UP_BLOCK)]


async def test_a_slow_machine_is_sent_smaller_requests_and_not_too_few() -> None:
    """Ten times as slow, as a CPU without AVX-512 is."""
    requests = {}
    for longer in (1.0, 10.0):
        machine = Machine(longer)
        preparation = preparation_of(machine)
        await preparation.first_replay(10.0)
        excerpts = await preparation.last_replay(20.0, blocks=BLOCKS)
        requests[longer] = sum(len(excerpt.arrivals) for excerpt in excerpts)
        share = mean_busy_share(excerpts, scaled(MODEL, longer))
        assert share == pytest.approx(TARGET_BUSY_SHARE, abs=0.05)
        if longer == 1.0:
            assert preparation.load.sizes == SCALES[0]
    assert requests[10.0] >= 40 * BLOCKS.rounds


async def test_the_slo_attained_in_each_replay_is_promised() -> None:
    machine = Machine(1.0)
    preparation = preparation_of(machine)
    await preparation.first_replay(10.0)
    await preparation.last_replay(20.0, blocks=BLOCKS)
    assert machine.promised == [ServiceLevel(ttft_s=0.0355, itl_s=0.0056)] * 2


@pytest.mark.parametrize(("samples", "replays"), [(100, 1), (25, 3), (1, 4)])
async def test_the_first_replay_goes_on_until_production_s_step_times_are_known(
    samples: int, replays: int
) -> None:
    """Nothing is lent before; a machine that never learns goes on with what it has."""
    machine = Machine(1.0, samples_per_replay=samples)
    await preparation_of(machine).first_replay(10.0)
    assert len(machine.promised) == replays
