"""Judge of memory, descriptors and disk: flat by the age of a process. Pure.

The slope of a life's samples is Theil and Sen's, the median of the slopes of all pairs, with its
95 % interval: a step of a cache that fills once does not make it. A life is judged once it is old
enough to have warmed up.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import theilslopes

from tests.soak.parts import AGENT, DEDICATED, GATEWAY, GUEST, PRODUCTION
from tests.soak.records import DiskSample, MemorySample, SoakRecord, of_kind
from tests.soak.verdict import SoakVerdict

WARM_S = 600.0
"""Age from which a process counts."""
LEAST_S = 900.0
"""Time between the first and the last judged sample."""
_POINTS = 60
"""Means that a life's samples are joined to: neighbours are no independent evidence."""
_CONFIDENCE = 0.95
_MIB = 1 << 20
GROWTH_BYTES_PER_H = {
    AGENT: 4 * _MIB,
    GATEWAY: 16 * _MIB,
    PRODUCTION: 64 * _MIB,
    GUEST: 64 * _MIB,
    DEDICATED: 64 * _MIB,
}
"""Growth that a life is convicted of if the interval lies above it: a day's would be a twentieth of
the units' bounds for agent and gateway, and half an engine's size for engines."""
GROWTH_FDS_PER_H = 20.0
DISK_BYTES = {"agent state": 100 * _MIB, "gateway state": 100 * _MIB}
"""The journal's 64 MiB, and room for audit and state."""


def judge_memory(pieces: Sequence[Sequence[SoakRecord]], verdict: SoakVerdict) -> None:
    growth: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number, records in enumerate(pieces):
        lives: dict[tuple[str, int], list[MemorySample]] = defaultdict(list)
        for sample in of_kind(records, MemorySample):
            lives[sample.part, sample.pid].append(sample)
        for (part, pid), samples in sorted(lives.items()):
            warm = [sample for sample in samples if sample.age_s >= WARM_S]
            if not warm or warm[-1].age_s - warm[0].age_s < LEAST_S:
                continue
            ages_h = [sample.age_s / 3600 for sample in warm]
            life = {"hours": ages_h[-1] - ages_h[0], "last_mib": warm[-1].rss_bytes / _MIB}
            for what, values, bound in (
                ("memory", [s.rss_bytes for s in warm], GROWTH_BYTES_PER_H[part]),
                ("descriptors", [s.fds for s in warm], GROWTH_FDS_PER_H),
            ):
                slope, low, high = slope_per_h(ages_h, values)
                if low > bound:
                    name = f"{part} {pid} of piece {number}"
                    text = f"{name}: {what} by {slope:,.0f} [{low:,.0f}, {high:,.0f}] an hour"
                    verdict.note("memory_grows", text)
                if what == "memory":
                    life |= {"mib_per_h": slope / _MIB, "low": low / _MIB, "high": high / _MIB}
            growth[part].append({name: round(value, 2) for name, value in life.items()})
    verdict.figures["growth"] = dict(growth)
    verdict.figures["peak_mib"] = _peaks(pieces)
    disk: dict[str, int] = {}
    for records in pieces:
        for sample in of_kind(records, DiskSample):
            disk[sample.folder] = max(disk.get(sample.folder, 0), sample.bytes)
    for folder, most in sorted(disk.items()):
        if most > DISK_BYTES[folder]:
            verdict.note("unbounded", f"{folder}: {most / _MIB:.0f} MiB")
    verdict.figures["disk_mib"] = {name: round(most / _MIB, 1) for name, most in disk.items()}


def slope_per_h(ages_h: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The slope, and the ends of its interval."""
    groups = np.array_split(np.arange(len(values)), min(_POINTS, len(values)))
    x = [float(np.mean(np.take(ages_h, group))) for group in groups]
    y = [float(np.mean(np.take(values, group))) for group in groups]
    found: Any = theilslopes(y, x, alpha=_CONFIDENCE)
    return float(found[0]), float(found[2]), float(found[3])


def _peaks(pieces: Sequence[Sequence[SoakRecord]]) -> dict[str, float]:
    peaks: dict[str, int] = {}
    for records in pieces:
        for sample in of_kind(records, MemorySample):
            peaks[sample.part] = max(peaks.get(sample.part, 0), sample.rss_bytes)
    return {part: round(most / _MIB, 1) for part, most in sorted(peaks.items())}
