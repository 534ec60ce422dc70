"""Production's requests and SLO misses, and which of the misses are surely harvesting's.

Agents judge their own slot by it, a scheduler the sum over a service's slots. Counts add up; the
excess of an hour does not depend on other slots or hours, so that slots and hours of unlike load
are never compared with each other.
"""

import math
from collections.abc import Sequence

import msgspec


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Production's requests in a period, and the requests that missed the SLO."""

    requests: float = 0.0
    """All requests; the `granted` and `withheld` counts cover slices of the proof."""
    misses: float = 0.0
    """Requests over their SLO beside a guest step."""
    granted: float = 0.0
    granted_misses: float = 0.0
    """Late first tokens."""
    granted_beats: float = 0.0
    """Requests that decoded in a beat of the agent, summed over beats."""
    granted_late_beats: float = 0.0
    """Requests with a late token in a beat, summed over beats; a request counts once per beat."""
    withheld: float = 0.0
    """Requests of withheld slices, each counted (1 - p) / p times, where p was the chance that its
    slice is withheld: more is withheld under suspicion, and so they stand for the granted ones."""
    withheld_misses: float = 0.0
    withheld_beats: float = 0.0
    withheld_late_beats: float = 0.0

    def __add__(self, other: "Served") -> "Served":
        return Served(**{name: getattr(self, name) + getattr(other, name) for name in COUNTS})

    def __sub__(self, other: "Served") -> "Served":
        return Served(**{name: getattr(self, name) - getattr(other, name) for name in COUNTS})

    @property
    def excess(self) -> float:
        """Misses of granted slices beyond the rate of withheld slices; below 0 if withheld slices
        missed more often. A request's late beat counts as one late request."""
        if not (self.granted and self.withheld):
            return 0.0
        late = 0.0
        if self.granted_beats and self.withheld_beats:
            share = self.withheld_late_beats / self.withheld_beats
            late = self.granted_late_beats - self.granted_beats * share
            late = max(-self.granted, min(self.granted, late))
        return self.granted_misses - self.granted * self.withheld_misses / self.withheld + late


COUNTS = Served.__struct_fields__
NONE_SERVED = Served()
_SURE = 4.0
"""Standard errors; more of them with few hours."""
_UNPROVEN_REQUESTS = 1000
HOUR_S = 3600.0
BUDGET_HOURS = 28 * 24
"""Hours of traffic whose misses an error budget counts."""
_UNPROVEN_HOURS = 3
"""Hours with granted requests from which on the absence of withheld ones is not chance, so that no
miss counts as production's own. A busy service has a thousand requests within one slice."""
_HOURS_LEAST = 8


def _lower_bound(excess: Sequence[float]) -> float:
    """Lower bound of the sum of excess misses over hours with granted and withheld requests.

    Hours are compared with themselves, so that load and bursts that both kinds see cancel.
    """
    count = len(excess)
    if count < _HOURS_LEAST:
        return 0.0
    total = sum(excess)
    spread = sum((one - total / count) ** 2 for one in excess) * count / (count - 1)
    return max(0.0, total - _SURE * (1 + 6 / count) * math.sqrt(spread))


def charged_misses(total: Served, excess: Sequence[float], *, granted_hours: int) -> float:
    """Misses charged to harvesting. `excess`: of each hour with requests of both kinds;
    `granted_hours`: hours with granted requests."""
    unproven = granted_hours >= _UNPROVEN_HOURS and total.granted >= _UNPROVEN_REQUESTS
    return total.granted_misses if unproven and not total.withheld else _lower_bound(excess)
