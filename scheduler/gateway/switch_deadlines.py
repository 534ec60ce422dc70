"""Until when a job's switches stay on that were switched on for a time only.

A job that takes part in phases says so again while its permit lasts. When its process dies, its
switches go off by themselves: engines whose node is another job's are not used for it any more.
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
        """What goes off now; each is returned once."""
        passed = tuple(sorted(key for key, until_s in self._until_s.items() if until_s <= now))
        for key in passed:
            del self._until_s[key]
        return passed
