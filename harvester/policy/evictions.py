"""Evictions of the last hour on one slot, and whether there are too many to lend on.

A slot whose guest is evicted again and again earns little and costs production each time. It is
held until fewer evictions are in the last hour. Counts come from the guest's page.
"""

import msgspec

from harvester.contracts.served import HOUR_S

_BIN_S = 60.0


class EvictionState(msgspec.Struct, kw_only=True):
    bins: list[tuple[float, int]] = []
    """Beginning of each minute with evictions, and how many; the newest last."""
    total: int | None = None
    """The guest's own count when it was read last."""


class EvictionWindow:
    def __init__(self, most: int, state: EvictionState | None = None) -> None:
        """`most`: evictions an hour; 0 counts only."""
        self._most = most
        self.state = EvictionState() if state is None else state

    def observe(self, total: int | None, *, now: float) -> None:
        """`total`: the guest's count; None if unknown. A smaller count belongs to a new guest."""
        state = self.state
        state.bins = [each for each in state.bins if now - each[0] < HOUR_S]
        if total is None:
            return
        before = total if state.total is None else min(state.total, total)
        state.total = total
        if not (new := total - before):
            return
        if state.bins and now - state.bins[-1][0] < _BIN_S:
            at_s, count = state.bins.pop()
            state.bins.append((at_s, count + new))
        else:
            state.bins.append((now, new))

    @property
    def count(self) -> int:
        return sum(count for _, count in self.state.bins)

    @property
    def exceeded(self) -> bool:
        return 0 < self._most < self.count


def moved(state: EvictionState, by_s: float) -> EvictionState:
    return EvictionState(bins=[(at_s + by_s, count) for at_s, count in state.bins])
