"""Guest steps that one production request meets before its first token.

A step meets a request if it is under way when the client sends the request, or begins before the
client has its first token. The time between due and sent is left out: the client waits for a core
then, and no guest can know of the request. Steps are read from the guest's page, which has the
latest ones.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.testbed.production_request import ProductionRequest
from harvester.contracts.page import Guest

_LOOK_S = 0.01
"""Less than the guest leaves between two pages."""


@dataclass(slots=True)
class StepWatch:
    guest: Callable[[], Guest]
    steps_s: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each seen step, by CLOCK_MONOTONIC, in s; in the order of their ends."""
    missed: int = 0
    """Steps that the page no longer had when it was looked at."""

    async def run(self) -> None:
        """Until it is cancelled."""
        before = self.guest().steps_finished
        while True:
            await asyncio.sleep(_LOOK_S)
            before = self.look(before)

    def look(self, before: int) -> int:
        """Takes the steps that ended since `before` steps had; returns how many have by now."""
        guest = self.guest()
        ended = guest.steps_finished - before
        if ended > 0:
            seen = guest.latest_steps_ns[-ended:]
            self.steps_s += [(start_ns * 1e-9, end_ns * 1e-9) for start_ns, end_ns in seen]
            self.missed += ended - len(seen)
        return guest.steps_finished


def blocking_histogram(
    requests: Iterable[ProductionRequest], steps_s: Sequence[tuple[float, float]]
) -> dict[int, int]:
    """Requests by the number of guest steps that they met; requests without a first token, or of a
    client that noted no time of sending, are left out. `steps_s` is in the order of time."""
    starts, ends = [start_s for start_s, _ in steps_s], [end_s for _, end_s in steps_s]
    counts: Counter[int] = Counter()
    for request in requests:
        if request.ttft_s is not None and request.sent_s is not None:
            begun = bisect_left(starts, request.due_s + request.ttft_s)
            counts[max(0, begun - bisect_right(ends, request.sent_s))] += 1
    return dict(sorted(counts.items()))


def percentile_of(histogram: dict[int, int], percent: float) -> int | None:
    """Least number that at least `percent` of the requests do not exceed; None without any."""
    target, seen = sum(histogram.values()) * percent / 100.0, 0
    for number, count in sorted(histogram.items()):
        seen += count
        if seen >= target:
            return number
    return None
