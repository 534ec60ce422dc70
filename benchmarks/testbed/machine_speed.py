"""Speed of one core, by the processor time that a fixed loop takes there.

A virtual core changes its speed up to twofold, for seconds to minutes, with whatever else the host
does. Measured before and after each slice, while no engine has work, the speed tells what a slice
met and nothing of what the slice did: an arm that changed it would have to outlast its own end.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from statistics import fmean, median

_LOOPS = 9
_TURNS = 200_000
"""About 4 ms a loop."""


async def loop_s(core: int) -> float:
    """Median processor time of a loop on the core, in s. Other load on the core adds none."""
    return await asyncio.to_thread(_measured_on, core)


def slowness(around_s: Sequence[float]) -> float | None:
    """Mean logarithm of the loop times around a slice; None without any."""
    return fmean(math.log(each) for each in around_s) if around_s else None


def _measured_on(core: int) -> float:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return median(_loop_s() for _ in range(_LOOPS))
    finally:
        os.sched_setaffinity(0, own)


def _loop_s() -> float:
    began_s = time.thread_time()
    for _ in range(_TURNS):
        pass
    return time.thread_time() - began_s
