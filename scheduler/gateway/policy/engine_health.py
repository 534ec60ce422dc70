"""Three counts for each engine: broken attempts in a row, weights changed by another scheduler, and
logged losses. Reads no clock.
"""

from dataclasses import dataclass, field

from harvester.contracts.doubling import doubled_s
from harvester.contracts.event_limit import EventLimit

MOST_IN_A_ROW = 3
FORGOTTEN_S = 300.0
_FIRST_S = 1.0
_LONGEST_S = 60.0


@dataclass(slots=True)
class FaultStreak:
    """Attributes broken attempts: one may be the network's fault, several in a row are the
    engine's. Attempts that ran side by side when a connection broke count once."""

    in_a_row: int = 0
    last_s: float = float("-inf")

    def fail(self, *, began_s: float, now: float) -> bool:
        """An attempt that began at `began_s` broke. True: the engine is to be given up."""
        if began_s >= self.last_s:
            self.in_a_row, self.last_s = self.in_a_row + 1, now
        return self.in_a_row >= MOST_IN_A_ROW

    def succeed(self) -> None:
        """An attempt came to its end."""
        self.in_a_row = 0


@dataclass(slots=True)
class ForeignUpdates:
    """Back-off for an engine whose weights another scheduler changes.

    Two schedulers that publish to one engine would undo each other's work without end. Each returns
    later from time to time, so that turns are served between.
    """

    times: int = 0
    until_s: float = 0.0
    _last_s: float = 0.0

    def seen(self, *, now: float) -> bool:
        """Records one change; True for the first since the last was forgotten, which costs no
        wait."""
        if self.times and now - self._last_s > FORGOTTEN_S:
            self.times = 0
        self.times, self._last_s = self.times + 1, now
        wait_s = 0.0
        if self.times > 1:
            wait_s = doubled_s(_FIRST_S, self.times - 2, most_s=_LONGEST_S)
        self.until_s = now + wait_s
        return self.times == 1


@dataclass(slots=True)
class EngineLog:
    """Log lines about one engine: each change of its state at once, for a flapping engine a few and
    then one a minute. A line that is left out stays due until the log has the engine's state."""

    up: bool = False
    losses: int = 0
    fault: str = ""
    """Reason of the last loss."""
    unserved: bool = False
    """Whether the last line says that it is not served."""
    limit: EventLimit = field(default_factory=EventLimit.of_lines)

    def line(self, *, up: bool, losses: int, now: float) -> str:
        """The line that is due; empty without one."""
        lost = losses - self.losses
        if (up == self.up and not lost) or not self.limit.admits(now=now):
            return ""
        self.up, self.losses = up, losses
        state = ("is back" if losses else "is up") if up else "is lost"
        since = f", {lost} losses since the last line" if lost > 1 or (up and lost) else ""
        return f"{state}{since}{f': {self.fault}' if lost else ''}"
