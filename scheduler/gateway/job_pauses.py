"""Pauses of a job: its turns leave their engines, or end there, and no new one begins."""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harvester.contracts.clock import Clock
from harvester.contracts.ids import JobId
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.job_turns import JobTurns
from scheduler.gateway.policy.routing_events import JobPaused
from scheduler.gateway.running_attempt import CutReason, RunningAttempt

_log = logging.getLogger(__name__)


class PauseMode(StrEnum):
    """Treatment of a job's open turns when it is paused; vLLM's names."""

    ABORT = "abort"
    WAIT = "wait"
    """Turns on engines end first; queued turns wait for the end of the pause."""
    KEEP = "keep"
    """Turns leave their engines and go on from their tokens after the pause."""


@dataclass(slots=True)
class JobPauses:
    _fleet: EngineFleet
    _turns: Mapping[JobId, JobTurns]
    _dispatcher: Dispatcher
    _clock: Clock
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _times: dict[JobId, tuple[float, float]] = field(default_factory=dict)
    """Times at which a paused job's pause began, and ends unless it is renewed."""

    def is_paused(self, job: JobId) -> bool:
        return self._dispatcher.policy.is_paused(job)

    def age_s(self, job: JobId) -> float:
        """0 of a job that is not paused."""
        now = self._clock.now()
        return now - self._times.get(job, (now, now))[0]

    async def begin(self, job: JobId, mode: PauseMode, *, for_s: float | None = None) -> None:
        """Begins no turn of the job, until the pause is ended or `for_s` have passed without
        another call. A restarted gateway is not paused."""
        now = self._clock.now()
        if job not in self._times:
            _log.info("job %s is paused", job)
        since_s, _ = self._times.get(job, (now, now))
        self._times[job] = since_s, now + (math.inf if for_s is None else for_s)
        self._dispatcher.observe(JobPaused(job=job, paused=True))
        if mode is PauseMode.ABORT:
            await self._turns[job].abort()
        else:
            await self.emptied(job, cut=mode is PauseMode.KEEP)

    def expire(self, *, now: float) -> None:
        for job in sorted(job for job, (_, until_s) in self._times.items() if until_s <= now):
            _log.warning("job %s: its pause was not renewed", job)
            self.end(job)

    def end(self, job: JobId) -> None:
        """Ends the pause; every waiting `emptied` looks whether it waits for this pause."""
        if job in self._times:
            _log.info("job %s goes on after a pause of %.1f s", job, self.age_s(job))
        self._times.pop(job, None)
        self._dispatcher.observe(JobPaused(job=job, paused=False))
        # The event is replaced, not cleared: an `emptied` that is about to wait must not miss it.
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def emptied(self, job: JobId, *, cut: bool) -> None:
        """Waits until no turn of a paused job is on an engine, or the pause has ended. `cut`: turns
        that can go on from their output leave at once; the others are not waited for."""
        while self.is_paused(job):
            on_engines = [
                running
                for member in self._fleet.members.values()
                for running in member.running
                if running.turn.job == job and not (cut and running.turn.immovable)
            ]
            if cut:
                for running in on_engines:
                    running.cut(CutReason.PAUSE)
            if not on_engines:
                return
            over = asyncio.ensure_future(_all_over(on_engines))
            resumed = asyncio.ensure_future(self._resumed.wait())
            try:
                await asyncio.wait((over, resumed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                resumed.cancel()


async def _all_over(attempts: Iterable[RunningAttempt]) -> None:
    for running in attempts:
        await running.over.wait()
