"""What a group would do: its jobs' slow-downs over a few meta-iterations, in several scenarios.

A scenario draws every job's mean durations from the belief about them and varies each phase around
them; the draws are one fixed table, so that two placements are compared under the same luck and the
same question has the same answer everywhere. The jobs run under the very rules that will run them.
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
    means = np.stack(
        [rng.permutation(levels) for _ in range(_JOBS_MAX * 2)], axis=1
    ).reshape(SCENARIOS, _JOBS_MAX, 2)
    return means, rng.standard_normal((SCENARIOS, _JOBS_MAX, ROWS, 2)).clip(-3, 3)


@compiled
def _slowdowns(
    template: Records,
    nodes: Records,
    spread_s: Records,
    cv: Records,
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
                drawn_s = means[phase] + spread_s[k, phase] * mean_draws[scenario, k, phase]
                drawn_s = max(drawn_s, 0.3 * means[phase])
                iteration_s += drawn_s
                for row in range(ROWS):
                    varied = 1.0 + cv[k, phase] * phase_draws[scenario, k, row, phase]
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
_NO_LOG = np.zeros(0, dtype=EVENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How much of a group's future a forecast runs, in iterations of its longest job."""

    scenarios: int = SCENARIOS
    warm_up: float = 2.0
    cycles: float = 10.0


def slowdowns(occupants: Sequence[Occupant], *, rules: Rules, horizon: Horizon) -> Records:
    """Elapsed over solo time, `[scenario, job]`.

    One scenario is the mean itself, without any variation.
    """
    count = len(occupants)
    jobs = np.zeros(count, dtype=JOB)
    jobs["id"] = np.arange(count)
    jobs["stage"] = WAITS_ROLLOUT
    jobs["iterations"] = np.iinfo(np.int64).max
    jobs["rollout_nodes"] = [one.rollout_nodes for one in occupants]
    jobs["training_nodes"] = [one.training_nodes for one in occupants]
    jobs["slo"] = [one.slo for one in occupants]
    jobs["bulk_ratio"] = [one.bulk_ratio for one in occupants]
    jobs["tail_share"] = [one.tail_share for one in occupants]
    beliefs = np.array([one.belief for one in occupants], dtype=np.float64).reshape(count, 2, 3)
    jobs["rollout_mean_s"], jobs["training_mean_s"] = beliefs[:, 0, 0], beliefs[:, 1, 0]
    exact = horizon.scenarios == 1
    return _slowdowns(
        jobs,
        empty_nodes(),
        beliefs[:, :, 1] * (not exact),
        beliefs[:, :, 2] * (not exact),
        _MEAN_DRAWS,
        _PHASE_DRAWS,
        horizon.scenarios,
        horizon.warm_up,
        horizon.cycles,
        rules,
        _NO_LOG,
    )
