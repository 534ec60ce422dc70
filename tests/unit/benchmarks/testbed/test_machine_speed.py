import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.coserve import rounds
from benchmarks.coserve.arms import Arm
from benchmarks.coserve.rounds import ArmSlice, Runner
from benchmarks.testbed.machine_speed import loop_s, slowness


def test_a_look_at_a_core_leaves_the_caller_where_it_was() -> None:
    own = os.sched_getaffinity(0)
    core = max(own)

    async def looked_twice() -> list[float]:
        return [await loop_s(core) for _ in range(2)]

    found = asyncio.run(looked_twice())
    assert all(0.0 < each < 1.0 for each in found)
    assert os.sched_getaffinity(0) == own


def test_slowness_is_the_mean_logarithm_of_the_loops_around() -> None:
    assert slowness([0.004, 0.004]) == pytest.approx(math.log(0.004))
    assert slowness([0.004, 0.008]) == pytest.approx(math.log(0.004 * 2**0.5))
    assert slowness([]) is None


async def test_the_speed_is_looked_at_before_an_arm_begins_and_after_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    done = ArmSlice(
        arm=Arm.ALONE,
        round=0,
        seconds=10.0,
        guest_tokens=0,
        guest_steps=0,
        production_busy_s=5.0,
        production_core_s=5.0,
        idle_s=4.0,
        guest_core_s=0.0,
        step_work_s=0.0,
    )

    async def looked(core: int) -> float:
        happened.append(f"look at core {core}")
        return 0.004

    @asynccontextmanager
    async def arranged(_: Runner, setting: object) -> AsyncIterator[None]:
        happened.append("begins")
        yield
        happened.append("ended")

    async def measured(*_: object) -> ArmSlice:
        happened.append("measured")
        return done

    monkeypatch.setattr(rounds, "loop_s", looked)
    monkeypatch.setattr(rounds, "_SETTLE_S", 0.0)
    monkeypatch.setattr(Runner, "arranged", arranged)
    monkeypatch.setattr(Runner, "_measured", measured)
    slot = SimpleNamespace(hardware=SimpleNamespace(core=lambda number: number), core=0)
    runner = Runner(slot=cast(Any, slot), **dict.fromkeys(_OTHERS, cast(Any, None)))
    found = await runner.run(Arm.ALONE, 0, cast(Any, None))
    assert happened == ["look at core 0", "begins", "measured", "ended", "look at core 0"]
    assert found.loops_s == (0.004, 0.004)


_OTHERS = ("client", "rollouts", "lease", "clock", "pulse", "guest", "level", "requests")
