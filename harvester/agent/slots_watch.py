"""When an agent reads its slots file: on a change, and again while the file cannot be used. Apart
from the agent's process, so that tests pass the time in."""

from pathlib import Path

from harvester.platform.renewed import state_of

_RETRY_S = 10.0
_UNSEEN = "not looked at yet"


class SlotsWatch:
    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.in_force = True
        """Whether the file as it is now could be used."""
        self._seen: tuple[int, int, int] | str | None = _UNSEEN
        self._retry_at_s = 0.0
        self._absent_at_s: float | None = None
        self._fault = ""

    def age_s(self, *, now: float, wall_s: float) -> float:
        """Seconds since the file that was read last was written, or since it was seen absent."""
        if isinstance(self._seen, tuple):
            return max(0.0, wall_s - self._seen[1] * 1e-9)
        return 0.0 if self._absent_at_s is None else now - self._absent_at_s

    def due(self, *, now: float) -> bool:
        """Whether to read the file now; `taken` or `failed` follows."""
        if self.path is None:
            return False
        state = state_of(self.path)
        if state == self._seen and (self.in_force or now < self._retry_at_s):
            return False
        if state != self._seen:
            self._absent_at_s = now if state is None else None
        # Before it is read: a file that changes meanwhile is read again.
        self._seen, self._retry_at_s = state, now + _RETRY_S
        return True

    def read_again(self) -> None:
        """Makes the file due, whatever was read last."""
        self._seen = _UNSEEN

    def taken(self) -> None:
        """Records that the file was usable."""
        self.in_force, self._fault = True, ""

    def failed(self, fault: str) -> bool:
        """Records that the file was not usable; returns whether the fault is new."""
        new, self.in_force, self._fault = fault != self._fault, False, fault
        return new
