"""One slot's guards over simulated production, from its first request until they stop the guest."""

import math
import random
from functools import partial
from operator import le
from typing import Any, Protocol

from benchmarks.guards.random_requests import RandomRequests
from benchmarks.guards.services import Service
from benchmarks.guards.traced_engine import TracedEngine, TracedService
from harvester.policy.durable import GuardMemory
from harvester.policy.guards import Guards
from harvester.policy.production import ProductionView
from harvester.policy.settings import ProofSettings, SlotSettings

_BEAT_S = 0.5
_BEGIN_S = 1000.0
_HOUR_S = 3600.0
_HOURS = 4
"""First hours of a run whose withheld time is counted by itself."""


class Production(Protocol):
    def beat(self, *, harmed: bool, begun_s: float, now: float) -> ProductionView:
        """The view of production in the beat that ends at `now`; `harmed`: beside a guest that does
        harm."""
        ...


class _Traced:
    def __init__(self, service: TracedService, *, seed: int) -> None:
        offset_s = random.Random(seed).random() * service.trace.duration_s / service.speed_ratio
        self._engine = TracedEngine(service.trace, service.speed_ratio, offset_s)
        self._service = service

    def beat(self, *, harmed: bool, begun_s: float, now: float) -> ProductionView:
        slower_ratio = self._service.slower_ratio if harmed else 1.0
        itl_slo_s = self._service.slo_s[1]
        return self._engine.beat(
            slower_ratio=slower_ratio, itl_slo_s=itl_slo_s, until_s=now - begun_s
        )


def _made(service: Service | TracedService, seed: int) -> tuple[SlotSettings, Production]:
    proof = ProofSettings(seed=seed)
    if isinstance(service, TracedService):
        ttft_slo_s, itl_slo_s = service.slo_s
        settings = SlotSettings(ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s, proof=proof)
        return settings, _Traced(service, seed=seed)
    settings = SlotSettings(ttft_slo_s=service.ttft_slo_s, proof=proof)
    requests = RandomRequests(service, seed=seed, itl_slo_s=settings.itl_slo_s, beat_s=_BEAT_S)
    return settings, requests


def run(service: Service | TracedService, seed: int) -> dict[str, Any]:
    """The guard that stopped harvesting first, and when: minutes from where harm begins; how often
    the level guard acted until then, and what that cost; the share of time withheld, in all and in
    each of the first hours."""
    settings, production = _made(service, seed)
    guards = Guards(settings, GuardMemory())
    now, withheld_s, stepped_at_s = _BEGIN_S, 0.0, -math.inf
    withheld_hours = [0.0] * _HOURS
    level, halvings, lost_s, halved_at_s = 1.0, 0, 0.0, math.inf
    harm_at_s = _BEGIN_S + service.harm_begins_h * _HOUR_S
    stopped_by = ""
    while now < _BEGIN_S + service.days * 24 * _HOUR_S and not stopped_by:
        hour = int((now - _BEGIN_S) // _HOUR_S)
        now += _BEAT_S
        withheld = guards.proof.withheld(now=now)
        withheld_s += _BEAT_S * withheld
        if hour < _HOURS:
            withheld_hours[hour] += _BEAT_S * withheld
        if not withheld:
            stepped_at_s = now
        harmed = not withheld and now >= harm_at_s
        view = production.beat(harmed=harmed, begun_s=_BEGIN_S, now=now)
        beside_step = partial(le, now - stepped_at_s)
        overspent = guards.account(view, beside_step=beside_step, now=now)
        before, level = level, guards.step_level.ratio
        lost_s += _BEAT_S * (1.0 - level) * (not withheld)
        if level < before:
            halvings += 1
            if now >= harm_at_s:
                halved_at_s = min(halved_at_s, now)
        guards.prove(view, eligible=True, leased=True, now=now)
        if guards.proof.harmful:
            stopped_by = "proof"
        elif overspent:
            stopped_by = guards.budget.state.guard
    return {
        "stopped_by": stopped_by,
        "after_min": round((now - harm_at_s) / 60.0, 1),
        "days": (now - _BEGIN_S) / 86_400.0,
        "withheld_share": round(withheld_s / (now - _BEGIN_S), 4),
        "withheld_hours": [round(each / _HOUR_S, 3) for each in withheld_hours],
        "halvings": halvings,
        "halved_after_s": round(halved_at_s - harm_at_s, 1) if halved_at_s < math.inf else None,
        "tokens_lost_share": round(lost_s / max(_BEAT_S, now - _BEGIN_S - withheld_s), 5),
    }
