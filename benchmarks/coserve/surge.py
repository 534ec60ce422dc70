"""A load that production has never shown: from nothing to ten times the mean within a second.

The guest has learned, and the agent has judged, from hours of something else.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.coserve.rounds import Runner
from benchmarks.coserve.side_by_side import SideBySide, compared
from benchmarks.testbed.trace import Arrival

TIMES = 10.0
_WITHIN_S = 1.0


def surge(arrivals: Sequence[Arrival], *, rate: float) -> list[Arrival]:
    """`rate` is the mean of before, in requests per second."""
    count = max(1, min(len(arrivals), round(TIMES * rate * _WITHIN_S)))
    return [
        replace(arrival, t_s=_WITHIN_S * position / count)
        for position, arrival in enumerate(arrivals[:count])
    ]


async def surges(
    runner: Runner, trials: int, arrivals: Sequence[Arrival], *, rate: float
) -> dict[str, Any]:
    seen = await SideBySide(runner, trials).run("surge", surge(arrivals, rate=rate))
    found = compared(seen)
    return found | {"requests": found["requests"] // len(seen)}
