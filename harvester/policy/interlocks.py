"""Interlocks: an operator's alerts, and the accelerators' own state, as orders to stop.

    fires -> its configured order, until `quiet_s` have passed without it
    not known (unreachable, late, wrong, too large, incomplete) -> hold, until it is known again

Readings are facts and carry the time at which they were taken; the verdicts are here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from harvester.contracts.accelerator import Accelerator
from harvester.contracts.wire.stops import Stop, StopOrder, StopSource, one_line

_NAME = "alertname"


class AlertsReading(msgspec.Struct, frozen=True, kw_only=True):
    firing: tuple[Mapping[str, str], ...] = ()
    """Labels of each alert that fires, its name as `alertname`."""
    rules: frozenset[str] | None = None
    """Names of the rules that the server evaluates without an error; None if it has no rules."""
    fault: str = ""
    taken_at_s: float = -math.inf


class AcceleratorsReading(msgspec.Struct, frozen=True, kw_only=True):
    accelerators: tuple[Accelerator, ...] = ()
    fault: str = ""
    taken_at_s: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertMatcher:
    """Alerts of this name, and with these labels."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def matches(self, labels: Mapping[str, str]) -> bool:
        required = {_NAME: self.name, **self.labels}
        return all(labels.get(name) == value for name, value in required.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorLimits:
    """A limit of None is not checked."""

    power_watts_max: float | None = None
    temperature_celsius_max: float | None = None
    xid: bool = True
    xids_ignored: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reason for which the condition fires, or is unknown; both "" if neither holds."""

    fires: str = ""
    unknown: str = ""


def judge_alerts(
    reading: AlertsReading, matchers: Sequence[AlertMatcher], *, watchdog: str = ""
) -> Verdict:
    """`watchdog`: an alert that always fires while the chain that raises alerts works."""
    if reading.fault:
        return Verdict(unknown=reading.fault)
    for matcher in matchers:
        if any(map(matcher.matches, reading.firing)):
            return Verdict(fires=f"alert {matcher.name} fires")
    if watchdog and all(labels.get(_NAME) != watchdog for labels in reading.firing):
        return Verdict(unknown=f"alert {watchdog} does not fire, as it always should")
    if reading.rules is not None:
        for matcher in matchers:
            if matcher.name not in reading.rules:
                return Verdict(unknown=f"alert {matcher.name} has no rule that is evaluated")
    return Verdict()


def judge_accelerators(
    reading: AcceleratorsReading, limits: AcceleratorLimits, *, uuids: Sequence[str] = ()
) -> Verdict:
    """`uuids`: the slot's; none are all that are reported."""
    if reading.fault:
        return Verdict(unknown=reading.fault)
    known = {each.uuid: each for each in reading.accelerators}
    if missing := sorted(set(uuids) - known.keys()):
        return Verdict(unknown=f"{missing[0]} is not reported")
    chosen = [known[uuid] for uuid in (sorted(uuids) or sorted(known))]
    if not chosen:
        return Verdict(unknown="no accelerator is reported")
    verdicts = [_judge(each, limits) for each in chosen]
    fires = next((each for each in verdicts if each.fires), None)
    return fires or next((each for each in verdicts if each.unknown), Verdict())


def _judge(each: Accelerator, limits: AcceleratorLimits) -> Verdict:
    values = (
        ("power", each.power_watts, limits.power_watts_max, "W"),
        ("temperature", each.temperature_celsius, limits.temperature_celsius_max, "degrees C"),
    )
    unknown = ""
    for what, value, limit, unit in values:
        if limit is not None and (value is None or not math.isfinite(value)):
            unknown = unknown or f"{each.uuid}: {what} is not reported"
        elif limit is not None and value is not None and value > limit:
            return Verdict(fires=f"{each.uuid}: {what} {value:.0f} {unit}, limit {limit:g}")
    if limits.xid:
        if each.xid is None or not math.isfinite(each.xid):
            unknown = unknown or f"{each.uuid}: Xid errors are not reported"
        elif each.xid and int(each.xid) not in limits.xids_ignored:
            return Verdict(fires=f"{each.uuid}: Xid {each.xid:.0f}")
    return Verdict(unknown=unknown)


class Interlock:
    """One interlock on the node, or on one slot of it."""

    def __init__(
        self, by: str, *, order: StopOrder, stale_s: float, quiet_s: float, slot: str = ""
    ) -> None:
        """A reading older than `stale_s` does not count."""
        self._by = by
        self._order = order
        self._stale_s = stale_s
        self._quiet_s = quiet_s
        self._slot = slot
        self._fired = ""
        self._fired_at_s = -math.inf
        self.unknown = "not judged yet"
        """Why the last verdict did not rest on a whole reading; "" if it did."""

    def observe(self, verdict: Verdict, *, taken_at_s: float, now: float) -> Stop | None:
        if now - taken_at_s > self._stale_s:
            verdict = Verdict(unknown="no reading in time")
        self.unknown = verdict.unknown
        if verdict.fires:
            # The first finding stays while it goes on: one stop, and one line in the log.
            self._fired = self._fired or verdict.fires
            self._fired_at_s = now
        elif now - self._fired_at_s >= self._quiet_s and not verdict.unknown:
            self._fired = ""
        if self._fired:
            return self._stop(self._order, self._fired)
        return self._stop(StopOrder.HOLD, verdict.unknown) if verdict.unknown else None

    def _stop(self, order: StopOrder, reason: str) -> Stop:
        return Stop(
            order=order,
            source=StopSource.INTERLOCK,
            slot=self._slot,
            by=self._by,
            reason=one_line(reason),
        )
