"""Production killed and restarted amid rollouts: the guest's stop and its return.

Requests are sent while production answers, as a balancer with a health check does, so none of
them may fail. Read from the slot's pages alone, whose times are the writers' own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.coserve.arms import SETTINGS, Arm
from benchmarks.coserve.rounds import Runner
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slot import PRODUCTION
from coserve.vllm.pulse_reporter import PULSE_TTL_NS
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest, Pulse, Reading

_BEFORE_S = 3.0
_LOOK_S = 0.005
_REPORTED_NS = 200_000_000
"""A step that was launched in time stands in the guest's page by then."""
_RESUMES_S = 150.0
"""Production's step times are learnt anew first, from some hundred steps, and then comes quiet."""


@dataclass(frozen=True, slots=True)
class LeftPages:
    """Pages as they were left, of any age: on a full machine a late page is no evidence."""

    pulse: Callable[[], Reading[Pulse]]
    guest: Callable[[], Reading[Guest]]


@dataclass(slots=True)
class OutageSteps:
    """The guest's steps while production was gone."""

    last_pulse_ns: int
    """Production's, before it died."""
    steps: int | None = None
    """Steps launched until the last pulse had expired, by the guest's page."""
    steps_after_ttl: int = 0
    steps_launched: int = 0
    last_step_end_ns: int = 0

    def saw(self, guest: Guest, *, now_ns: int) -> None:
        """Records the guest's steps before any pulse is fresh again."""
        self.steps_launched = guest.steps_launched
        if guest.last_step_end_ns > self.last_pulse_ns:
            self.last_step_end_ns = max(self.last_step_end_ns, guest.last_step_end_ns)
        if now_ns <= self.last_pulse_ns + PULSE_TTL_NS + _REPORTED_NS:
            return
        if self.steps is None:
            self.steps = guest.steps_launched
        self.steps_after_ttl = guest.steps_launched - self.steps

    def figures(self) -> dict[str, Any]:
        last_ms = 1e-6 * (self.last_step_end_ns - self.last_pulse_ns)
        return {
            "last_step_ms": last_ms if self.last_step_end_ns else 0.0,
            "steps_after_ttl": self.steps_after_ttl,
        }


async def restart(runner: Runner, excerpt: Excerpt, pages: LeftPages) -> dict[str, Any]:
    """Raises ConfigError where the guest does not step again."""
    requests: list[ProductionRequest] = []
    async with runner.arranged(SETTINGS[Arm.ROSEMUX]):
        await asyncio.sleep(_BEFORE_S)
        await _kill(runner)
        # One that died while it wrote left no stamp.
        watch = OutageSteps(pages.pulse().stamp_ns or monotonic_ns())
        runner.slot.start_production()
        up = asyncio.ensure_future(runner.slot.production_answers(lambda _: None))
        while (back_ns := pages.pulse().stamp_ns) <= watch.last_pulse_ns:
            if (guest := pages.guest().record) is not None:
                watch.saw(guest, now_ns=monotonic_ns())
            await asyncio.sleep(_LOOK_S)
        await up
        resumed_s = await _resumed(runner, pages, watch.steps_launched, excerpt, requests)
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
    runner: Runner,
    pages: LeftPages,
    steps_launched: int,
    excerpt: Excerpt,
    requests: list[ProductionRequest],
) -> float:
    """Seconds from production's first answer to the guest's next step."""
    start_s = runner.clock.now()
    stopped = asyncio.Event()
    client = replace(runner.client, record=requests.append)
    load = excerpt.evenly().endless()
    replay = asyncio.ensure_future(
        client.replay(load, arm="restart", block=0, start_s=start_s, stopped=stopped)
    )
    try:
        while (guest := pages.guest().record) is None or guest.steps_launched <= steps_launched:
            if runner.clock.now() - start_s > _RESUMES_S:
                raise ConfigError(f"the guest takes no step {_RESUMES_S:.0f} s after production")
            await asyncio.sleep(_LOOK_S)
        resumed_s = runner.clock.now() - start_s
    finally:
        stopped.set()
        await replay
    return resumed_s
