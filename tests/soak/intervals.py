"""Times in which a part was down or frozen by the harness, from its own records. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from signal import Signals

from tests.soak.records import Life, SoakRecord, Struck, of_kind

_NOTED_S = 2.0
"""Between the end of a process, or its first answer, and the harness's note of it."""
_ENDS_S = 60.0
"""A part ends so soon after one of its processes was ended."""


@dataclass(frozen=True, slots=True)
class Interval:
    since_s: float
    until_s: float

    def meets(self, since_s: float, until_s: float) -> bool:
        return self.since_s < until_s and since_s < self.until_s


def any_meets(intervals: Iterable[Interval], since_s: float, until_s: float) -> bool:
    return any(each.meets(since_s, until_s) for each in intervals)


def strike_before(records: Iterable[SoakRecord], life: Life) -> float | None:
    """When the harness struck the process whose end this is; None if it did not."""
    struck_s = [
        each.at_s
        for each in of_kind(records, Struck)
        if each.part == life.part
        and each.signal in (Signals.SIGKILL, Signals.SIGTERM)
        and life.since_s <= each.at_s <= life.until_s <= each.at_s + _ENDS_S
    ]
    return min(struck_s, default=None)


def downs(records: Iterable[SoakRecord], part: str) -> list[Interval]:
    """From a strike that ended the part's process until the next one answers."""
    records = list(records)
    lives = [life for life in of_kind(records, Life) if life.part == part]
    found = []
    for life in lives:
        struck_s = strike_before(records, life)
        if life.asked or life.status is None or struck_s is None:
            continue
        after = [each.ready_s for each in lives if each.ready_s and each.ready_s > life.until_s]
        found.append(Interval(struck_s - _NOTED_S, min(after, default=inf) + _NOTED_S))
    return found


def freezes(records: Iterable[SoakRecord], part: str) -> list[Interval]:
    """From SIGSTOP to SIGCONT."""
    struck = [each for each in of_kind(records, Struck) if each.part == part]
    begins = sorted({each.at_s for each in struck if each.signal == Signals.SIGSTOP})
    ends = sorted({each.at_s for each in struck if each.signal == Signals.SIGCONT})
    return [
        Interval(begin, min((end for end in ends if end >= begin), default=inf)) for begin in begins
    ]
