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


class BlockingState(msgspec.Struct, kw_only=True):
    counts: list[float] = []
    """Histogram of shares in buckets of 0.05; older counts decay."""


class Blocking:
    def __init__(self, state: BlockingState | None = None) -> None:
        self.state = state or BlockingState()
        if len(self.state.counts) != _BUCKETS:
            self.state.counts = [0.0] * _BUCKETS

    def observe(self, itl_s: Iterable[float], *, alone_s: float, guest_step_s: float) -> None:
        """Add production's inter-token times (s) that ended beside a stepping guest."""
        if guest_step_s <= 0.0 or alone_s <= 0.0:
            return
        counts = self.state.counts
        for one_s in itl_s:
            share = min(1.0, max(0.0, one_s - alone_s) / guest_step_s)
            counts[min(_BUCKETS - 1, int(share * _BUCKETS))] += 1.0
        total = sum(counts)
        if total > _REMEMBERED:
            self.state.counts = [count * _REMEMBERED / total for count in counts]

    @property
    def ratio(self) -> float | None:
        """The upper edge of the bucket that holds the P99; None below 200 tokens."""
        counts = self.state.counts
        total = sum(counts)
        if total < _MINIMUM:
            return None
        seen = 0.0
        for bucket, count in enumerate(counts):
            seen += count
            if seen >= _QUANTILE * total:
                return (bucket + 1) / _BUCKETS
        return 1.0
