"""Delay of a guest after a closed grant opens: from the grant's stamp to the step's start.

Read from the slot's pages alone, whose times are the writers' own. Nothing else is on the slot: the
guest waits for the grant alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.coserve.arms import RECLAIM
from benchmarks.coserve.reclaim import percentile
from benchmarks.coserve.rounds import Runner
from harvester.contracts.clock import Clock
from harvester.contracts.page import Grant, Guest, PageReader

_POLL_S = 0.001
"""Less than a step: the first one after an opening is seen before the second has ended."""


async def openings(runner: Runner, grant: PageReader[Grant], *, seconds: float) -> list[float]:
    """Seconds, of grants that open and close every half second; the caller keeps rollouts going."""
    runner.policy(RECLAIM)
    return await watch_openings(grant, runner.guest, seconds=seconds, clock=runner.clock)


async def watch_openings(
    grant: PageReader[Grant], guest: Callable[[], Guest], *, seconds: float, clock: Clock
) -> list[float]:
    """Delay of each opening within `seconds` after which exactly one step was seen, in s."""
    until_s, found = clock.now() + seconds, list[float]()
    opened_ns, steps = 0, -1
    while clock.now() < until_s:
        reading, seen = grant.read(), guest()
        if reading.record is None or not reading.record.mode.admits:
            opened_ns, steps = 0, seen.steps_finished
        elif steps >= 0:
            # The grant is written anew in every beat: its first stamp counts.
            opened_ns = opened_ns or reading.stamp_ns
            if seen.steps_finished > steps:
                if seen.steps_finished == steps + 1:
                    found.append((seen.last_step_end_ns - opened_ns) * 1e-9 - seen.last_step_s)
                steps = -1
        await asyncio.sleep(_POLL_S)
    return found


def opening_figures(openings_s: Sequence[float]) -> dict[str, Any]:
    openings_ms = [1e3 * each for each in openings_s]
    return {
        "opening": {
            "openings": len(openings_ms),
            "p50_ms": percentile(openings_ms, 50),
            "max_ms": max(openings_ms, default=None),
        }
    }
