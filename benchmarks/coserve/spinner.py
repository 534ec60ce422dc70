"""A process that keeps production's core awake and ranks below everything on it, like a guest.

A core that never sleeps wakes threads sooner: latencies beside a guest are compared with these.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.testbed.slot import ServingSlot

_SPIN = "while True: pass"


@asynccontextmanager
async def awake(slot: ServingSlot) -> AsyncIterator[None]:
    """While its context lasts the slot's core runs an endless loop in the guest's isolation."""
    processes = slot.parts.processes
    child = processes.start(
        "spinner", (sys.executable, "-S", "-c", _SPIN), core=slot.hardware.core(slot.core)
    )
    try:
        pid = child.process.pid
        slot.hardware.isolate([pid], first=pid, backend=slot.isolation)
        yield
    finally:
        await asyncio.to_thread(processes.kill, child)
