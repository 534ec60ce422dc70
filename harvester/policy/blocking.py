"""Observed share of a guest step that production waited for. For people; no decision uses it.

    share = (time between two tokens - predicted time of production alone) / guest's last step

A token that overlapped only the end of a guest step says little, so the largest shares count: their
P99. Even the P99 is an observation and no bound; the share that a backend promises is configured.
"""

from collections.abc import Iterable

import msgspec

_BUCKETS = 20
_MINIMUM = 200
"""Fewer tokens beside a stepping guest give no P99."""
_REMEMBERED = 2000.0
_QUANTILE = 0.99


class Blocking(msgspec.Struct, kw_only=True):
    counts: list[float] = []
    """Histogram of shares in buckets of 0.05; older counts decay."""

    def __post_init__(self) -> None:
        if len(self.counts) != _BUCKETS:
            self.counts = [0.0] * _BUCKETS

    def observe(self, itl_s: Iterable[float], *, alone_s: float, guest_step_s: float) -> None:
        """Add production's inter-token times (s) that ended beside a stepping guest."""
        if guest_step_s <= 0.0 or alone_s <= 0.0:
            return
        for one_s in itl_s:
            share = min(1.0, max(0.0, one_s - alone_s) / guest_step_s)
            self.counts[min(_BUCKETS - 1, int(share * _BUCKETS))] += 1.0
        total = sum(self.counts)
        if total > _REMEMBERED:
            self.counts = [count * _REMEMBERED / total for count in self.counts]

    @property
    def ratio(self) -> float | None:
        """The upper edge of the bucket that holds the P99; None below 200 tokens."""
        total = sum(self.counts)
        if total < _MINIMUM:
            return None
        seen = 0.0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= _QUANTILE * total:
                return (bucket + 1) / _BUCKETS
        return 1.0
