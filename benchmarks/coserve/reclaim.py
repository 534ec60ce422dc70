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
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.slot import AGENT, ServingSlot
from harvester.contracts.clock import Clock, monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Grant, Guest, PageReader, Reading

_POLL_S = 0.001
_STOPS_S = 60.0
# Longer than the grant's time to live and any step of the benchmark's guest.
_GONE_S = 1.5


@dataclass(frozen=True, slots=True)
class Yielded:
    """Work of the guest after the grant had closed."""

    seconds: float
    """Time to the end of its last step; 0 without a running step."""
    steps: int
    is_over: bool = True
    """False if the grant opened again before: the guest needed longer than `seconds`."""


async def closings(
    runner: Runner,
    excerpt: Excerpt,
    grant: PageReader[Grant],
    guest: Callable[[], Reading[Guest]],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Closings of the grant, which is withheld in half of the slices, under production's load."""
    setting = SETTINGS[Arm.ROSEMUX]
    await runner.instruct(replace(setting, policy=RECLAIM))
    async with runner.lease.holding(), runner.rollouts.running():
        stopped = asyncio.Event()
        start_s = runner.clock.now()
        replay = asyncio.ensure_future(
            runner.client.replay(
                excerpt.endless(), arm="reclaim", block=-1, start_s=start_s, stopped=stopped
            )
        )
        found = await watch_closings(grant, guest, seconds=seconds, clock=runner.clock)
        stopped.set()
        await replay
    await runner.quiet()
    await runner.instruct(setting)
    return {
        "closings": len(found),
        "closings_not_over": sum(not each.is_over for each in found),
        "compute_p99_ms": percentile([1e3 * each.seconds for each in found], 99),
        "compute_p99_steps": percentile([float(each.steps) for each in found], 99),
    }


async def watch_closings(
    grant: PageReader[Grant],
    guest: Callable[[], Reading[Guest]],
    *,
    seconds: float,
    clock: Clock,
) -> list[Yielded]:
    """Every closing of the grant within `seconds` that found the guest with requests, each watched
    until the guest's last step has ended."""
    until_s = clock.now() + seconds
    found: list[Yielded] = []
    was_open, before = False, guest().record
    while clock.now() < until_s:
        reading = grant.read()
        is_open = _admits(reading)
        if was_open and not is_open and reading.record is not None and before is not None:
            after, is_over = await _quiet_page(grant, guest, reading.stamp_ns, clock)
            late_s = (after.last_step_end_ns - reading.stamp_ns) * 1e-9
            if not is_over:
                late_s = clock.now() - reading.stamp_ns * 1e-9
            if before.running or late_s > 0.0:
                steps = after.steps_finished - before.steps_finished if late_s > 0.0 else 0
                found.append(Yielded(max(0.0, late_s), steps, is_over))
        was_open = is_open
        before = guest().record or before
        await asyncio.sleep(_POLL_S)
    return found


async def _quiet_page(
    grant: PageReader[Grant], guest: Callable[[], Reading[Guest]], closed_ns: int, clock: Clock
) -> tuple[Guest, bool]:
    """The guest's first page since the closing without a launched step; False if the grant opened
    before there was one. Raises ConfigError if the guest never stops."""
    until_s = clock.now() + _STOPS_S
    while clock.now() < until_s:
        page = guest()
        if page.record is not None:
            launched = page.record.steps_launched - page.record.steps_finished
            if page.stamp_ns > closed_ns and launched == 0:
                return page.record, True
            if _admits(grant.read()):
                return page.record, False
        await asyncio.sleep(_POLL_S)
    raise ConfigError(f"the guest still steps {_STOPS_S:.0f} s after its grant closed")


def _admits(reading: Reading[Grant]) -> bool:
    return reading.record is not None and reading.record.mode.admits


async def after_loss(
    slot: ServingSlot, guest: Callable[[], Guest], number: signal.Signals
) -> float | None:
    """Milliseconds from the agent's loss to the end of the guest's last step; None if it stood.

    A step that has not ended when the guest is looked at counts as that long: the least that it
    takes. Stopped agents go on afterwards; killed ones are the caller's to start anew.
    """
    agent = slot.parts.running[AGENT].process.pid
    steps = guest().steps_finished
    lost_ns = monotonic_ns()
    os.kill(agent, number)
    await asyncio.sleep(_GONE_S)
    last = guest()
    if number is signal.SIGSTOP:
        os.kill(agent, signal.SIGCONT)
    if last.steps_launched > last.steps_finished:
        return _GONE_S * 1e3
    if last.steps_finished == steps:
        return None
    return (last.last_step_end_ns - lost_ns) * 1e-6


def percentile(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
