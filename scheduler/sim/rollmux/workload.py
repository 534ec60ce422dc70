"""Workloads W1 and W2: arrivals, and the solo duration of every phase of every job.

The draws are the truth that no planner sees: a planner sees `SimulatedJob.job`, whose
phases carry declared maxima only. One seed, one workload; the drift changes the means over a job's
life and nothing else. A `World` has the durations of switching and loading.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from harvester.contracts.ids import JobId, TenantId
from scheduler.model import Completion, JobSpec, PhaseKind, PhaseSpec, Pool
from scheduler.rollmux.beliefs.tail import ROOM_RATIO
from scheduler.rollmux.cluster.job_limits import GB
from scheduler.rollmux.planner.group_table import NodeType

Lengths = npt.NDArray[np.float64]
"""Solo seconds, `[iteration, (rollout, training)]`."""

JOBS: Final = 200
SPAN_S: Final = 340 * 3600.0
LIFE_MEAN_S: Final = 27.9 * 3600.0
LIFE_SIGMA: Final = 0.8
PHASE_CV: Final = 0.08
KINDS: Final = (0.3, 0.6)
"""Balanced, rollout-heavy; the rest is training-heavy."""
ROLLOUT_OF_MAX: Final = 0.8
TRAINING_OF_MAX: Final = 0.7
ROLLOUT_ACCELERATORS: Final = 8
"""Accelerators of one node."""
PAPER_CURVE: Final = (Completion(0.5, 0.8),)
"""The papers' assumption: half of a rollout's time completes 80 % of its responses."""

H20_PER_HOUR: Final = 1.85 * 8
H800_PER_HOUR: Final = 5.28 * 8
NODE_TYPES: Final = {
    Pool.ROLLOUT: NodeType(
        type="h20",
        accelerators=ROLLOUT_ACCELERATORS,
        price_per_hour=H20_PER_HOUR,
        host_bytes=2000 * GB,
    ),
    Pool.TRAINING: NodeType(
        type="h800", accelerators=8, price_per_hour=H800_PER_HOUR, host_bytes=2000 * GB
    ),
}


_SYNC_MAX_RATIO: Final = 2.0
"""Declared maximum of a weight sync, over its duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The published values are also the defaults of a control's settings; if they are wrong, the
    control measures moves and warm starts."""

    cold_start_s: float = 135.0
    """A job's state from storage: half of it in its first rollout, half in its first training."""
    warm_start_s: float = 5.0
    """A resident state back on its node's accelerators, and another job's off them."""
    move_s: float = 300.0
    """A job's state to its new nodes, from its checkpoint, by halves as at first: its old nodes are
    free at once."""
    migrate_s: float = 3.0
    """A rollout's tail to a share of its accelerators; the next rollout there waits as long."""
    sync_s: float = 0.0
    """New weights to the rollout engines, once an iteration; holds no node."""
    tail_room_ratio: float = ROOM_RATIO
    """Accelerators that a moved tail needs to be as fast as at home, over its share of the
    responses."""


PAPER_WORLD = World()
"""RollMux's published values; it has none for weight sync, and its iterations have no sync."""


class Drift(StrEnum):
    NONE = "none"
    INCREASING = "increasing"
    DECREASING = "decreasing"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    job: JobSpec
    arrival_s: float
    lengths_s: Lengths
    means_s: tuple[float, float]
    """True means of the first iteration."""
    drift: float = 1.0
    """Factor on the means in the last iteration."""
    curve: tuple[Completion, ...] = PAPER_CURVE
    """Completion curve over a rollout's solo time; empty without a tail."""
    curve_powers: tuple[float, ...] = ()
    """Power of the curve's times in each iteration: 1, and where it is empty, is the curve itself;
    above 1 responses complete earlier."""

    @property
    def iterations(self) -> int:
        return len(self.lengths_s)

    def solo_s(self, world: World) -> float:
        """Solo time from arrival to end, in s: cold start, phases and weight syncs."""
        return world.cold_start_s + float(self.iterations_s(world).sum())

    def iterations_s(self, world: World) -> Lengths:
        """Solo seconds of each iteration."""
        return np.asarray(self.lengths_s.sum(axis=1) + world.sync_s)


def phases(
    rollout_max_s: float, training_max_s: float, rollout_nodes: int, training_nodes: int
) -> tuple[PhaseSpec, PhaseSpec]:
    """Phases as a planner sees them: the declared maxima and no mean."""
    return (
        PhaseSpec(kind=PhaseKind.ROLLOUT, max_s=rollout_max_s, nodes=rollout_nodes),
        PhaseSpec(kind=PhaseKind.TRAINING, max_s=training_max_s, nodes=training_nodes),
    )


def drawn_lengths(
    rng: np.random.Generator,
    means_s: tuple[float, float],
    maxima_s: tuple[float, float],
    *,
    iterations: int,
    cv: float | tuple[float, float],
    drift: float,
) -> Lengths:
    """Phase durations around means that drift linearly to `drift` times their first value.

    Normal, cut off at the declared maximum, which drifts along.
    """
    factors = np.linspace(1.0, drift, iterations)[:, None]
    noise = np.array(cv) * rng.standard_normal((iterations, 2))
    return np.asarray(np.array(means_s) * cut_noise(noise, means_s, maxima_s) * factors)


def cut_noise(
    noise: Lengths, means_s: tuple[float, float], maxima_s: tuple[float, float]
) -> Lengths:
    """Factors on the means, from deviations around 0: nothing beyond the declared maximum."""
    return np.asarray(np.clip(1.0 + noise, 0.2, np.array(maxima_s) / np.array(means_s)))


def ratio_of_kind(rng: np.random.Generator, kinds: tuple[float, float]) -> float:
    """Rollout to training time; `kinds` are the shares of balanced and of rollout-heavy jobs."""
    kind, (balanced, rollout_heavy) = rng.random(), kinds
    if kind < balanced:
        return float(rng.uniform(0.8, 1.25))
    heavy = kind < balanced + rollout_heavy
    return float(rng.uniform(2.0, 4.0) if heavy else rng.uniform(0.3, 0.6))


def _drift(rng: np.random.Generator, drift: Drift) -> float:
    up, down, which = rng.uniform(1.2, 2.0), rng.uniform(0.4, 0.8), rng.random()
    if drift is Drift.INCREASING or (drift is Drift.MIXED and which < 0.5):
        return float(up)
    return float(down) if drift in (Drift.DECREASING, Drift.MIXED) else 1.0


def w1(
    seed: int, *, drift: Drift = Drift.NONE, wide_ratio: float = 0.0, jobs: int = JOBS
) -> list[SimulatedJob]:
    """The fixed workload; `wide_ratio` of the jobs need two nodes of each pool (W2: 0.1)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    arrivals_s = np.sort(rng.uniform(0.0, SPAN_S * jobs / JOBS, jobs))
    return [
        _job(rng, index, float(arrivals_s[index]), drift=drift, wide_ratio=wide_ratio)
        for index in range(jobs)
    ]


def _job(
    rng: np.random.Generator, index: int, arrival_s: float, *, drift: Drift, wide_ratio: float
) -> SimulatedJob:
    location = np.log(LIFE_MEAN_S) - LIFE_SIGMA**2 / 2
    life_s = float(rng.lognormal(location, LIFE_SIGMA))
    iteration_s = float(rng.uniform(400.0, 700.0))
    ratio = ratio_of_kind(rng, KINDS)
    means_s = (iteration_s * ratio / (1 + ratio), iteration_s / (1 + ratio))
    maxima_s = (means_s[0] / ROLLOUT_OF_MAX, means_s[1] / TRAINING_OF_MAX)
    host_gb, slo, wide = rng.uniform(200, 700), rng.uniform(1, 2), rng.random() < wide_ratio
    nodes = 2 if wide else 1
    # Each job has its own stream for durations, so that a drift leaves everything else as it was.
    own = np.random.Generator(np.random.PCG64(int(rng.integers(2**63))))
    factor = _drift(rng, drift)
    return SimulatedJob(
        job=JobSpec(
            job=JobId(f"job-{index:04}"),
            tenant=TenantId("simulated"),
            phases=phases(*maxima_s, nodes, nodes),
            host_bytes=int(host_gb * GB),
            slo=float(slo),
        ),
        arrival_s=arrival_s,
        lengths_s=drawn_lengths(
            own,
            means_s,
            maxima_s,
            iterations=max(1, round(life_s / iteration_s)),
            cv=PHASE_CV,
            drift=factor,
        ),
        means_s=means_s,
        drift=factor,
    )


def spec_of(one: SimulatedJob, world: World) -> JobSpec:
    """The job as submitted in that world, with its weight sync.

    It harvests, which changes nothing where the control allows no leases.
    """
    sync = PhaseSpec(kind=PhaseKind.SYNC, max_s=_SYNC_MAX_RATIO * world.sync_s, nodes=0)
    phases = (*one.job.phases, sync) if world.sync_s else one.job.phases
    return replace(one.job, phases=phases, harvesting=True)
