"""Search over every interleaving of a model's moves, cheapest first, and the way to a fault.

    cost         a move is 1; one in which the world turns bad, or an operator steps in, is FAULT
    invariants   a move, or the state that it leads to, may raise Broken
    progress     from each state a fair course without further faults reaches a state that lives

So the search goes as deep as it can where little goes wrong, and still has every way in which more
does. Reads the clock for nothing but the speed that it reports: a model gives the same search.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from harvester.contracts.clock import MonotonicClock

S = TypeVar("S", bound=Hashable)

FAULT = 4
"""Cost of a fault or a command."""
COURSE_MAX = 400
"""Moves of a fair course after which a state counts as stuck."""


class Broken(Exception):  # noqa: N818 - what an invariant is
    """Says which invariant, and of what."""


class Move(NamedTuple, Generic[S]):
    label: str
    go: Callable[[], S]
    """The state that it leads to; may raise Broken."""
    cost: int = 1


class Model(Protocol[S]):
    def starts(self) -> Iterable[S]: ...

    def moves(self, state: S) -> Iterable[Move[S]]:
        """In one order for one state."""
        ...

    def check(self, state: S) -> None:
        """Raises Broken where an invariant of the state does not hold."""
        ...

    def mended(self, state: S) -> S:
        """The state with every fault over: what was down is up, nothing is lost from here on."""
        ...

    def onward(self, state: S) -> S | None:
        """The next state of the fair course; None where the state lives."""
        ...


@dataclass(kw_only=True)
class Explored:
    states: int = 0
    moves: int = 0
    cost: int = 0
    """Every interleaving of this cost was seen."""
    whole: bool = False
    """Whether there is no further state."""
    seconds: float = 0.0
    fault: str = ""
    trace: list[str] = field(default_factory=list)
    """The cheapest way to the fault."""

    def __str__(self) -> str:
        seen = "all there are" if self.whole else self._depth
        speed = f"{self.moves:,} moves in {self.seconds:.0f} s"
        said = f"{self.states:,} states ({seen}), {speed}"
        if not self.fault:
            return f"{said}: 0 violations"
        steps = "".join(f"\n  {at:3} {label}" for at, label in enumerate(self.trace, 1))
        return f"{said}: VIOLATION: {self.fault}{steps}"

    @property
    def _depth(self) -> str:
        faults = range(self.cost // FAULT + 1)
        moves = ", ".join(f"{self.cost - FAULT * each + each}" for each in faults)
        return f"all of {moves} moves with 0, 1, ... faults"


class Search(Generic[S]):
    """One search. Every state is kept once, with the one that it was reached from at least cost."""

    def __init__(self, model: Model[S], *, states_max: int, progress: bool = True) -> None:
        self._model = model
        self._states_max = states_max
        self._progress = progress
        self._numbers: dict[S, int] = {}
        self._states: list[S] = []
        self._from, self._cost = array("q"), array("l")
        self._due: defaultdict[int, list[int]] = defaultdict(list)
        """States by their cost; one that has become cheaper is there twice."""
        self._live: set[S] = set()
        """States of fair courses that are known to come to life."""

    def run(self) -> Explored:
        clock, found = MonotonicClock(), Explored()
        began_s = clock.now()
        # States seen before an interrupt count.
        with suppress(KeyboardInterrupt):
            self._search(found)
        found.states, found.seconds = len(self._states), clock.now() - began_s
        return found

    def _search(self, found: Explored) -> None:
        try:
            for start in self._model.starts():
                self._add(start, -1, 0)
        except Broken as broken:
            found.fault = str(broken)
            return
        while self._due:
            cost = min(self._due)
            # Moves cost at least 1: nothing is added to the states of this cost meanwhile.
            for at in self._due.pop(cost):
                if self._cost[at] != cost:
                    continue
                if len(self._states) >= self._states_max:
                    return
                for move in self._model.moves(self._states[at]):
                    found.moves += 1
                    try:
                        self._add(move.go(), at, cost + move.cost)
                    except Broken as broken:
                        found.fault = str(broken)
                        found.trace = [*self._way_to(at), move.label]
                        return
            found.cost = cost
        found.whole = True

    def _add(self, state: S, came_from: int, cost: int) -> None:
        known = self._numbers.setdefault(state, len(self._states))
        if known == len(self._states):
            self._states.append(state)
            self._from.append(came_from)
            self._cost.append(cost)
            self._model.check(state)
            if self._progress:
                self._check_progress(state)
        elif self._cost[known] <= cost:
            return
        else:
            self._from[known], self._cost[known] = came_from, cost
        self._due[cost].append(known)

    def _check_progress(self, state: S) -> None:
        course: list[S] = []
        try:
            at: S | None = self._model.mended(state)
            while at is not None and at not in self._live:
                self._model.check(at)
                course.append(at)
                if len(course) > COURSE_MAX:
                    raise Broken(f"no progress within {COURSE_MAX} moves")
                at = self._model.onward(at)
        except Broken as broken:
            raise Broken(f"on a fair course from there: {broken}") from broken
        self._live.update(course)

    def _way_to(self, at: int) -> list[str]:
        way: list[str] = []
        while (before := self._from[at]) >= 0:
            way.append(self._label(self._states[before], self._states[at]))
            at = before
        return way[::-1]

    def _label(self, before: S, after: S) -> str:
        for move in self._model.moves(before):
            try:
                if move.go() == after:
                    return move.label
            except Broken:
                continue
        raise AssertionError("a move is gone: the model is not deterministic")


def explore(model: Model[S], *, states: int, progress: bool = True) -> Explored:
    return Search(model, states_max=states, progress=progress).run()
