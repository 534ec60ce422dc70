"""Attributes broken attempts: one may be the network's fault, several in a row are the engine's.

Attempts that were running side by side when a connection broke count once. A file of its own
because the fleet's shell only executes decisions.
"""

from dataclasses import dataclass

MOST_IN_A_ROW = 3


@dataclass(slots=True)
class FaultStreak:
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
