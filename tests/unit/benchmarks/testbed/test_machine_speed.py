import asyncio
import math
import os

import pytest

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
