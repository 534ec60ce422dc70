"""What a group would do: its jobs' slow-downs over a few meta-iterations, in several scenarios.

A scenario draws every job's mean durations from the belief about them; single phases vary around
them, the same in every scenario, because over a run that averages out and a wrong belief does
not. The draws are one fixed table, so that two placements are compared under the same luck and
the same question has the same answer everywhere. The jobs run under the rules that will run them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from scheduler.policy.groups.compiled import Records, compiled
from scheduler.policy.groups.durations import Belief
from scheduler.policy.groups.execution import advance
from scheduler.policy.groups.stages import EVENT, JOB, WAITS_ROLLOUT, Rules, empty_nodes

SCENARIOS: Final = 4
ROWS: Final = 48
"""Iterations drawn for each job; a longer horizon uses them again."""
_JOBS_MAX: Final = 16


def _draws() -> tuple[Records, Records]:
    """Means' draws, evenly spread over the scenarios, and phases' draws: standard normal both."""
    rng = np.random.Generator(np.random.PCG64(20260101))
    levels = [NormalDist().inv_cdf((level + 0.5) / SCENARIOS) for level in range(SCENARIOS)]
    means = np.stack([rng.permutation(levels) for _ in range(_JOBS_MAX * 2)], axis=1).reshape(
        SCENARIOS, _JOBS_MAX, 2
    )
    return means, rng.standard_normal((_JOBS_MAX, ROWS, 2)).clip(-3, 3)


@compiled
def _slowdowns(
    template: Records,
    nodes: Records,
    beliefs: Records,
    doubt: float,
    mean_draws: Records,
    phase_draws: Records,
    scenarios: int,
    warm_up: float,
    cycles: float,
    rules: Rules,
    log: Records,
) -> Records:
    """Elapsed over solo time of every job, `[scenario, job]`."""
    count = template.size
    slowdowns = np.zeros((scenarios, count))
    lengths_s = np.zeros((count * ROWS, 2))
    solo_s = np.zeros(count)
    for scenario in range(scenarios):
        jobs = template.copy()
        permits = np.zeros(2, dtype=np.int64)
        loaded = nodes.copy()
        longest_s = 0.0
        for k in range(count):
            means = (jobs["rollout_mean_s"][k], jobs["training_mean_s"][k])
            iteration_s = 0.0
            for phase in range(2):
                drawn_s = means[phase]
                drawn_s += doubt * beliefs[k, phase, 1] * mean_draws[scenario, k, phase]
                drawn_s = max(drawn_s, 0.3 * means[phase])
                iteration_s += drawn_s
                cv = doubt * beliefs[k, phase, 2]
                for row in range(ROWS):
                    varied = 1.0 + cv * phase_draws[k, row, phase]
                    lengths_s[k * ROWS + row, phase] = drawn_s * varied
            longest_s = max(longest_s, iteration_s)
            jobs["offset"][k], jobs["length"][k] = k * ROWS, ROWS
        start_s = warm_up * longest_s
        end_s = start_s + cycles * longest_s
        advance(jobs, loaded, permits, lengths_s, rules, 0.0, start_s, log)
        for k in range(count):
            solo_s[k] = jobs["solo_s"][k] + jobs["worked_s"][k]
            jobs["began_s"][k] = start_s - jobs["slo"][k] * jobs["solo_s"][k]
        advance(jobs, loaded, permits, lengths_s, rules, start_s, end_s, log)
        for k in range(count):
            done_s = jobs["solo_s"][k] + jobs["worked_s"][k] - solo_s[k]
            slowdowns[scenario, k] = (end_s - start_s) / max(done_s, 1e-6)
    return slowdowns


class Occupant(NamedTuple):
    """One job in a group as a forecast sees it; nodes are masks within the group."""

    rollout_nodes: int
    training_nodes: int
    slo: float
    belief: Belief
    bulk_ratio: float
    tail_share: float


_MEAN_DRAWS, _PHASE_DRAWS = _draws()
_NODES = empty_nodes()
_NO_LOG = np.zeros(0, dtype=EVENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How much of a group's future a forecast runs, in iterations of its longest job."""

    scenarios: int = SCENARIOS
    warm_up: float = 2.0
    cycles: float = 8.0


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
        jobs["iterations"] = np.iinfo(np.int64).max
        for name in ("rollout_nodes", "training_nodes", "slo", "bulk_ratio", "tail_share"):
            jobs[name] = [getattr(one, name) for one in occupants]
        beliefs = np.array([one.belief for one in occupants], dtype=np.float64)
        beliefs = beliefs.reshape(len(occupants), 2, 3)
        jobs["rollout_mean_s"], jobs["training_mean_s"] = beliefs[:, 0, 0], beliefs[:, 1, 0]
        return cls(jobs, beliefs)

    def hosted(
        self, members: Sequence[int], rollout: Sequence[int], training: Sequence[int]
    ) -> "Roster":
        """Some of the jobs, each on the rollout and training node of the given number."""
        chosen = list(members)
        jobs = self.jobs[chosen]
        first = max(rollout) + 1
        jobs["id"] = range(len(chosen))
        jobs["rollout_nodes"] = [1 << node for node in rollout]
        jobs["training_nodes"] = [1 << (first + node) for node in training]
        return Roster(jobs, self.beliefs[chosen])

    @property
    def slos(self) -> Records:
        return np.asarray(self.jobs["slo"])


def slowdowns(roster: Roster, *, rules: Rules, horizon: Horizon) -> Records:
    """Elapsed over solo time, `[scenario, job]`.

    One scenario is the mean itself, without any variation.
    """
    doubt = 0.0 if horizon.scenarios == 1 else 1.0
    return _slowdowns(
        roster.jobs,
        _NODES,
        roster.beliefs,
        doubt,
        _MEAN_DRAWS,
        _PHASE_DRAWS,
        horizon.scenarios,
        horizon.warm_up,
        horizon.cycles,
        rules,
        _NO_LOG,
    )


@compiled
def upper_bound(slowdowns: Records, quantile: float) -> Records:
    """Mean over the scenarios plus `quantile` standard deviations, for every job."""
    scenarios, count = slowdowns.shape
    bound = np.zeros(count)
    for k in range(count):
        mean = slowdowns[:, k].mean()
        square = 0.0
        for scenario in range(scenarios):
            square += (slowdowns[scenario, k] - mean) ** 2
        bound[k] = mean + quantile * np.sqrt(square / max(1, scenarios - 1))
    return bound
