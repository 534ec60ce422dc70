"""Production whose requests are independent of each other, as the guards see it beat by beat."""

import math
import random
from dataclasses import dataclass

from benchmarks.guards.services import Service, Stalls, either
from harvester.policy.production import Latencies, ProductionView

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

    def observe(self, rng: random.Random, *, may_begin: bool, beat_s: float, now: float) -> None:
        if self.stalls and may_begin and rng.random() < beat_s / self.stalls.every_s:
            self.ends_s = max(self.ends_s, now + self.stalls.length_s)

    def wait_s(self, now: float) -> float:
        return max(0.0, self.ends_s - now)


class RandomRequests:
    def __init__(self, service: Service, *, seed: int, itl_slo_s: float, beat_s: float) -> None:
        self._service, self._rng = service, random.Random(seed)
        self._itl_slo_s, self._beat_s = itl_slo_s, beat_s
        self._own, self._guest = _Stalling(service.own_stalls), _Stalling(service.guest_stalls)
        self._coming: list[tuple[float, float]] = []
        self._load, self._harmed_share, self._free_s = 1.0, 0.0, 0.0
        self._beat_tokens = round(service.requests_per_s * beat_s * _TOKENS)

    def beat(self, *, harmed: bool, begun_s: float, now: float) -> ProductionView:
        """The view of production in the beat that ends at `now`; `harmed`: beside a guest that does
        harm. `begun_s`: where its overloads are counted from."""
        service, rng = self._service, self._rng
        self._own.observe(rng, may_begin=True, beat_s=self._beat_s, now=now)
        self._guest.observe(rng, may_begin=harmed, beat_s=self._beat_s, now=now)
        stall_s = max(self._own.wait_s(now), self._guest.wait_s(now))
        self._load = self._load**0.99 * rng.lognormvariate(0.0, 0.14 * service.load_sigma)
        factor = self._load * service.overloads.at((now - begun_s) / 3600.0)
        ttft = service.beside if harmed else service.alone
        if service.fades_s:
            self._harmed_share += (harmed - self._harmed_share) * self._beat_s / service.fades_s
            ttft = either(self._harmed_share, service.beside, service.alone)
        for _ in range(int(service.requests_per_s * self._beat_s + rng.random())):
            latency_s = stall_s + factor * ttft(rng)
            if service.queue_busy:
                self._free_s = max(self._free_s, now)
                latency_s += self._free_s - now
                self._free_s += rng.expovariate(service.requests_per_s / service.queue_busy)
            self._coming.append((now + latency_s, latency_s))
        reported = tuple(latency_s for end_s, latency_s in self._coming if end_s <= now)
        self._coming = [each for each in self._coming if each[0] > now]
        itl = service.itl_beside if harmed else service.itl_alone
        tokens_s = () if stall_s else tuple(factor * itl(rng) for _ in range(_TOKENS_SEEN))
        itl_reported = Latencies(seen_s=tokens_s, total=self._beat_tokens if tokens_s else 0)
        return ProductionView(
            condition=None,
            ttft=Latencies(seen_s=reported, total=len(reported)),
            itl=itl_reported,
            itl_late=itl_reported.above(self._itl_slo_s),
            decoded=service.requests_per_s * _DECODE_S,
        )
