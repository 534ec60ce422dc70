"""Mixes of jobs by name: W1 as the papers have it, W2 with wide jobs, W3 of another kind.

W3 was written down before any planner ran it and fits none of W1's proportions: sweeps of short
jobs that arrive in bursts, agentic rollouts with long tails and wide spread, more training-heavy
jobs, jobs of two rollout nodes and one training node, and an SLO of 1.02 to 1.3 for a third.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from benchmarks.rollmux.variants import lognormal_curve
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, TenantId
from scheduler.model import JobSpec
from scheduler.rollmux.cluster.job_limits import GB
from scheduler.sim.rollmux.workload import (
    JOBS,
    TRAINING_OF_MAX,
    Drift,
    SimulatedJob,
    drawn_lengths,
    phases,
    ratio_of_kind,
    w1,
)

W2_WIDE_RATIO: Final = 0.1

SPAN_S: Final = 110 * 3600.0
BURST_JOBS: Final = 5.0
"""Mean of a burst, geometric; its jobs come within minutes."""
BURST_GAP_S: Final = 120.0
LIFE_MEAN_S: Final = 8 * 3600.0
LIFE_SIGMA: Final = 1.0
ITERATION_S: Final = (120.0, 1500.0)
"""Log-uniform."""
KINDS: Final = (0.25, 0.35)
"""Balanced, rollout-heavy; the rest is training-heavy."""
WIDE_RATIO: Final = 0.15
AGENTIC_RATIO: Final = 0.5
TIGHT_RATIO: Final = 1 / 3
TIGHT_SLO: Final = (1.02, 1.3)
USUAL_SLO: Final = (1.3, 2.5)
HOST_GB: Final = (50.0, 700.0)
TRAINING_CV: Final = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutKind:
    cv: float
    of_max: float
    """Mean over the declared maximum."""
    sigma: tuple[float, float]
    """Range of the sigma of lognormal response lengths; the larger, the longer the tail."""


PLAIN: Final = RolloutKind(cv=0.08, of_max=0.8, sigma=(0.1, 0.5))
AGENTIC: Final = RolloutKind(cv=0.2, of_max=0.55, sigma=(0.6, 1.2))


class Mix(StrEnum):
    W1 = "w1"
    W2 = "w2"
    W3 = "w3"

    def drawn(
        self, seed: int, *, drift: Drift = Drift.NONE, jobs: int = JOBS
    ) -> list[SimulatedJob]:
        """The jobs of one seed.

        Raises ConfigError for a drift of W3, which has none.
        """
        if self is Mix.W3:
            if drift is not Drift.NONE:
                raise ConfigError("W3 does not drift")
            return w3(seed, jobs=jobs)
        return w1(seed, drift=drift, wide_ratio=W2_WIDE_RATIO if self is Mix.W2 else 0.0, jobs=jobs)


def w3(seed: int, *, jobs: int = JOBS) -> list[SimulatedJob]:
    rng = np.random.Generator(np.random.PCG64([3, seed]))
    arrivals_s = _bursts(rng, jobs)
    return [_job(rng, index, arrivals_s[index]) for index in range(jobs)]


def _bursts(rng: np.random.Generator, jobs: int) -> list[float]:
    arrivals_s: list[float] = []
    while len(arrivals_s) < jobs:
        begins_s = float(rng.uniform(0.0, SPAN_S * jobs / JOBS))
        size = int(rng.geometric(1.0 / BURST_JOBS))
        gaps_s = rng.exponential(BURST_GAP_S, size)
        arrivals_s += (begins_s + np.cumsum(gaps_s)).tolist()
    return sorted(arrivals_s[:jobs])


def _job(rng: np.random.Generator, index: int, arrival_s: float) -> SimulatedJob:
    life_s = float(rng.lognormal(np.log(LIFE_MEAN_S) - LIFE_SIGMA**2 / 2, LIFE_SIGMA))
    iteration_s = float(np.exp(rng.uniform(*np.log(ITERATION_S))))
    ratio = ratio_of_kind(rng, KINDS)
    means_s = (iteration_s * ratio / (1 + ratio), iteration_s / (1 + ratio))
    kind = AGENTIC if rng.random() < AGENTIC_RATIO else PLAIN
    maxima_s = (means_s[0] / kind.of_max, means_s[1] / TRAINING_OF_MAX)
    tight = rng.random() < TIGHT_RATIO
    slo = float(rng.uniform(*(TIGHT_SLO if tight else USUAL_SLO)))
    rollout_nodes = 2 if rng.random() < WIDE_RATIO else 1
    host_bytes = int(rng.uniform(*HOST_GB) * GB)
    curve = lognormal_curve(float(rng.uniform(*kind.sigma)))
    own = np.random.Generator(np.random.PCG64(int(rng.integers(2**63))))
    return SimulatedJob(
        job=JobSpec(
            job=JobId(f"job-{index:04}"),
            tenant=TenantId("simulated"),
            phases=phases(*maxima_s, rollout_nodes, 1),
            host_bytes=host_bytes,
            slo=slo,
        ),
        arrival_s=arrival_s,
        lengths_s=drawn_lengths(
            own,
            means_s,
            maxima_s,
            iterations=max(1, round(life_s / iteration_s)),
            cv=(kind.cv, TRAINING_CV),
            drift=1.0,
        ),
        means_s=means_s,
        curve=curve,
    )
