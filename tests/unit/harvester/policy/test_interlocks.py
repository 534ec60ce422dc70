"""Verdicts on alerts and accelerators: what fires, what is unknown, and for how long it stops."""

import math
from typing import Any

import pytest

from harvester.contracts.accelerator import Accelerator
from harvester.contracts.wire.stops import StopOrder
from harvester.policy.interlocks import (
    AcceleratorLimits,
    AcceleratorsReading,
    AlertMatcher,
    AlertsReading,
    Interlock,
    Verdict,
    judge_accelerators,
    judge_alerts,
)

CHAT = AlertMatcher(name="Slow", labels={"service": "chat"})
RULES = frozenset({"Slow", "Watchdog"})
LIMITS = AcceleratorLimits(power_watts_max=700.0, temperature_celsius_max=85.0)
GOOD = Accelerator(uuid="GPU-1", power_watts=300.0, temperature_celsius=60.0, xid=0.0)


def firing(**labels: str) -> AlertsReading:
    return AlertsReading(firing=(labels,), rules=RULES)


@pytest.mark.parametrize(
    ("reading", "fires", "unknown"),
    [
        (firing(alertname="Slow", service="chat", severity="page"), "Slow", ""),
        (firing(alertname="Slow", service="search"), "", ""),
        (firing(alertname="Other", service="chat"), "", ""),
        (AlertsReading(rules=RULES), "", ""),
        (AlertsReading(rules=frozenset({"Slower"})), "", "Slow has no rule"),
        (AlertsReading(rules=None), "", ""),
        (AlertsReading(fault="HTTP 500"), "", "HTTP 500"),
    ],
)
def test_a_chosen_alert_fires_and_one_without_a_rule_is_unknown(
    reading: AlertsReading, fires: str, unknown: str
) -> None:
    verdict = judge_alerts(reading, [CHAT])
    assert fires in verdict.fires
    assert unknown in verdict.unknown
    assert (bool(verdict.fires), bool(verdict.unknown)) == (bool(fires), bool(unknown))


def test_silence_of_the_watchdog_means_that_nothing_is_known() -> None:
    assert judge_alerts(AlertsReading(rules=RULES), [CHAT], watchdog="Watchdog").unknown
    assert judge_alerts(firing(alertname="Watchdog"), [CHAT], watchdog="Watchdog") == Verdict()


@pytest.mark.parametrize(
    ("change", "fires", "unknown"),
    [
        ({}, "", ""),
        ({"power_watts": 701.0}, "power 701 W", ""),
        ({"temperature_celsius": 86.0}, "temperature 86", ""),
        ({"xid": 79.0}, "Xid 79", ""),
        ({"power_watts": math.nan}, "", "power"),
        ({"power_watts": math.inf}, "", "power"),
        ({"power_watts": None}, "", "power"),
        ({"temperature_celsius": None}, "", "temperature"),
        ({"xid": None}, "", "Xid"),
        ({"xid": math.nan}, "", "Xid"),
        ({"xid": None, "temperature_celsius": 99.0}, "temperature", ""),
    ],
)
def test_a_limit_fires_and_a_missing_number_is_unknown(
    change: dict[str, Any], fires: str, unknown: str
) -> None:
    import msgspec

    reading = AcceleratorsReading(accelerators=(msgspec.structs.replace(GOOD, **change),))
    verdict = judge_accelerators(reading, LIMITS)
    assert fires in verdict.fires
    assert unknown in verdict.unknown
    assert (bool(verdict.fires), bool(verdict.unknown)) == (bool(fires), bool(unknown))


def test_a_slot_is_judged_by_its_own_accelerators() -> None:
    hot = Accelerator(uuid="GPU-2", power_watts=300.0, temperature_celsius=99.0, xid=0.0)
    reading = AcceleratorsReading(accelerators=(GOOD, hot))
    assert judge_accelerators(reading, LIMITS, uuids=["GPU-1"]) == Verdict()
    assert judge_accelerators(reading, LIMITS, uuids=["GPU-2"]).fires
    assert judge_accelerators(reading, LIMITS, uuids=["GPU-1", "GPU-3"]).unknown
    assert judge_accelerators(AcceleratorsReading(), LIMITS).unknown


def test_a_value_without_a_limit_need_not_be_reported_and_an_ignored_xid_is_none() -> None:
    reading = AcceleratorsReading(accelerators=(Accelerator(uuid="GPU-1"),))
    assert judge_accelerators(reading, AcceleratorLimits(xid=False)) == Verdict()
    ignored = AcceleratorLimits(xids_ignored=frozenset({31}))
    sick = AcceleratorsReading(accelerators=(Accelerator(uuid="GPU-1", xid=31.0),))
    assert judge_accelerators(sick, ignored) == Verdict()


def lock() -> Interlock:
    return Interlock("alerts", order=StopOrder.DRAIN, stale_s=21.0, quiet_s=60.0)


def order_at(interlock: Interlock, now: float, verdict: Verdict, age_s: float = 0.0) -> str:
    stop = interlock.observe(verdict, taken_at_s=now - age_s, now=now)
    return "" if stop is None else f"{stop.order}: {stop.reason}"


def test_an_order_outlives_its_alert_by_the_quiet_time() -> None:
    interlock = lock()
    assert order_at(interlock, 0.0, Verdict()) == ""
    assert order_at(interlock, 1.0, Verdict(fires="hot")) == "drain: hot"
    assert order_at(interlock, 60.9, Verdict()) == "drain: hot"
    assert order_at(interlock, 61.0, Verdict()) == ""


def test_a_silence_after_an_alert_does_not_lift_its_order() -> None:
    interlock = lock()
    order_at(interlock, 1.0, Verdict(fires="hot"))
    assert order_at(interlock, 500.0, Verdict(unknown="HTTP 500")) == "drain: hot"
    assert order_at(interlock, 501.0, Verdict()) == ""


def test_an_unknown_state_holds_until_it_is_known() -> None:
    interlock = lock()
    assert order_at(interlock, 0.0, Verdict(unknown="HTTP 500")) == "hold: HTTP 500"
    assert order_at(interlock, 0.1, Verdict()) == ""


def test_a_reading_that_grew_old_is_none() -> None:
    interlock = lock()
    assert order_at(interlock, 100.0, Verdict(), age_s=21.0) == ""
    assert order_at(interlock, 100.0, Verdict(), age_s=21.1) == "hold: no reading in time"
    assert order_at(interlock, 100.0, Verdict(fires="hot"), age_s=math.inf).startswith("hold")


def test_the_first_finding_stays_the_reason() -> None:
    interlock = lock()
    order_at(interlock, 0.0, Verdict(fires="86 degrees"))
    assert order_at(interlock, 1.0, Verdict(fires="87 degrees")) == "drain: 86 degrees"
