"""Pauses of a job: its turns leave their engines, or end there, and no new one begins."""

import asyncio
from collections.abc import Iterable
from enum import StrEnum

from harvester.contracts.ids import JobId
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.policy.routing_events import JobPaused
from scheduler.gateway.running_attempt import Cut, RunningAttempt


class PauseMode(StrEnum):
    """Treatment of a job's open turns when it is paused; vLLM's names."""

    ABORT = "abort"
    WAIT = "wait"
    """Turns on engines end first; queued turns wait for the end of the pause."""
    KEEP = "keep"
    """Turns leave their engines and go on from their tokens after the pause."""


class PauseControl:
    def __init__(self, fleet: EngineFleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._resumed = asyncio.Event()

    def is_paused(self, job: JobId) -> bool:
        return self._dispatcher.policy.is_paused(job)

    def begin(self, job: JobId) -> None:
        self._dispatcher.observe(JobPaused(job=job, paused=True))

    def end(self, job: JobId) -> None:
        """Each `emptied` looks once whether the pause was its own."""
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
                    running.cut(Cut.PAUSE)
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
