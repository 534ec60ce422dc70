"""The interlocks of one node: probes, verdicts, and the stops that follow, at every beat."""

import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from harvester.agent.interlock_probes import (
    NOT_ASKED_YET,
    Probe,
    alerts_probe,
    dcgm_probe,
    nvml_probe,
)
from harvester.config import AgentConfig
from harvester.contracts.clock import Clock, wall_time_utc
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.wire.stops import Stop, StopOrder, StopSource
from harvester.interlock_config import AcceleratorsConfig, AlertsConfig
from harvester.platform.nvml import Nvml
from harvester.policy.interlocks import (
    AcceleratorsReading,
    AlertsReading,
    Interlock,
    judge_accelerators,
    judge_alerts,
)

_log = logging.getLogger(__name__)

_MOST_ABSENT = 1024
_MISSED_READINGS = 3
"""Readings in a row that may be late before the last one counts as none."""


class InterlockWatch:
    def __init__(self, config: AgentConfig, *, clock: Clock) -> None:
        """Raises ConfigError if a source cannot be used here."""
        self._clock = clock
        self._at: dict[tuple[str, str, str], str] = {}
        self._reported: dict[str, str] = {}
        self._limit = EventLimit()
        self._alerts = config.interlocks.alerts
        self._accelerators = config.interlocks.accelerators
        self._alerts_probe: Probe[AlertsReading] | None = None
        self._accelerators_probe = _accelerators_probe(self._accelerators, clock)
        if (alerts := self._alerts) is not None:
            self._alerts_probe = alerts_probe(alerts, clock=clock)
            self._alerts_lock = _interlock("alerts", alerts)
            self._matchers = alerts.matchers
        self._locks: dict[str, tuple[Interlock, tuple[str, ...]]] = {}
        self._absent: dict[str, Interlock] = {}
        self.configure(config)

    def configure(self, config: AgentConfig) -> None:
        """Take over the slots. Slots that stay keep their locks, and their accelerators if any were
        named. A slot that comes back gets its old lock: what fired goes on until it was quiet."""
        before, self._locks = self._locks, {}
        for slot in config.slots:
            lock, uuids = before.get(slot.name, (self._absent.get(slot.name), ()))
            lock = lock or _interlock("accelerators", self._accelerators, slot=slot.name)
            uuids = uuids or (slot.guest.gpus if slot.guest is not None else ())
            self._locks[slot.name] = (lock, uuids)
        gone = before.keys() - self._locks.keys()
        self._absent |= {name: before[name][0] for name in gone}
        while len(self._absent) > _MOST_ABSENT:
            del self._absent[next(iter(self._absent))]

    def probes(self) -> list[Coroutine[Any, Any, None]]:
        """Loops to be run until they are cancelled."""
        found = (self._alerts_probe, self._accelerators_probe)
        return [probe.run() for probe in found if probe is not None]

    def known(self) -> dict[str, bool]:
        """Whether each configured source gave enough for a verdict at the last beat."""
        found = {}
        if self._alerts_probe is not None:
            found["alerts"] = not self._alerts_lock.unknown
        if self._accelerators_probe is not None:
            found["accelerators"] = not any(lock.unknown for lock, _ in self._locks.values())
        return found

    def stops(self, evicted: dict[str, int], *, now: float) -> tuple[Stop, ...]:
        """`evicted`: slots with more evictions an hour than may be, and how many may be."""
        found: list[Stop | None] = [
            Stop(
                order=StopOrder.HOLD,
                source=StopSource.INTERLOCK,
                slot=slot,
                by="evictions",
                reason=f"more than {most} evictions in the last hour",
            )
            for slot, most in evicted.items()
        ]
        if self._alerts is not None and self._alerts_probe is not None:
            alerts = self._alerts_probe.reading
            verdict = judge_alerts(alerts, self._matchers, watchdog=self._alerts.watchdog)
            found.append(self._alerts_lock.observe(verdict, taken_at_s=alerts.taken_at_s, now=now))
            self._report("alerts", {self._alerts_lock.unknown}, now=now)
        if self._accelerators_probe is not None:
            reading, limits = self._accelerators_probe.reading, self._accelerators.limits
            for lock, uuids in self._locks.values():
                verdict = judge_accelerators(reading, limits, uuids=uuids)
                found.append(lock.observe(verdict, taken_at_s=reading.taken_at_s, now=now))
            faults = {lock.unknown for lock, _ in self._locks.values()}
            self._report("accelerators", faults, now=now)
        return self._timed([stop for stop in found if stop is not None])

    def _report(self, source: str, faults: set[str], *, now: float) -> None:
        """Log each new fault of a source, and its end; nothing before the first reading."""
        text = "; ".join(sorted(faults - {""}))
        if text in (NOT_ASKED_YET, self._reported.get(source, "")):
            return
        if self._limit.admits(now=now):
            self._reported[source] = text
            _log.warning("interlock: %s: %s", source, text or "answers again")

    def _timed(self, stops: list[Stop]) -> tuple[Stop, ...]:
        """The stops with the wall time at which each began, for people."""
        keys = [(stop.slot, stop.by, stop.reason) for stop in stops]
        self._at = {key: self._at.get(key) or wall_time_utc() for key in keys}
        return tuple(
            msgspec.structs.replace(stop, at=self._at[key])
            for key, stop in zip(keys, stops, strict=True)
        )


def _interlock(by: str, config: AlertsConfig | AcceleratorsConfig, *, slot: str = "") -> Interlock:
    stale_s = _MISSED_READINGS * (config.period_s + config.timeout_s)
    return Interlock(by, order=config.order, stale_s=stale_s, quiet_s=config.quiet_s, slot=slot)


def _accelerators_probe(
    config: AcceleratorsConfig, clock: Clock
) -> Probe[AcceleratorsReading] | None:
    match config.source:
        case "dcgm-exporter":
            return dcgm_probe(config, clock=clock)
        case "nvml":
            return nvml_probe(Nvml().read, period_s=config.period_s, clock=clock)
        case _:
            return None
