"""Worlds that break the papers' assumptions, one assumption each and all of them at once.

A variant leaves everything else as it was drawn: arrivals, SLOs, declarations and,
where durations are not its subject, durations. No planner knows which variant it runs in.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

import numpy as np

from scheduler.model import Completion
from scheduler.sim.rollmux.workload import PAPER_WORLD, PHASE_CV, SimulatedJob, World, cut_noise

Change = Callable[[SimulatedJob, np.random.Generator], SimulatedJob]

UNDIVIDED_RATIO: Final = 0.2
"""Share of the jobs with responses that all end together."""
NO_TAIL: Final = (Completion(0.98, 0.02),)
SIGMA_RANGE: Final = (0.1, 1.2)
"""Sigma of a job's lognormal response lengths: 80 % are complete after 0.83 to 0.11 of its rollout;
0.4 is nearest to the papers' half."""
RESPONSES: Final = 256
"""A rollout ends with the longest of them, at its expected quantile."""
RATIOS: Final = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
AUTOCORRELATION: Final = 0.9
"""Correlation of one iteration with the next; half of a slow spell is over after seven."""
STRAGGLER_RATIO: Final = 1 / 30
"""Rollouts that straggle."""
STRAGGLER_FACTOR: Final = 1.5
"""Factor on stragglers' durations; the result may exceed the declared maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    world: World = PAPER_WORLD
    changes: tuple[Change, ...] = ()

    def of(self, jobs: list[SimulatedJob], *, seed: int) -> list[SimulatedJob]:
        """The jobs as they are in this variant; each change has its own stream for each job."""
        changed = jobs
        for change in self.changes:
            salt = list(change.__name__.encode())
            changed = [
                change(one, np.random.Generator(np.random.PCG64([seed, at, *salt])))
                for at, one in enumerate(changed)
            ]
        return changed


def own_tail(one: SimulatedJob, rng: np.random.Generator) -> SimulatedJob:
    """The job's own curve of completion: of no tail, or of lognormal response lengths."""
    if rng.random() < UNDIVIDED_RATIO:
        return replace(one, curve=NO_TAIL)
    return replace(one, curve=lognormal_curve(float(rng.uniform(*SIGMA_RANGE))))


def lognormal_curve(sigma: float) -> tuple[Completion, ...]:
    """Completion curve of responses of lognormal lengths that begin at once and run at one
    speed."""
    quantile = NormalDist().inv_cdf
    longest = quantile(RESPONSES / (RESPONSES + 1))
    return tuple(
        Completion(float(np.exp(sigma * (quantile(ratio) - longest))), ratio) for ratio in RATIOS
    )


def means_at(one: SimulatedJob, iteration: int) -> tuple[float, float]:
    """True means of one iteration."""
    passed = min(1.0, iteration / max(1, one.iterations - 1))
    factor = 1.0 + (one.drift - 1.0) * passed
    return one.means_s[0] * factor, one.means_s[1] * factor


def autocorrelated(one: SimulatedJob, rng: np.random.Generator) -> SimulatedJob:
    """Durations with deviations that are a first-order autoregression of the same spread."""
    steps = rng.standard_normal((one.iterations, 2))
    steps[1:] *= np.sqrt(1.0 - AUTOCORRELATION**2)
    noise = np.empty_like(steps)
    noise[0] = steps[0]
    for at in range(1, len(steps)):
        noise[at] = AUTOCORRELATION * noise[at - 1] + steps[at]
    means_s = np.array([means_at(one, at) for at in range(one.iterations)], dtype=np.float64)
    rollout, training = one.job.phases
    maxima_s = (rollout.max_s, training.max_s)
    varied = cut_noise(PHASE_CV * noise, one.means_s, maxima_s)
    return replace(one, lengths_s=np.multiply(means_s, varied))


def straggling(one: SimulatedJob, rng: np.random.Generator) -> SimulatedJob:
    """Makes a rollout now and then longer than any other, and than its declaration."""
    lengths_s = one.lengths_s.copy()
    lengths_s[rng.random(one.iterations) < STRAGGLER_RATIO, 0] *= STRAGGLER_FACTOR
    return replace(one, lengths_s=lengths_s)


def irregular(one: SimulatedJob, rng: np.random.Generator) -> SimulatedJob:
    """Another completion curve in each iteration, around the job's own."""
    powers = np.exp(CURVE_POWER_SIGMA * rng.standard_normal(one.iterations))
    return replace(one, curve_powers=tuple(powers.tolist()))


CURVE_POWER_SIGMA: Final = 0.2
"""Sigma of the power of a curve's times: the papers' half is 0.43 to 0.57 in two of three
iterations."""
SLOW_TAIL_ROOM_RATIO: Final = 2.0
SLOW_MOVE_S: Final = 900.0
SLOW_START_S: Final = 20.0
SYNC_S: Final = 20.0

AS_PUBLISHED: Final = "as_published"
VARIANTS: Final = MappingProxyType(
    {
        AS_PUBLISHED: Variant(),
        "own_tails": Variant(changes=(own_tail,)),
        "slow_moves": Variant(world=World(move_s=SLOW_MOVE_S)),
        "slow_starts": Variant(world=World(warm_start_s=SLOW_START_S)),
        "sync": Variant(world=World(sync_s=SYNC_S)),
        "autocorrelated": Variant(changes=(autocorrelated,)),
        "stragglers": Variant(changes=(straggling,)),
        "irregular_tails": Variant(changes=(irregular,)),
        "slow_tails": Variant(
            world=World(tail_room_ratio=SLOW_TAIL_ROOM_RATIO), changes=(irregular,)
        ),
        "all": Variant(
            world=World(move_s=SLOW_MOVE_S, warm_start_s=SLOW_START_S, sync_s=SYNC_S),
            changes=(own_tail, autocorrelated, straggling),
        ),
    }
)
