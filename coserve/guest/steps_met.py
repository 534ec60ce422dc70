"""How many of the guest's steps a request of production met: under way between its arrival and its
first token. Seen from production's counters at the start and end of each step; first tokens are
taken to come in order of arrival. Reads no clock and no page.
"""

from collections import deque
from dataclasses import dataclass, field

MOST_MET = 4
"""The last of the counts holds requests that met as many steps or more."""


@dataclass(slots=True)
class StepsMet:
    counts: list[int] = field(default_factory=lambda: [0] * (MOST_MET + 1))
    """Requests by the number of steps that they met: 0, 1, 2, ..."""
    _seen: int | None = None
    """Requests that had ever arrived, at the last look."""
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Requests without a first token, oldest first: how many, and the steps that each has met."""

    def observe(self, requests: int, waiting: int, *, under_way: int, begins: bool) -> None:
        """A step begins or ends while production has had `requests` in all, of which `waiting` have
        no first token; `under_way` other steps were so since the last look."""
        if self._seen is None or requests < self._seen:
            self.forget()
            self._seen = requests - waiting
            under_way = 0
        if requests > self._seen:
            self._waiting.append((requests - self._seen, under_way))
            self._seen = requests
        self._answer(sum([count for count, _ in self._waiting]) - waiting)
        if begins:
            self._waiting = deque([(count, met + 1) for count, met in self._waiting])

    def forget(self) -> None:
        """Production's state is unknown: what waits counts nowhere."""
        self._seen = None
        self._waiting.clear()

    def _answer(self, answered: int) -> None:
        while answered > 0:
            count, met = self._waiting.popleft()
            taken = min(count, answered)
            self.counts[min(met, MOST_MET)] += taken
            answered -= taken
            if taken < count:
                self._waiting.appendleft((count - taken, met))
