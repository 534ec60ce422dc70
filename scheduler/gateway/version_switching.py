"""The version policy with its journal: one event after another, and the wait for a publish."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from harvester.contracts.clock import Clock
from scheduler.decision_log import DecisionLog
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import (
    JobVersion,
    TimePassed,
    VersionsEffect,
    VersionsEvent,
)


@dataclass(slots=True)
class VersionSwitching:
    _policy: VersionPolicy
    _log: DecisionLog
    _clock: Clock
    _apply: Callable[[VersionsEffect], None]
    """Carries out an effect, and may raise further events."""
    _on_fault: Callable[[Exception], None]
    """Called with an error of the policy, whose effects are lost with it."""
    _events: deque[VersionsEvent] = field(default_factory=deque)
    _observing: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, event: VersionsEvent) -> None:
        """Effects may raise further events; they are taken one after another."""
        self._events.append(event)
        if self._observing:
            return
        self._observing = True
        try:
            while self._events:
                sample, now = self._events.popleft(), self._clock.now()
                effects = self._decided(sample, now)
                if effects or not isinstance(sample, TimePassed):
                    self._log.decided(now=now, sample=sample, effects=effects)
                for effect in effects:
                    self._apply(effect)
        finally:
            self._observing = False

    def _decided(self, sample: VersionsEvent, now: float) -> tuple[VersionsEffect, ...]:
        try:
            return self._policy.observe(sample, now=now)
        except Exception as error:
            self._on_fault(error)
            raise

    async def settled(
        self, target: JobVersion, *, timeout_s: float, patience_s: float = math.inf
    ) -> bool:
        """Waits until every dedicated engine serves `target`. False: `timeout_s` have passed,
        another target (or another store of that number) replaced it, or after `patience_s` every
        engine that does not serve it has failed to load it."""
        until_s = self._clock.now() + patience_s
        try:
            async with asyncio.timeout(timeout_s):
                while self._policy.target == target and not self._policy.settled:
                    if self._policy.failing and self._clock.now() >= until_s:
                        return False
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self._policy.target == target

    def wake_publishers(self) -> None:
        """Lets each task that waits in `settled` look once."""
        self._changed.set()
        self._changed.clear()
