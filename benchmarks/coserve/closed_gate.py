"""The core that a guest takes with requests waiting and its gate closed, without isolation.

An operator holds the node meanwhile: grants are closed, leases stay, and arrivals wait. Several
windows, with work done in between, as one window is one state of the guest's threads. Afterwards,
the delay to the guest's first step once it may run.
"""

import asyncio
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.coserve.arms import SETTINGS, Arm
from benchmarks.coserve.opening import opening_figures, openings
from benchmarks.coserve.rounds import Runner
from benchmarks.coserve.run_length import RunLength
from benchmarks.testbed.core_time import account, used
from benchmarks.testbed.slot import GUEST, ServingSlot
from coserve.guest.isolation import NO_ISOLATION
from harvester.contracts.clock import Clock
from harvester.contracts.page import Grant, PageReader

_WINDOW_S = 15.0
_SETTLE_S = 3.0
"""Longer than a step, and than vLLM's second of spinning after one."""
_OPEN_S = 3.0
_BEFORE_S = 1.5


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    seconds: float
    core_s: dict[str, float]
    """Core seconds by the names of process and thread."""

    @property
    def share(self) -> float:
        return sum(self.core_s.values()) / self.seconds


async def closed_gate(
    runner: Runner, grant: PageReader[Grant], length: RunLength
) -> dict[str, Any]:
    """Core use of rollouts that never end behind a closed gate, with nothing else."""
    async with runner.lease.holding(), runner.rollouts.running():
        await asyncio.sleep(_BEFORE_S)
        windows = await closed_windows(runner.slot, runner.clock, count=length.closed_windows)
        found = share_figures(windows)
        found |= opening_figures(await openings(runner, grant, seconds=length.openings_s))
    await runner.quiet()
    await runner.instruct(SETTINGS[Arm.ROSEMUX])
    return found


async def closed_windows(slot: ServingSlot, clock: Clock, *, count: int) -> list[ClosedWindow]:
    """The caller keeps rollouts running."""
    slot.isolate(NO_ISOLATION)
    switch = slot.pages.path.parent / "kill"
    windows: list[ClosedWindow] = []
    for _ in range(count):
        switch.write_text("hold")
        try:
            await asyncio.sleep(_SETTLE_S)
            guest = slot.parts.running[GUEST].tree()
            start_s, before = clock.now(), account(guest)
            await asyncio.sleep(_WINDOW_S)
            after = account(guest)
            windows.append(ClosedWindow(clock.now() - start_s, used(before, after)))
        finally:
            switch.unlink()
        await asyncio.sleep(_OPEN_S)
    return windows


def share_figures(windows: list[ClosedWindow]) -> dict[str, Any]:
    """The share of all windows together, each window's, and where it went."""
    seconds = sum(window.seconds for window in windows)
    shares = [window.share for window in windows]
    names = sorted({name for window in windows for name in window.core_s})
    return {
        "closed_gate_core_share": sum(sum(w.core_s.values()) for w in windows) / seconds,
        "closed_gate": {
            "windows": len(windows),
            "seconds": seconds,
            "share_min": min(shares),
            "share_median": median(shares),
            "share_max": max(shares),
            "by_thread": {
                name: sum(window.core_s.get(name, 0.0) for window in windows) / seconds
                for name in names
            },
        },
    }
