"""Production killed and started again amid rollouts: when the guest stops, and when it goes on.

What is sent is sent while production answers, as a balancer with a health check does, so nothing of
it may fail. Read from the slot's pages alone, whose times are the writers' own.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.coserve.arms import SETTINGS, Arm
from benchmarks.coserve.rounds import Runner
from coserve.vllm.pulse import PULSE_TTL_NS
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest, Pulse, Reading
from scheduler.demo.records import ProductionRequest
from scheduler.demo.slot import PRODUCTION
from scheduler.demo.trace import Arrival
from scheduler.demo.window import Window

_BEFORE_S = 3.0
_LOOK_S = 0.005
_RESUMES_S = 150.0
"""Production's step times are learnt anew first, from some hundred steps, and then comes quiet."""


@dataclass(slots=True)
class GuestWatch:
    """What the guest did while production was gone."""

    last_pulse_ns: int
    """Production's, before it died."""
    steps: int | None = None
    """Launched until the last pulse had expired, as far as it was seen."""
    last_launch_after_ttl: int = 0
    last_step_end_ns: int = 0

    def saw(self, guest: Guest, *, now_ns: int) -> None:
        """Before any pulse is fresh again."""
        if guest.last_step_end_ns > self.last_pulse_ns:
            self.last_step_end_ns = max(self.last_step_end_ns, guest.last_step_end_ns)
        if now_ns <= self.last_pulse_ns + PULSE_TTL_NS:
            return
        if self.steps is None:
            self.steps = guest.steps_launched
        self.last_launch_after_ttl = guest.steps_launched - self.steps

    def figures(self) -> dict[str, Any]:
        last_ms = 1e-6 * (self.last_step_end_ns - self.last_pulse_ns)
        return {
            "last_step_ms": last_ms if self.last_step_end_ns else 0.0,
            "steps_after_ttl": self.last_launch_after_ttl,
        }


async def restart(
    runner: Runner, window: Window, pulse: Callable[[], Reading[Pulse]]
) -> dict[str, Any]:
    """`pulse` reads production's page as it is left, however old.

    Raises ConfigError where the guest does not step again.
    """
    requests: list[ProductionRequest] = []
    async with runner.arranged(SETTINGS[Arm.ROSEMUX]):
        await asyncio.sleep(_BEFORE_S)
        await _kill(runner)
        # One that died while it wrote left no stamp.
        watch = GuestWatch(pulse().stamp_ns or monotonic_ns())
        runner.slot.start_production()
        up = asyncio.ensure_future(runner.slot.production_answers(lambda _: None))
        while pulse().stamp_ns <= watch.last_pulse_ns:
            watch.saw(runner.guest(), now_ns=monotonic_ns())
            await asyncio.sleep(_LOOK_S)
        back_ns = pulse().stamp_ns
        await up
        resumed_s = await _resumed(runner, window.evenly().endless(), requests)
    return watch.figures() | {
        "requests": len(requests),
        "failed": sum(request.failed for request in requests),
        "down_s": 1e-9 * (back_ns - watch.last_pulse_ns),
        "resumed_s": resumed_s,
    }


async def _kill(runner: Runner) -> None:
    parts = runner.slot.parts
    # Its end is not the run's.
    child = parts.running.pop(PRODUCTION)
    await asyncio.to_thread(parts.processes.kill, child)


async def _resumed(
    runner: Runner, load: Iterable[Arrival], requests: list[ProductionRequest]
) -> float:
    """Seconds from production's first answer to the guest's next step."""
    start_s, steps = runner.clock.now(), runner.guest().steps_launched
    stopped = asyncio.Event()
    client = replace(runner.client, record=requests.append)
    replay = asyncio.ensure_future(
        client.replay(load, arm="restart", block=0, start_s=start_s, stopped=stopped)
    )
    try:
        while runner.guest().steps_launched <= steps:
            if runner.clock.now() - start_s > _RESUMES_S:
                raise ConfigError(f"the guest takes no step {_RESUMES_S:.0f} s after production")
            await asyncio.sleep(_LOOK_S)
        resumed_s = runner.clock.now() - start_s
    finally:
        stopped.set()
        await replay
    return resumed_s
