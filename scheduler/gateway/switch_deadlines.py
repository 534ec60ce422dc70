"""Expiry times of a job's switches that were set for a limited time.

A job in a phase renews them while its permit lasts. When its process dies, its switches expire:
engines on another job's node are then no longer used for it.
Reads no clock.
"""

from enum import StrEnum

from harvester.contracts.ids import JobId


class Switch(StrEnum):
    DEDICATED = "dedicated"
    """The job's turns may run on dedicated engines."""
    HARVESTING = "harvesting"
    """The job may lease slots."""


class SwitchDeadlines:
    def __init__(self) -> None:
        self._until_s: dict[tuple[JobId, Switch], float] = {}

    def switched(self, job: JobId, switch: Switch, *, until_s: float | None) -> None:
        """`until_s` of a switch that stays as it is: None."""
        if until_s is None:
            self._until_s.pop((job, switch), None)
        else:
            self._until_s[job, switch] = until_s

    def passed(self, *, now: float) -> tuple[tuple[JobId, Switch], ...]:
        """Switches that expire now; each is returned once."""
        passed = tuple(sorted(key for key, until_s in self._until_s.items() if until_s <= now))
        for key in passed:
            del self._until_s[key]
        return passed
