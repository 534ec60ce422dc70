"""The arms' sharing of the nodes, and the shapes of the two jobs."""

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.testbed.interleaving import interleaved
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms

ROLLOUT_CORE = 0
TRAINING_CORE = 1
SERVING_CORE = TRAINING_CORE
"""The serving node has no core of its own: the core is idle while no job trains, and production is
idle most of the time. Core 0 has no idle time to lend."""
TRAINER_NICE = 15
"""Trainers stand for another machine: production goes before them, and they before the guest. At
least so nice: it is what Ray gives its workers."""
ROLLOUT_NODE = NodeId("rollout-0")
TRAINING_NODE = NodeId("training-0")
NODES = {PhaseKind.ROLLOUT: ROLLOUT_NODE, PhaseKind.TRAINING: TRAINING_NODE}


class MultiplexArm(StrEnum):
    SEQUENTIAL = "sequential"
    """One job after the other, each alone on both nodes."""
    MULTIPLEXED = "multiplexed"
    """Both at once, a phase runs when it has its node's permit."""
    SERVING = "serving"
    """Like multiplexed, with production serving on its node; nothing is leased."""
    LEASED = "leased"
    """Like serving, and the job that rolls out leases production's idle capacity."""
    NAIVE = "naive"
    """Both at once, without permits."""


PREPARATION = "preparation"
"""An unmeasured step of each job: an engine's first requests are slower than all later ones."""
PERMITTED = frozenset({MultiplexArm.MULTIPLEXED, MultiplexArm.SERVING, MultiplexArm.LEASED})
BESIDE_PRODUCTION = (MultiplexArm.SERVING, MultiplexArm.LEASED)


@dataclass(frozen=True, slots=True)
class Run:
    """One arm of one round, or the preparation."""

    arm: MultiplexArm | None
    round: int = 0

    @property
    def name(self) -> str:
        return PREPARATION if self.arm is None else f"{self.arm}-{self.round}"

    @property
    def permitted(self) -> bool:
        return self.arm in PERMITTED

    @property
    def leases(self) -> bool:
        """True in the preparation too: an untried guest would learn one token at a time."""
        return self.arm in (None, MultiplexArm.LEASED)


def runs(arms: tuple[MultiplexArm, ...], rounds: int) -> tuple[Run, ...]:
    return tuple(Run(arm, number) for arm, number in interleaved(arms, rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """One job: its length and its size. Its seed is the same in every arm."""

    name: str
    seed: int
    samples_per_prompt: int
    steps_ratio: float
    """Steps of the job, over the steps that the run asks for."""

    def steps(self, full: int) -> int:
        return max(1, round(full * self.steps_ratio))

    def job(self, run: Run) -> JobId:
        """Its name at the gateway: a job of its own in each run."""
        return JobId(f"{self.name}-{run.name}")

    def terms(self, run: Run) -> JobTerms:
        phases = (PhaseTerms(kind=kind, nodes=(node,)) for kind, node in NODES.items())
        return JobTerms(job=self.job(run), phases=tuple(phases))


JOBS = (
    JobShape(name="large", seed=1, samples_per_prompt=8, steps_ratio=1.0),
    JobShape(name="small", seed=2, samples_per_prompt=4, steps_ratio=1.5),
)
