"""Switches of a job: whether it may lease slots, and whether it may use dedicated engines."""

import asyncio
import logging
import sqlite3
from enum import StrEnum
from typing import Annotated

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.gateway_state import SchedulerState

_log = logging.getLogger(__name__)

FOR_MAX_S = 3600.0
LimitedTime = Annotated[float, msgspec.Meta(gt=0.0, le=FOR_MAX_S)] | None


class JobSwitch(StrEnum):
    DEDICATED = "dedicated"
    """The job's turns may run on dedicated engines."""
    HARVESTING = "harvesting"
    """The job may lease slots."""


class SwitchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool
    for_s: LimitedTime = None
    """Time after which the switch goes off unless renewed, in s; None: it stays on."""


class JobSwitches:
    """A job in a phase renews its switches while its permit lasts: when its process dies, engines
    on another job's node are no longer used."""

    def __init__(
        self, fleet: EngineFleet, state: SchedulerState, clock: Clock, *, wake: asyncio.Event
    ) -> None:
        """`wake`: set each time that a switch is."""
        self._fleet = fleet
        self._state = state
        self._clock = clock
        self._wake = wake
        self._harvesting = {job: given.harvesting for job, given in fleet.registry.jobs.items()}
        self._off_at_s: dict[tuple[JobId, JobSwitch], float] = {}
        """Expiry times of switches that were set for a limited time."""
        self.unrecorded: set[tuple[JobId, JobSwitch]] = set()
        """Switches that are off but still recorded as on."""

    def resume(self) -> None:
        """Takes up the switches of the previous process."""
        for job in self._state.parked():
            self._fleet.use_dedicated(job, enabled=False)
        for job, facts in self._state.jobs().items():
            if job in self._harvesting and facts.harvesting is not None:
                self._harvesting[job] = facts.harvesting

    def is_on(self, job: JobId, switch: JobSwitch) -> bool:
        if switch is JobSwitch.DEDICATED:
            return self._fleet.registry.may_use_dedicated(job)
        return self._harvesting[job]

    def set(self, job: JobId, switch: JobSwitch, *, on: bool, for_s: float | None = None) -> bool:
        """`for_s`: the switch goes off after that time, and after a restart, unless set again.

        Off works in any case: False says that a restart would switch it on again. Raises Exhausted
        if "on" cannot be recorded: then nothing has changed.
        """
        key = job, switch
        fault = self._record(key, on=on and for_s is None)
        if fault and on:
            raise Exhausted(f"nothing was changed: state_file cannot be written: {fault}")
        if not fault:
            self.unrecorded.discard(key)
        elif key not in self.unrecorded:
            _log.error("job %s: a restart would switch %s on again: %s", job, switch, fault)
            self.unrecorded.add(key)
        self._off_at_s.pop(key, None)
        if for_s is not None:
            self._off_at_s[key] = self._clock.now() + for_s
        if switch is JobSwitch.DEDICATED:
            self._fleet.use_dedicated(job, enabled=on)
        else:
            self._harvesting[job] = on
        self._wake.set()
        return not fault

    def expire(self, *, now: float) -> None:
        """Turns expired switches off and retries records that failed."""
        for job, switch in sorted(key for key, at_s in self._off_at_s.items() if at_s <= now):
            _log.warning("job %s: %s goes off: it was not renewed", job, switch)
            self.set(job, switch, on=False)
        for key in sorted(self.unrecorded):
            if not self._record(key, on=False):
                self.unrecorded.discard(key)

    def _record(self, key: tuple[JobId, JobSwitch], *, on: bool) -> str:
        """Records the switch; returns the fault, "" on success."""
        (job, switch), state = key, self._state
        record = state.use_dedicated if switch is JobSwitch.DEDICATED else state.set_harvesting
        try:
            record(job, enabled=on)
        except sqlite3.Error as error:
            return str(error)
        return ""
