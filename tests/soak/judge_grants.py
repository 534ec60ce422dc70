"""Judge of grants: leases, orders to stop, production's death, and recovery from faults. Pure."""

from collections.abc import Sequence
from itertools import pairwise

from harvester.contracts.audit import AuditKind
from tests.soak.intervals import Interval, any_meets, downs
from tests.soak.parts import PRODUCTION
from tests.soak.records import (
    Audited,
    FaultStruck,
    GrantSpan,
    LendingSample,
    PieceEnded,
    SoakRecord,
    Stopped,
    of_kind,
)
from tests.soak.verdict import SoakVerdict

_BEAT_S = 1.0
"""An order is in force within a beat (0.1 s), a grant is stamped at its sample, and the machine is
shared: the bound on a grant behind an order or a lease's end."""
_DEAD_S = 1.5
"""Production's last pulse is believed for 0.5 s."""
_AUDIT_S = 30.0
"""Events of a full disk that the audit may lack."""
CALM_S = 400.0
"""Longest time without a token of the guest where no fault asks for another: proof slices and
cool-downs are shorter."""
FOREIGN_RATIO = 0.2
"""Time in which other programs take more of the machine counts for no recovery."""


def judge_grants(records: Sequence[SoakRecord], verdict: SoakVerdict) -> None:
    spans = of_kind(records, GrantSpan)
    spans.sort(key=lambda span: span.first_s)
    for before, span in pairwise(spans):
        if span.epoch < before.epoch:
            verdict.note("unleased_grants", f"epoch {span.epoch} behind {before.epoch}")
    opened = [span for span in spans if span.mode != "closed"]
    if of_kind(records, PieceEnded):  # The audit is copied at the end; a killed piece has none.
        _leases(records, opened, verdict)
    _stops(records, opened, verdict)
    for dead in downs(records, PRODUCTION):
        # The interval's ends have room for the harness's own notes, to the wrong sides here.
        since_s, until_s = dead.since_s + 2.0 + _DEAD_S, dead.until_s - 2.0
        for span in opened:
            if span.first_s < until_s and span.last_s > since_s and _reaches(span, since_s):
                verdict.note("stale_grants", f"{_named(span)}: production was dead")
    figures = verdict.figures
    open_s = sum(span.last_s - span.first_s for span in opened)
    figures["open_s"] = round(figures.get("open_s", 0.0) + open_s, 1)


def _reaches(span: GrantSpan, since_s: float) -> bool:
    return span.last_s > since_s or span.first_s > since_s


def _leases(
    records: Sequence[SoakRecord], opened: Sequence[GrantSpan], verdict: SoakVerdict
) -> None:
    events = [each.event for each in of_kind(records, Audited)]
    given = {e.epoch: e.t_s for e in events if e.event == AuditKind.LEASE_GRANTED}
    ended = {e.epoch: e.t_s for e in events if e.event == AuditKind.LEASE_ENDED}
    full = [
        Interval(fault.since_s - _AUDIT_S, fault.until_s + _AUDIT_S)
        for fault in of_kind(records, FaultStruck)
        if fault.name == "disk full" and not fault.skipped
    ]
    for span in opened:
        if any_meets(full, span.first_s, span.last_s):
            continue
        if span.epoch not in given or given[span.epoch] > span.first_s + _BEAT_S:
            verdict.note("unleased_grants", f"{_named(span)}: no lease")
        elif ended.get(span.epoch, span.last_s) + _BEAT_S < span.last_s:
            verdict.note("unleased_grants", f"{_named(span)}: its lease had ended")


def _stops(
    records: Sequence[SoakRecord], opened: Sequence[GrantSpan], verdict: SoakVerdict
) -> None:
    grants_s = [
        each.event.t_s
        for each in of_kind(records, Audited)
        if each.event.event == AuditKind.LEASE_GRANTED
    ]
    for stop in of_kind(records, Stopped):
        since_s = stop.since_s + _BEAT_S
        name = f"{stop.order} by {stop.source} at {stop.since_s:.1f}"
        if any(since_s < at_s < stop.until_s for at_s in grants_s):
            verdict.note("stopped_grants", f"{name}: a lease began")
        if not stop.grants_close:
            continue
        for span in opened:
            if span.first_s < stop.until_s and span.last_s > since_s:
                verdict.note("stopped_grants", f"{name}: {_named(span)}")


def _named(span: GrantSpan) -> str:
    return f"epoch {span.epoch} open from {span.first_s:.1f} to {span.last_s:.1f}"


def judge_recovery(records: Sequence[SoakRecord], verdict: SoakVerdict) -> None:
    """The guest's tokens grow again after each fault, or the last of several that follow."""
    struck = [fault for fault in of_kind(records, FaultStruck) if not fault.skipped]
    struck.sort(key=lambda fault: fault.until_s)
    left_s, cause, last, tokens = CALM_S, "the begin", 0.0, None
    waits: list[float] = []
    since_s = 0.0
    for sample in of_kind(records, LendingSample):
        while struck and struck[0].until_s <= sample.at_s:
            fault = struck.pop(0)
            left_s, cause = max(fault.recover_s, left_s if since_s else 0.0), fault.name
            since_s = since_s or fault.until_s
        if sample.tokens_total and sample.tokens_total != tokens:
            if since_s:
                waits.append(sample.at_s - since_s)
            left_s, cause, since_s = CALM_S, "a calm", 0.0
        elif last and sample.foreign_ratio <= FOREIGN_RATIO:
            left_s -= sample.at_s - last
            if left_s <= 0:
                verdict.note("not_recovered", f"{cause}: no token until {sample.at_s:.1f}")
                left_s, since_s = CALM_S, 0.0
        tokens, last = sample.tokens_total, sample.at_s
    figures = verdict.figures
    figures["faults"] = figures.get("faults", 0) + len(of_kind(records, FaultStruck))
    figures["recoveries_s"] = sorted([*figures.get("recoveries_s", []), *waits])
