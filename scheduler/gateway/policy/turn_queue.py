"""Turns that wait for a place, in lines of equals. Decides nothing: routing tries their first ones.

Each line has three priorities. A turn that left its line, or that comes again in another way, stays
in it as a dead entry until it is the first: nothing is searched for.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from harvester.contracts.ids import EngineId, JobId, WeightVersion
from scheduler.gateway.policy.routing_events import TurnArrived
from scheduler.model import BASE_VERSION

_Pin: TypeAlias = WeightVersion | None
LineKey: TypeAlias = tuple[JobId, _Pin, int, str, str, tuple[EngineId, ...], int]
"""Job, exact version, which engines have the least one, numerics, suspect, engines to avoid, and
which have the context."""


class QueuePriority(IntEnum):
    """Order in which turns get freed places."""

    RESUMED = 0
    """The turn has been on an engine."""
    BEGUN = 1
    """Earlier turns of its trajectory have been on an engine."""
    FRESH = 2


@dataclass(frozen=True, slots=True, eq=False)
class WaitingTurn:
    """One arrival of a turn, in its line. The turn's next arrival is a separate object: its
    suspicion and avoided engines may differ."""

    turn: TurnArrived
    priority: QueuePriority
    since_s: float
    last: EngineId | None
    """The last engine of its trajectory, for priority BEGUN."""


@dataclass(slots=True, eq=False)
class _Line:
    """Queued turns that routing treats alike except for their age."""

    waiting: tuple[deque[WaitingTurn], ...] = field(
        default_factory=lambda: tuple(deque() for _ in QueuePriority)
    )
    begun_on: dict[EngineId, deque[WaitingTurn]] = field(default_factory=dict)
    """Queued turns of priority BEGUN, by the last engine of their trajectory."""


class TurnQueue:
    def __init__(self) -> None:
        self._queued: dict[str, WaitingTurn] = {}
        self._of_jobs: Counter[JobId] = Counter()
        """Number of queued turns, which each decision on leases asks for every job."""
        self._lines: dict[LineKey, _Line] = {}
        self._contexts: list[int] = []
        """Contexts of all engines so far, sorted: lengths between two fit the same engines."""
        self._versions: list[WeightVersion] = []
        """Versions that engines serve or come to serve, sorted. Minimum versions between the same
        two share a line; a line for each requested version would slow every decision."""

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[TurnArrived]:
        """Yields arrivals in their order; the caller may remove an arrival once it was yielded."""
        return (queued.turn for queued in tuple(self._queued.values()))

    def add(self, queued: WaitingTurn) -> None:
        """A turn that comes again keeps its place: lines are in the order of their times."""
        self._of_jobs[queued.turn.job] += queued.turn.turn not in self._queued
        self._queued[queued.turn.turn] = queued
        self._enter(queued)

    def remove(self, turn: str) -> None:
        if (queued := self._queued.pop(turn, None)) is not None:
            self._of_jobs[queued.turn.job] -= 1

    def turns_of(self, job: JobId) -> int:
        return self._of_jobs[job]

    def has_line(self, turn: TurnArrived) -> bool:
        """Whether others wait in its line."""
        line = self._lines.get(self.line_key(turn))
        return line is not None and self._any_waits(line)

    def line_key(self, turn: TurnArrived) -> LineKey:
        fits = bisect_left(self._contexts, turn.context_tokens)
        served = bisect_left(self._versions, turn.minimum or BASE_VERSION)
        pin = (turn.exact, served, turn.numerics)
        return (turn.job, *pin, turn.suspect, turn.avoid, fits)

    def split_at(self, context_tokens: int) -> None:
        """Regroups the lines where an engine with a new context length joined."""
        if not context_tokens or context_tokens in self._contexts:
            return
        insort(self._contexts, context_tokens)
        self._regroup()

    def tell_apart(self, versions: Iterable[WeightVersion]) -> None:
        """Regroups the lines where engines serve other versions, or come to."""
        served = sorted(set(versions))
        if served != self._versions:
            self._versions = served
            self._regroup()

    def _regroup(self) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            for waiting in line.waiting:
                for queued in filter(self._waits, waiting):
                    self._enter(queued)

    def oldest_first(self, priority: QueuePriority) -> Iterator[WaitingTurn]:
        """The first turn of each line, the oldest first, and the next of each line of which one is
        removed meanwhile. A turn that stays blocks only its own line."""
        heads = [
            (first.since_s, place, line)
            for place, line in enumerate(self._lines.values())
            if (first := self._first(line, priority)) is not None
        ]
        heapify(heads)
        while heads:
            _, place, line = heappop(heads)
            first, before = self._first(line, priority), len(self)
            assert first is not None
            yield first
            if len(self) < before and (first := self._first(line, priority)) is not None:
                heappush(heads, (first.since_s, place, line))

    def nearest(
        self, first: WaitingTurn, engine: EngineId, still: Callable[[TurnArrived], bool]
    ) -> TurnArrived | None:
        """The oldest turn in the line of `first` whose trajectory was last on the engine, and
        `still` is."""
        near = self._lines[self.line_key(first.turn)].begun_on.get(engine)
        while near:
            queued = near.popleft()
            if self._waits(queued) and still(queued.turn):
                return queued.turn
        return None

    def drop_empty_lines(self) -> None:
        """A queue that never is empty would gather a line for each version and each set of engines
        to avoid that ever was."""
        if self:
            lines = self._lines.items()
            self._lines = {key: line for key, line in lines if self._any_waits(line)}
        else:
            self._lines.clear()

    def _enter(self, queued: WaitingTurn) -> None:
        line = self._lines.setdefault(self.line_key(queued.turn), _Line())
        waiting = line.waiting[queued.priority]
        at = bisect_right(waiting, queued.since_s, key=_since)
        if at and not self._waits(waiting[at - 1]):
            # As a rule its own earlier arrival: behind a first turn that waits they would pile up.
            waiting[at - 1] = queued
        else:
            waiting.insert(at, queued)
        if queued.last is not None:
            near = line.begun_on.setdefault(queued.last, deque())
            while near and not self._waits(near[0]):
                near.popleft()
            near.append(queued)

    def _first(self, line: _Line, priority: QueuePriority) -> WaitingTurn | None:
        waiting = line.waiting[priority]
        while waiting and not self._waits(waiting[0]):
            waiting.popleft()
        return waiting[0] if waiting else None

    def _any_waits(self, line: _Line) -> bool:
        return any(self._first(line, priority) is not None for priority in QueuePriority)

    def _waits(self, queued: WaitingTurn) -> bool:
        return self._queued.get(queued.turn.turn) is queued


def _since(queued: WaitingTurn) -> float:
    return queued.since_s
