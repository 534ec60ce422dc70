"""When an agent reads its slots file: on a change, and again while what it read is not in force."""

from pathlib import Path

from harvester.platform.renewed import state_of

_LOOK_S = 1.0
_RETRY_S = 10.0


class SlotsWatch:
    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.in_force = True
        """Whether the file as it is now is in force, every slot of it."""
        self._seen: tuple[int, int, int] | None = None
        self._look_at_s = self._retry_at_s = 0.0
        self._fault = ""

    def due(self, *, now: float) -> bool:
        """Whether to read the file now; `taken` or `failed` follows."""
        if self.path is None or now < self._look_at_s:
            return False
        self._look_at_s = now + _LOOK_S
        state = state_of(self.path)
        if state == self._seen and (self.in_force or now < self._retry_at_s):
            return False
        # Before it is read: a file that changes meanwhile is read again.
        self._seen, self._retry_at_s = state, now + _RETRY_S
        return True

    def taken(self, *, complete: bool) -> None:
        """It was read; `complete`: all of its slots run."""
        self.in_force, self._fault = complete, ""

    def failed(self, fault: str) -> bool:
        """It could not be used. Returns whether the fault is a new one."""
        new, self.in_force, self._fault = fault != self._fault, False, fault
        return new
