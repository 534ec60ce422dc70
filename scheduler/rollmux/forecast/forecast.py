"""Forecast of a group: its jobs' slow-downs over a few meta-iterations, in several scenarios.

This module composes the question: the jobs of the group, their nodes, their beliefs, and the
length of the run. `scenarios` runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.forecast.compiled import Records, compiled
from scheduler.rollmux.forecast.scenarios import SCENARIOS, keeps, slowdown_table
from scheduler.rollmux.forecast.stages import EVENT, JOB, WAITS_ROLLOUT, Rules, empty_nodes


class Occupant(NamedTuple):
    """One job in a group as a forecast sees it; nodes are masks within the group."""

    rollout_nodes: int
    training_nodes: int
    slo: float
    belief: Belief
    bulk_ratio: float
    tail_share: float
    divisible: bool = True
    """Its rollout may begin on what another's tail leaves of its nodes."""


_OF_OCCUPANTS = (
    "rollout_nodes",
    "training_nodes",
    "slo",
    "bulk_ratio",
    "tail_share",
    "divisible",
)
_NODES = empty_nodes()
_NO_LOG = np.zeros(0, dtype=EVENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """Length of a forecast, in iterations of the group's longest job."""

    scenarios: int = SCENARIOS
    warm_up: float = 2.0
    cycles: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """A short forecast of the means, which rules out most of what will not do."""

    warm_up: float = 1.0
    cycles: float = 5.0
    margin: float = 0.04
    """Amount by which an SLO may be missed before the forecast stops."""


NO_GLANCE = Glance(warm_up=0.0, cycles=0.0, margin=float("inf"))


@dataclass(frozen=True, slots=True)
class Roster:
    """Jobs ready to be forecast: a forecast takes some of them, on nodes of its choice."""

    jobs: Records
    beliefs: Records
    """`[job, (rollout, training), (mean, spread of the mean, cv)]`"""

    @classmethod
    def of(cls, occupants: Sequence[Occupant]) -> "Roster":
        jobs = np.zeros(len(occupants), dtype=JOB)
        jobs["id"] = np.arange(len(occupants))
        jobs["stage"] = WAITS_ROLLOUT
        for name in _OF_OCCUPANTS:
            jobs[name] = [getattr(one, name) for one in occupants]
        beliefs = np.array([one.belief.doubts for one in occupants], dtype=np.float64)
        beliefs = beliefs.reshape(len(occupants), 2, 3)
        jobs["sync_s"] = [one.belief.sync_s for one in occupants]
        jobs["rollout_mean_s"], jobs["training_mean_s"] = beliefs[:, 0, 0], beliefs[:, 1, 0]
        return cls(jobs, beliefs)

    def hosted(
        self, members: Sequence[int], rollout: Sequence[int], training: Sequence[int]
    ) -> "Roster":
        """Some of the jobs, each on the nodes of its masks; either pool's are numbered from 0."""
        chosen = np.array(members)
        first = max(rollout).bit_length()
        masks = np.array((rollout, training))
        jobs = np.empty(len(chosen), dtype=JOB)
        _host(self.jobs, chosen, masks, first, jobs)
        return Roster(jobs, self.beliefs[chosen])

    @property
    def slos(self) -> Records:
        return np.asarray(self.jobs["slo"])


@compiled
def _host(jobs: Records, chosen: Records, masks: Records, first: int, hosted: Records) -> None:
    for at in range(chosen.size):
        hosted[at] = jobs[chosen[at]]
        hosted["id"][at] = at
        hosted["rollout_nodes"][at] = masks[0, at]
        hosted["training_nodes"][at] = masks[1, at] << first


def slowdowns(roster: Roster, *, rules: Rules, horizon: Horizon) -> Records:
    """Elapsed over solo time, `[scenario, job]`.

    One scenario is the mean itself, without any variation.
    """
    return slowdown_table(
        roster.jobs,
        _NODES,
        roster.beliefs,
        horizon.scenarios,
        (horizon.warm_up, horizon.cycles),
        rules,
        _NO_LOG,
    )


def keeps_all(
    roster: Roster, *, rules: Rules, horizon: Horizon, glance: Glance, quantile: float
) -> bool:
    """Whether `upper_bound` of each slow-down over the horizon is within its SLO."""
    return keeps(
        roster.jobs,
        _NODES,
        roster.beliefs,
        (glance.warm_up, glance.cycles, glance.margin),
        horizon.scenarios,
        (horizon.warm_up, horizon.cycles),
        quantile,
        rules,
        _NO_LOG,
    )
