"""Bounds the audit and log lines of events that flap, or that callers cause. Reads no clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class EventLimit:
    """A burst, then a steady pace."""

    burst: float = 60.0
    per_s: float = 0.2
    """Refused calls, or states of one slot that flaps, before some are left out of the audit: at 12
    a minute they fill its default bound in two months, and hide no other event."""
    left: float = float("inf")
    at_s: float | None = None
    omitted: int = 0
    """Events left out since the last admitted event."""

    @classmethod
    def of_lines(cls) -> "EventLimit":
        """Lines of a log about one fault: six at once, then one a minute."""
        return cls(burst=6.0, per_s=1 / 60)

    def admits(self, *, now: float, again: bool = False) -> bool:
        """`again`: for an event that was left out before and counts once."""
        since_s = 0.0 if self.at_s is None else now - self.at_s
        self.left, self.at_s = min(self.burst, self.left + since_s * self.per_s), now
        if self.left < 1.0:
            self.omitted += not again
            return False
        self.left -= 1.0
        return True

    def taken(self) -> int:
        """`omitted`, counted from 0 again."""
        omitted, self.omitted = self.omitted, 0
        return omitted
