import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from torch import Tensor

from examples.grpo.environment import Task, TaskShape
from examples.grpo.events import (
    CommandRefused,
    Event,
    StepDone,
    Stopped,
    decoded_command,
    encoded_event,
)
from examples.grpo.grpo import GrpoSettings
from examples.grpo.master_weights import AdamSettings, MasterWeights
from examples.grpo.model import PolicyModel
from examples.grpo.policy_shape import PolicyShape
from examples.grpo.rollout import StepBatch, TrajectoryLedger
from examples.grpo.trainer import serve
from examples.grpo.training_run import TrainingRun
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import WeightVersion
from harvester.contracts.wire.rollouts import VersionSwitched
from tests.unit.examples.grpo.local_sampler import LocalSampler
from tests.virtual_clock import VirtualClock


@dataclass(frozen=True)
class Receipt:
    version: int
    state_hash: str = "hash"
    bytes_sent: int = 10
    bytes_dense: int = 100


class World:
    """Store, gateway and engines in one, on virtual time; remembers the order of things."""

    def __init__(self, tiny: PolicyShape) -> None:
        self.clock = VirtualClock()
        self.weights = MasterWeights(PolicyModel(tiny, seed=1), AdamSettings(learning_rate=1e-3))
        self.happened: list[tuple[str, int]] = []
        self.version = 40
        self.hold = asyncio.Event()
        self.hold.set()

    def publish(self, state: Mapping[str, Tensor]) -> Receipt:
        self.version += 1
        self.clock.now_s += 1.0
        self.happened.append(("publish", self.version))
        return Receipt(self.version)

    async def announce(self, version: int, store: str, *, state_hash: str) -> VersionSwitched:
        assert (store, state_hash) == ("store", "hash")
        self.clock.now_s += 2.0
        self.happened.append(("announce", version))
        return VersionSwitched(version=WeightVersion(version), engines={})

    async def collect(self, tasks: Sequence[Task], *, step: int, version: int) -> StepBatch:
        self.happened.append(("collect", version))
        await self.hold.wait()
        self.clock.now_s += 4.0
        sampler = LocalSampler(self.weights.policy)
        done = sampler.sample(tasks, samples_per_prompt=2, version=version, seed=step)
        ledger = TrajectoryLedger(started=len(done))
        return StepBatch(done, ledger, 4.0, 1, 2, 3, {"local": 2})

    def run(self) -> TrainingRun:
        return TrainingRun(
            self.weights,
            tasks=TaskShape(prompts_per_step=2),
            seed=1,
            store="store",
            grpo=GrpoSettings(),
            publisher=self,
            gateway=self,
            collector=self,
            clock=self.clock,
        )


async def test_a_step_rolls_out_on_the_version_before_and_ends_on_the_next(
    tiny: PolicyShape,
) -> None:
    world = World(tiny)
    run = world.run()
    await run.publish()
    first, second = await run.step(), await run.step()
    assert world.happened == [
        ("publish", 41),
        ("announce", 41),
        ("collect", 41),
        ("publish", 42),
        ("announce", 42),
        ("collect", 42),
        ("publish", 43),
        ("announce", 43),
    ]
    assert (first.step, first.version, second.step, second.version) == (1, 42, 2, 43)
    assert first.stale_tokens == second.stale_tokens == 0


async def test_a_step_has_the_prompts_that_it_is_asked_for(tiny: PolicyShape) -> None:
    run = World(tiny).run()
    await run.publish()
    done = [await run.step(prompts) for prompts in (5, None)]
    assert [step.trajectories.started for step in done] == [5 * 2, 2 * 2]


async def test_a_step_says_where_its_time_went(tiny: PolicyShape) -> None:
    run = World(tiny).run()
    await run.publish()
    done = await run.step()
    assert (done.rollout_s, done.publish_s, done.switch_s) == (4.0, 1.0, 2.0)
    assert done.step_s == 7.0
    assert done.logprob_gap["local"][1] > 0
    assert msgspec.json.decode(encoded_event(done))["event"] == "step"


def lines_of(*lines: bytes, ends: bool) -> AsyncIterator[bytes]:
    async def lines_then() -> AsyncIterator[bytes]:
        for line in lines:
            yield line
        if not ends:
            await asyncio.Event().wait()

    return lines_then()


async def served(world: World, lines: AsyncIterator[bytes]) -> list[Event]:
    run = world.run()
    await run.publish()
    events: list[Event] = []
    await serve(run, lines, events.append)
    return events


async def test_commands_are_obeyed_in_order_until_stop(tiny: PolicyShape) -> None:
    step = b'{"cmd":"step"}\n'
    lines = lines_of(step, b"\n", step, b'{"cmd":"stop"}\n', step, ends=False)
    events = await served(World(tiny), lines)
    assert [type(event) for event in events] == [StepDone, StepDone, Stopped]
    assert events[-1] == Stopped(steps=2)


async def test_a_line_that_is_no_command_is_refused_and_nothing_else_happens(
    tiny: PolicyShape,
) -> None:
    lines = lines_of(b'{"cmd":"leap"}\n', b"hello\n", b'{"cmd":"stop"}\n', ends=False)
    events = await served(World(tiny), lines)
    assert [type(event) for event in events] == [CommandRefused, CommandRefused, Stopped]


async def test_the_end_of_the_commands_cuts_a_step_short(tiny: PolicyShape) -> None:
    world = World(tiny)
    world.hold.clear()
    events = await served(world, lines_of(b'{"cmd":"step"}\n', ends=True))
    assert events == [Stopped(steps=0)]


async def test_a_failing_step_ends_the_run_with_its_error(tiny: PolicyShape) -> None:
    class Broken(World):
        async def collect(self, tasks: Sequence[Task], *, step: int, version: int) -> StepBatch:
            raise Exhausted("all were lost")

    with pytest.raises(Exhausted):
        await served(Broken(tiny), lines_of(b'{"cmd":"step"}\n', ends=False))


@pytest.mark.parametrize(
    "line",
    [b"{}", b'{"cmd":"step","more":1}', b'{"cmd":"step","prompts":0}', b"[]", b"\xff", b'"step"'],
)
def test_only_exact_commands_are_commands(line: bytes) -> None:
    assert isinstance(decoded_command(line), CommandRefused)
