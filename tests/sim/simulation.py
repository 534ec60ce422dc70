"""The discrete-event core: a heap of actions in virtual time, and one seeded generator.

The same seed gives the same run on every machine and under every hash seed: actions at one time run
in the order in which they were scheduled, and nothing here iterates over a set.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.virtual_clock import VirtualClock

Action = Callable[[], None]


@dataclass(order=True, slots=True)
class Scheduled:
    """A pending action; `cancel` keeps it from running."""

    at_s: float
    sequence: int
    action: Action | None = field(compare=False)

    def cancel(self) -> None:
        self.action = None


class Simulation:
    def __init__(self, *, seed: int) -> None:
        self.clock = VirtualClock()
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.events = 0
        self._heap: list[Scheduled] = []
        self._sequence = 0

    @property
    def now(self) -> float:
        return self.clock.now_s

    def at(self, at_s: float, action: Action) -> Scheduled:
        """Raises ValueError for a time that has passed."""
        if at_s < self.now:
            raise ValueError(f"cannot schedule at {at_s}, it is {self.now}")
        self._sequence += 1
        scheduled = Scheduled(at_s, self._sequence, action)
        heapq.heappush(self._heap, scheduled)
        return scheduled

    def after(self, delay_s: float, action: Action) -> Scheduled:
        return self.at(self.now + delay_s, action)

    def run(self, *, until_s: float = float("inf")) -> None:
        """Runs until nothing is pending, or up to `until_s`, at which time the clock then
        stands."""
        while self._heap and self._heap[0].at_s <= until_s:
            scheduled = heapq.heappop(self._heap)
            if scheduled.action is None:
                continue
            self.clock.advance_to(scheduled.at_s)
            self.events += 1
            scheduled.action()
        if until_s != float("inf"):
            self.clock.advance_to(until_s)
