"""Speed of the guest's yield: to a grant that closes, and to an agent that is gone.

Read from the slot's pages alone, whose times are the writers' own. While the guest is watched its
rollouts go on as before, so that there is always a step to yield.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.coserve.arms import RECLAIM, SETTINGS, Arm
from benchmarks.coserve.rounds import Runner
from benchmarks.testbed.slot import AGENT, ServingSlot
from benchmarks.testbed.window import Window
from harvester.contracts.clock import Clock, monotonic_ns
from harvester.contracts.page import Grant, GrantMode, Guest, PageReader

_POLL_S = 0.001
_AFTER_S = 0.1
"""A step that has not ended so long after the grant closed is taken for one that began later."""
# Longer than the grant's time to live and any step of the benchmark's guest.
_GONE_S = 1.5


@dataclass(frozen=True, slots=True)
class Yielded:
    """Work of the guest after the grant had closed."""

    seconds: float
    """Time to the end of its last step; 0 without a running step."""
    steps: int


async def closings(
    runner: Runner, window: Window, grant: PageReader[Grant], *, seconds: float
) -> dict[str, Any]:
    """Closings of the grant in every other half second, under production's load."""
    setting = SETTINGS[Arm.ROSEMUX]
    runner.instruct(replace(setting, policy=RECLAIM))
    async with runner.lease.holding(), runner.rollouts.running():
        stopped = asyncio.Event()
        start_s = runner.clock.now()
        replay = asyncio.ensure_future(
            runner.client.replay(
                window.endless(), arm="reclaim", block=-1, start_s=start_s, stopped=stopped
            )
        )
        found = await watch_closings(grant, runner.guest, seconds=seconds, clock=runner.clock)
        stopped.set()
        await replay
    await runner.quiet()
    runner.instruct(setting)
    return {
        "closings": len(found),
        "compute_p99_ms": percentile([1e3 * each.seconds for each in found], 99),
        "compute_p99_steps": percentile([float(each.steps) for each in found], 99),
    }


async def watch_closings(
    grant: PageReader[Grant], guest: Callable[[], Guest], *, seconds: float, clock: Clock
) -> list[Yielded]:
    """Every closing of the grant within `seconds` that found the guest stepping."""
    until_s = clock.now() + seconds
    found: list[Yielded] = []
    was_open, before = False, guest()
    while clock.now() < until_s:
        reading = grant.read()
        record = reading.record
        is_open = record is not None and record.mode is not GrantMode.CLOSED
        if was_open and not is_open and record is not None:
            await asyncio.sleep(_AFTER_S)
            after = guest()
            late_s = (after.last_step_end_ns - reading.stamp_ns) * 1e-9
            if 0.0 < late_s < _AFTER_S:
                found.append(Yielded(late_s, after.steps_finished - before.steps_finished))
            elif before.running:
                found.append(Yielded(0.0, 0))
        was_open = is_open
        before = guest()
        await asyncio.sleep(_POLL_S)
    return found


async def after_loss(
    slot: ServingSlot, guest: Callable[[], Guest], number: signal.Signals
) -> float | None:
    """Milliseconds from the agent's loss to the end of the guest's last step; None if it stood.

    Stopped agents go on afterwards; killed ones are the caller's to start anew.
    """
    agent = slot.parts.running[AGENT].process.pid
    steps = guest().steps_finished
    lost_ns = monotonic_ns()
    os.kill(agent, number)
    await asyncio.sleep(_GONE_S)
    last = guest()
    if number is signal.SIGSTOP:
        os.kill(agent, signal.SIGCONT)
    if last.steps_finished == steps:
        return None
    return (last.last_step_end_ns - lost_ns) * 1e-6


def percentile(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
