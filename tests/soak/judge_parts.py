"""Judge of production, of the ends of parts, and of what they leave. Pure."""

from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from harvester.contracts.audit import AuditKind
from tests.soak.intervals import any_meets, downs, strike_before
from tests.soak.parts import AGENT, GATEWAY, GUEST, PRODUCTION
from tests.soak.records import (
    Audited,
    FaultStruck,
    GrantSpan,
    Life,
    PieceEnded,
    ProductionAnswer,
    SoakRecord,
    of_kind,
)
from tests.soak.verdict import SoakVerdict

_OURS = (AGENT, GATEWAY, GUEST)
"""Parts that end with 0 if they are asked to."""
_KILL_S = 5.0
"""Between an agent's order to end a guest and its end."""


def judge_production(records: Sequence[SoakRecord], verdict: SoakVerdict) -> None:
    """No request fails while production itself was not struck."""
    excused = downs(records, PRODUCTION)
    answers = of_kind(records, ProductionAnswer)
    failed_struck = 0
    for answer in answers:
        if not answer.error:
            continue
        if any_meets(excused, answer.due_s, answer.ended_s):
            failed_struck += 1
        else:
            verdict.note("production_failed", f"due at {answer.due_s:.1f}: {answer.error}")
    _count(verdict, "production_requests", len(answers))
    _count(verdict, "production_failed_while_struck", failed_struck)


def judge_ends(records: Sequence[SoakRecord], verdict: SoakVerdict) -> None:
    """No part ends unless the harness, or an agent that may, has ended it."""
    kills_s = [
        each.event.t_s
        for each in of_kind(records, Audited)
        if each.event.event == AuditKind.GUEST_KILLED
    ]
    for life in of_kind(records, Life):
        name = f"{life.part} {life.pid} at {life.until_s:.1f}"
        if life.changed:
            verdict.note("production_touched", f"{name}: {', '.join(life.changed)}")
        if life.asked and life.status and life.part in _OURS:
            verdict.note("parts_ended", f"{name} with {life.status}, where it was asked to end")
        if life.asked or life.status is None or strike_before(records, life) is not None:
            continue
        if life.part == PRODUCTION:
            verdict.note("production_ended", f"{name} with {life.status}")
        elif life.part != GUEST or not any(0 <= life.until_s - at_s <= _KILL_S for at_s in kills_s):
            verdict.note("parts_ended", f"{name} with {life.status}")
    for fault in of_kind(records, FaultStruck):
        if fault.failed:
            verdict.note("fault_demands", f"{fault.name} at {fault.since_s:.1f}: {fault.failed}")
    for end in of_kind(records, PieceEnded):
        for left in end.left:
            verdict.note("left_behind", left)


def latencies(pieces: Sequence[Sequence[SoakRecord]]) -> dict[str, Any]:
    """Production's latencies while the slot was lent and while it was not: a figure, no verdict."""
    sorted_answers: dict[str, list[ProductionAnswer]] = {"lent": [], "not_lent": []}
    for records in pieces:
        spans = [(s.first_s, s.expires_s) for s in of_kind(records, GrantSpan) if _is_open(s)]
        for answer in of_kind(records, ProductionAnswer):
            if not answer.error:
                lent = any(first <= answer.due_s <= last for first, last in spans)
                sorted_answers["lent" if lent else "not_lent"].append(answer)
    return {
        name: {
            "requests": len(answers),
            "ttft_ms": _percentiles([each.ttft_s or 0.0 for each in answers]),
            "itl_ms": _percentiles([itl_s for each in answers for itl_s in each.itl_s]),
        }
        for name, answers in sorted_answers.items()
    }


def _is_open(span: GrantSpan) -> bool:
    return span.mode != "closed"


def _percentiles(values_s: list[float]) -> dict[str, float]:
    if len(values_s) < 100:
        return {}
    cuts = quantiles(values_s, n=100)
    return {"p50": round(1e3 * cuts[49], 1), "p99": round(1e3 * cuts[98], 1)}


def _count(verdict: SoakVerdict, name: str, by: int) -> None:
    verdict.figures[name] = verdict.figures.get(name, 0) + by
