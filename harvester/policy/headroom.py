"""Headroom of production: 1 less its recent latency over its SLO, from its pulses.

A pulse repeats its last latencies for as long as it is silent. Their age therefore counts from the
beat in which their number last rose.
"""

import math
from collections.abc import Iterable

from harvester.contracts.page.records import Pulse
from harvester.policy.sample import PulseReading
from harvester.policy.settings import SlotSettings

_OLD_S = 300.0
"""Latencies that are older say nothing."""
_SLOS = ("ttft", "itl")


class ProductionHeadroom:
    def __init__(self) -> None:
        self._pulses: list[Pulse] = []
        self._totals: dict[str, tuple[int, int]] = {}
        """Latencies ever appended, of each pulse and SLO."""
        self._sampled_ns: dict[str, int] = {}
        """Time of the newest latency of each SLO."""

    def observe(self, readings: Iterable[PulseReading], *, now_ns: int) -> None:
        self._pulses = []
        for reading in readings:
            if (pulse := reading.record) is None:
                continue
            self._pulses.append(pulse)
            totals = pulse.samples_total, pulse.itl_samples_total
            # A restarted agent finds latencies of unknown age.
            seen_totals = self._totals.get(reading.name, totals)
            for slo, total, seen in zip(_SLOS, totals, seen_totals, strict=True):
                if total > seen:
                    self._sampled_ns[slo] = now_ns
            self._totals[reading.name] = totals

    def least(
        self, settings: SlotSettings, *, now_ns: int
    ) -> tuple[float, float] | tuple[None, None]:
        """The smaller of the two SLOs' headrooms and its age in s; None where unknown."""
        found = self.of_slos(settings, now_ns=now_ns).values()
        return min((each for each in found if not math.isnan(each[0])), default=(None, None))

    def of_slos(self, settings: SlotSettings, *, now_ns: int) -> dict[str, tuple[float, float]]:
        """Headroom of each SLO, NaN where unknown, and its age in s."""
        limits_s = settings.ttft_slo_s, settings.itl_slo_s
        aged = {slo: self._latency(slo, now_ns) for slo in _SLOS}
        return {
            slo: (1 - latency_s / limit_s, age_s)
            for (slo, (latency_s, age_s)), limit_s in zip(aged.items(), limits_s, strict=True)
        }

    def latency_s(self, slo: str, *, now_ns: int) -> float | None:
        """P90 of production's recent latencies of an SLO, ttft or itl; None where unknown."""
        latency_s, _ = self._latency(slo, now_ns)
        return None if math.isnan(latency_s) else latency_s

    def _latency(self, slo: str, now_ns: int) -> tuple[float, float]:
        """P90 of the recent latencies, NaN beyond `_OLD_S`, and the age of the newest in s."""
        seen_ns = self._sampled_ns.get(slo)
        age_s = math.nan if seen_ns is None else (now_ns - seen_ns) / 1e9
        recent_s = [x for pulse in self._pulses for x in getattr(pulse, f"{slo}_s_recent")]
        return (_p90(recent_s) if age_s <= _OLD_S else math.nan), age_s


def _p90(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))] if values else math.nan
