"""Time of a node in a simulation: a clock that a test moves, and actions that it makes due."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import patch


@dataclass
class VirtualTime:
    now_s: float = 1000.0
    wall_s: float = 0.0
    """Wall clock's offset, which jumps."""
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @contextmanager
    def governing(self) -> Iterator[None]:
        """The one module that reads a clock reads this one."""
        origin = datetime(2026, 1, 1, tzinfo=UTC)
        wall = SimpleNamespace(
            now=lambda _: origin + timedelta(seconds=self.now_s + self.wall_s),
        )
        clock = SimpleNamespace(
            monotonic=lambda: self.now_s,
            monotonic_ns=lambda: round(self.now_s * 1e9),
            time=lambda: wall.now(UTC).timestamp(),
        )
        with (
            patch("harvester.contracts.clock.time", clock),
            patch("harvester.contracts.clock.datetime", wall),
        ):
            yield

    def now(self) -> float:
        return self.now_s

    def leap(self, by_s: float) -> None:
        """Move on by so many s; actions that fall due wait for `tick`."""
        self.now_s = round(self.now_s + by_s, 6)

    def tick(self, by_s: float) -> None:
        """Move on by so many s, and take the actions that are due."""
        self.leap(by_s)
        for due in [each for each in self._later if each[0] <= self.now_s]:
            self._later.remove(due)
            due[1]()

    def later(self, after_s: float, action: Callable[[], None]) -> float:
        """Have an action taken after so many s; returns its time."""
        at_s = self.now_s + after_s
        self._later.append((at_s, action))
        return at_s
