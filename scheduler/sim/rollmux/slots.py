"""Slots of serving accelerators: their headroom second by second, and their jobs.

A slot serves one job at a time and gives it production's remainder: its headroom, from 0 to 1 of an
accelerator. The allotment stands in for a gateway that gives leases by demand.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import floor


class HeadroomRecord:
    """A slot's headroom over time, repeated from its start when it ends."""

    def __init__(self, given_s: Iterable[float]) -> None:
        """`given_s` are the accelerator seconds given by the end of each second, from 0 on."""
        self._given_s = [float(each) for each in given_s]
        self._seconds = len(self._given_s) - 1

    def given_until(self, t_s: float) -> float:
        """Accelerator seconds that a slot gave from 0 to `t_s`."""
        second = floor(t_s)
        before = self._by_second(second)
        return before + (t_s - second) * (self._by_second(second + 1) - before)

    def given(self, from_s: float, until_s: float) -> float:
        return self.given_until(until_s) - self.given_until(from_s)

    def takes_s(self, left_s: float, *, from_s: float, own: float, leased: float) -> float:
        """Seconds until `left_s` are done at speed `own` plus `leased` times the headroom; may be
        inf."""
        if left_s <= 0.0:
            return 0.0
        a_lap_s = own * self._seconds + leased * self._given_s[-1]
        if a_lap_s <= 0.0:
            return float("inf")
        gave_s, first = self.given_until(from_s), floor(from_s)

        def done_s(second: int) -> float:
            return own * (second - from_s) + leased * (self._by_second(second) - gave_s)

        most_s = self._seconds * (1.0 + left_s / a_lap_s)
        if own > 0.0:
            most_s = min(most_s, left_s / own)
        last = first + 2 + int(most_s)
        end = bisect_left(range(first + 1, last), left_s, key=done_s) + first + 1
        at_s = max(from_s, end - 1.0)
        did_s = done_s(end - 1) if end - 1 > from_s else 0.0
        speed = own + leased * (self._by_second(end) - self._by_second(end - 1))
        return at_s - from_s + (left_s - did_s) / speed

    def _by_second(self, second: int) -> float:
        laps, within = divmod(second, self._seconds)
        return laps * self._given_s[-1] + self._given_s[within]


def allotted(slots: int, *, tails: Sequence[int], bulks: Sequence[int]) -> tuple[int, ...]:
    """Slots of each tail, by how many it needs, then of each bulk: the rest, by its nodes."""
    found = []
    for needed in tails:
        found.append(min(slots, needed))
        slots -= found[-1]
    nodes = sum(bulks)
    return (*found, *(slots * each // nodes for each in bulks))
