"""Spread of a few repeated measurements, which several parts report."""

from collections.abc import Sequence
from statistics import median


def spread(found: Sequence[float]) -> dict[str, float]:
    if not found:
        return {"count": 0}
    return {"median": median(found), "low": min(found), "high": max(found), "count": len(found)}
