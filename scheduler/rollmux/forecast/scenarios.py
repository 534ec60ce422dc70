"""A forecast's scenarios, compiled: the group is run under drawn durations, job by job.

A scenario draws every job's mean durations from the belief about them; single phases vary around
them, the same in every scenario, because over a run that averages out and a wrong belief does not.
A weight sync takes its mean. The draws are one fixed table, so that two placements are compared
under the same luck and the same question has the same answer everywhere. The jobs run under the
rules that will run them.
"""

from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from scheduler.rollmux.forecast.compiled import Records, compiled
from scheduler.rollmux.forecast.execution import advance
from scheduler.rollmux.forecast.stages import EVENT, Rules, empty_nodes

SCENARIOS: Final = 4
ROWS: Final = 48
"""Iterations drawn for each job; a longer horizon uses them again."""
_JOBS_MAX: Final = 16
ROUNDING: Final = 1e-9
"""A slow-down that exceeds an SLO by less does not."""
ITERATIONS_RATIO_MAX: Final = 1e4
"""Longest over shortest iteration of a forecast group: the shortest one sets how much is run."""
_SURELY: Final = 1e-6
"""Margin above any rounding: no roster is refused early that would be admitted."""


class Horizon(NamedTuple):
    """Length of a forecast, in iterations of the group's longest job."""

    scenarios: int = SCENARIOS
    warm_up: float = 2.0
    cycles: float = 8.0


class ShortRun(NamedTuple):
    """A short forecast of the means, which rules out most unfit placements."""

    warm_up: float = 1.0
    cycles: float = 5.0
    margin: float = 0.04
    """Amount by which an SLO may be missed before the forecast stops."""


def _draws() -> tuple[Records, Records]:
    """Means' draws, evenly spread over the scenarios, and phases' draws: standard normal both."""
    rng = np.random.Generator(np.random.PCG64(20260101))
    levels = [NormalDist().inv_cdf((level + 0.5) / SCENARIOS) for level in range(SCENARIOS)]
    means = np.stack([rng.permutation(levels) for _ in range(_JOBS_MAX * 2)], axis=1).reshape(
        SCENARIOS, _JOBS_MAX, 2
    )
    return means, rng.standard_normal((_JOBS_MAX, ROWS, 2)).clip(-3, 3)


_MEAN_DRAWS, _PHASE_DRAWS = _draws()
_NODES: Final = empty_nodes()


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


@compiled
def _live(
    template: Records,
    beliefs: Records,
    doubt: float,
    scenario: int,
    warm_up: float,
    cycles: float,
    rules: Rules,
    found: Records,
) -> None:
    """Runs one scenario, and writes every job's elapsed over solo time to `found`."""
    count = template.size
    lengths_s = np.zeros((count * ROWS, 2))
    solo_s = np.zeros(count)
    jobs = template.copy()
    permits = np.zeros(2, dtype=np.int64)
    loaded, no_log = _NODES.copy(), np.zeros(0, dtype=EVENT)
    longest_s = 0.0
    for k in range(count):
        means = (jobs["rollout_mean_s"][k], jobs["training_mean_s"][k])
        iteration_s = 0.0
        for phase in range(2):
            drawn_s = means[phase]
            drawn_s += doubt * beliefs[k, phase, 1] * _MEAN_DRAWS[scenario, k, phase]
            drawn_s = max(drawn_s, 0.3 * means[phase])
            iteration_s += drawn_s
            cv = doubt * beliefs[k, phase, 2]
            for row in range(ROWS):
                varied = 1.0 + cv * _PHASE_DRAWS[k, row, phase]
                lengths_s[k * ROWS + row, phase] = drawn_s * varied
        iteration_s += jobs["sync_s"][k]
        longest_s = max(longest_s, iteration_s)
        jobs["offset"][k], jobs["length"][k] = k * ROWS, ROWS
    start_s = warm_up * longest_s
    end_s = start_s + cycles * longest_s
    advance(jobs, loaded, permits, lengths_s, rules, 0.0, start_s, no_log)
    for k in range(count):
        solo_s[k] = jobs["solo_s"][k] + jobs["worked_s"][k]
    advance(jobs, loaded, permits, lengths_s, rules, start_s, end_s, no_log)
    for k in range(count):
        done_s = jobs["solo_s"][k] + jobs["worked_s"][k] - solo_s[k]
        found[k] = (end_s - start_s) / max(done_s, 1e-6)


@compiled
def _too_uneven(jobs: Records) -> bool:
    iterations_s = jobs["rollout_mean_s"] + jobs["training_mean_s"] + jobs["sync_s"]
    return bool(iterations_s.max() > ITERATIONS_RATIO_MAX * iterations_s.min())


@compiled
def slowdowns(template: Records, beliefs: Records, horizon: Horizon, rules: Rules) -> Records:
    """Elapsed over solo time of every job of a roster, `[scenario, job]`; beyond any SLO where the
    jobs are too uneven to be run. With one scenario, all durations are their means."""
    found = np.full((horizon.scenarios, template.size), ITERATIONS_RATIO_MAX)
    if _too_uneven(template):
        return found
    doubt = 0.0 if horizon.scenarios == 1 else 1.0
    warm_up, cycles = horizon.warm_up, horizon.cycles
    for at in range(horizon.scenarios):
        _live(template, beliefs, doubt, at, warm_up, cycles, rules, found[at])
    return found


@compiled
def least_bound(seen: Records, scenarios: int, quantile: float) -> float:
    """Lower bound of a job's `upper_bound` after some of its scenarios were run.

    No scenario is faster than alone, and the bound is least where the others are all alike.
    """
    known = seen.size
    mean, square = seen.mean(), 0.0
    for value in seen:
        square += (value - mean) ** 2
    share = (scenarios - known) / scenarios
    weight = known * share
    gap, freedom = max(0.0, mean - 1.0), scenarios - 1
    slope = quantile**2 * weight - share**2 * freedom
    if slope > 0.0:
        gap = min(gap, share * np.sqrt(freedom * square / (weight * slope)))
    return float(mean - share * gap + quantile * np.sqrt((square + weight * gap**2) / freedom))


@compiled
def shares_nodes(jobs: Records, k: int) -> bool:
    """Whether another job is on one of job k's nodes."""
    for j in range(jobs.size):
        rollout = jobs["rollout_nodes"][j] & jobs["rollout_nodes"][k]
        training = jobs["training_nodes"][j] & jobs["training_nodes"][k]
        if j != k and (rollout or training):
            return True
    return False


@compiled
def keeps_all(
    template: Records,
    beliefs: Records,
    short_run: ShortRun,
    horizon: Horizon,
    quantile: float,
    rules: Rules,
) -> bool:
    """Whether the bound of every job of a roster is within its SLO; stops as soon as the answer is
    certain.

    A job with an SLO below 1 may share no node, and keeps it then.
    """
    if _too_uneven(template):
        return False
    count, scenarios = template.size, horizon.scenarios
    slos = np.maximum(template["slo"], 1.0)
    for k in range(count):
        if template["slo"][k] < 1.0 and shares_nodes(template, k):
            return False
    found = np.zeros((scenarios, count))
    warm_up, cycles = short_run.warm_up, short_run.cycles
    _live(template, beliefs, 0.0, 0, warm_up, cycles, rules, found[0])
    for k in range(count):
        if found[0, k] > slos[k] + short_run.margin:
            return False
    doubt = 0.0 if scenarios == 1 else 1.0
    warm_up, cycles = horizon.warm_up, horizon.cycles
    for at in range(scenarios):
        _live(template, beliefs, doubt, at, warm_up, cycles, rules, found[at])
        for k in range(count):
            if quantile >= 0.0 and at + 1 < scenarios:
                least = least_bound(found[: at + 1, k], scenarios, quantile)
                if least > slos[k] + _SURELY:
                    return False
    bound = upper_bound(found, quantile)
    return bool((bound <= slos + ROUNDING).all())
