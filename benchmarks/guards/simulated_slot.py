"""One slot's guards over simulated requests, from the first one until harvesting is stopped."""

import math
import random
from dataclasses import dataclass
from functools import partial
from operator import le
from typing import Any

from benchmarks.guards.services import Service, Stalls, either
from harvester.policy.guards import GuardMemory, Guards
from harvester.policy.production import Latencies, ProductionView
from harvester.policy.settings import ProofSettings, SlotSettings

_BEAT_S = 0.5
_BEGIN_S = 1000.0
_HOUR_S = 3600.0
_DECODE_S = 3.2
"""Time in which a request's tokens come."""
_TOKENS_SEEN = 4
_TOKENS = 200
"""Tokens of a request, and how many times between tokens the agent sees in a beat: a pulse holds
the last ones."""


@dataclass
class _Stalling:
    """Stalls of one origin; none begins while it is held off."""

    stalls: Stalls | None
    ends_s: float = -math.inf

    def observe(self, rng: random.Random, *, may_begin: bool, now: float) -> None:
        if self.stalls and may_begin and rng.random() < _BEAT_S / self.stalls.every_s:
            self.ends_s = max(self.ends_s, now + self.stalls.length_s)

    def wait_s(self, now: float) -> float:
        return max(0.0, self.ends_s - now)


def run(service: Service, seed: int) -> dict[str, Any]:
    """The guard that stopped harvesting first, and when: minutes from where harm begins; how often
    the level guard acted until then, and what that cost."""
    rng = random.Random(seed)
    settings = SlotSettings(ttft_slo_s=service.ttft_slo_s, proof=ProofSettings(seed=seed))
    guards = Guards(settings, GuardMemory())
    own, guest = _Stalling(service.own_stalls), _Stalling(service.guest_stalls)
    coming: list[tuple[float, float]] = []
    now, load, withheld_s, stepped_at_s = _BEGIN_S, 1.0, 0.0, -math.inf
    harmed_share = free_s = 0.0
    level, halvings, lost_s, halved_at_s = 1.0, 0, 0.0, math.inf
    beat_tokens = round(service.requests_per_s * _BEAT_S * _TOKENS)
    harm_at_s = _BEGIN_S + service.harm_begins_h * _HOUR_S
    stopped_by = ""
    while now < _BEGIN_S + service.days * 24 * _HOUR_S and not stopped_by:
        now += _BEAT_S
        withheld = guards.proof.withheld(now=now)
        withheld_s += _BEAT_S * withheld
        if not withheld:
            stepped_at_s = now
        harmed = not withheld and now >= harm_at_s
        own.observe(rng, may_begin=True, now=now)
        guest.observe(rng, may_begin=harmed, now=now)
        stall_s = max(own.wait_s(now), guest.wait_s(now))
        load = load**0.99 * rng.lognormvariate(0.0, 0.14 * service.load_sigma)
        factor = load * service.overloads.at((now - _BEGIN_S) / _HOUR_S)
        ttft = service.beside if harmed else service.alone
        if service.fades_s:
            harmed_share += (harmed - harmed_share) * _BEAT_S / service.fades_s
            ttft = either(harmed_share, service.beside, service.alone)
        for _ in range(int(service.requests_per_s * _BEAT_S + rng.random())):
            latency_s = stall_s + factor * ttft(rng)
            if service.queue_busy:
                free_s = max(free_s, now)
                latency_s += free_s - now
                free_s += rng.expovariate(service.requests_per_s / service.queue_busy)
            coming.append((now + latency_s, latency_s))
        reported = tuple(latency_s for end_s, latency_s in coming if end_s <= now)
        coming = [each for each in coming if each[0] > now]
        itl = service.itl_beside if harmed else service.itl_alone
        tokens_s = () if stall_s else tuple(factor * itl(rng) for _ in range(_TOKENS_SEEN))
        itl_reported = Latencies(seen_s=tokens_s, total=beat_tokens if tokens_s else 0)
        production = ProductionView(
            condition=None,
            ttft=Latencies(seen_s=reported, total=len(reported)),
            itl=itl_reported,
            itl_late=itl_reported.above(settings.itl_slo_s),
            decoded=service.requests_per_s * _DECODE_S,
        )
        beside_step = partial(le, now - stepped_at_s)
        overspent = guards.account(production, beside_step=beside_step, now=now)
        before, level = level, guards.step_level.ratio
        lost_s += _BEAT_S * (1.0 - level) * (not withheld)
        if level < before:
            halvings += 1
            if now >= harm_at_s:
                halved_at_s = min(halved_at_s, now)
        guards.prove(production, eligible=True, leased=True, now=now)
        if guards.proof.harmful:
            stopped_by = "proof"
        elif overspent:
            stopped_by = guards.budget.state.guard
    return {
        "stopped_by": stopped_by,
        "after_min": round((now - harm_at_s) / 60.0, 1),
        "days": (now - _BEGIN_S) / 86_400.0,
        "withheld_share": round(withheld_s / (now - _BEGIN_S), 4),
        "halvings": halvings,
        "halved_after_s": round(halved_at_s - harm_at_s, 1) if halved_at_s < math.inf else None,
        "tokens_lost_share": round(lost_s / max(_BEAT_S, now - _BEGIN_S - withheld_s), 5),
    }
