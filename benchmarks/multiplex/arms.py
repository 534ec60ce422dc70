"""Who shares the two nodes how, and what each of the two jobs is."""

from dataclasses import dataclass
from enum import StrEnum

from harvester.contracts.ids import JobId, NodeId
from scheduler.policy.model import PhaseKind
from scheduler.policy.phases.terms import JobTerms, PhaseTerms

ROLLOUT_CORE = 0
TRAINING_CORE = 1
ROLLOUT_NODE = NodeId("rollout-0")
TRAINING_NODE = NodeId("training-0")
NODES = {PhaseKind.ROLLOUT: ROLLOUT_NODE, PhaseKind.TRAINING: TRAINING_NODE}


class Arm(StrEnum):
    SEQUENTIAL = "sequential"
    """One job after the other, each alone on both nodes."""
    NAIVE = "naive"
    """Both at once, nobody waits."""
    MULTIPLEXED = "multiplexed"
    """Both at once, a phase runs when it has its node's permit."""


REHEARSAL = "rehearsal"
"""An unmeasured step of each job: an engine's first requests are slower than all later ones."""
RUNS = (REHEARSAL, *Arm)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """One job: its length and its size. Its seed is the same in every arm."""

    name: str
    seed: int
    samples_per_prompt: int
    steps_ratio: float
    """Of the steps that the run asks for."""

    def steps(self, asked: int) -> int:
        return max(1, round(asked * self.steps_ratio))

    def job(self, run: str) -> JobId:
        """Its name at the gateway: a job of its own in each run."""
        return JobId(f"{self.name}-{run}")

    def terms(self, run: str) -> JobTerms:
        phases = tuple(PhaseTerms(kind=kind, nodes=(node,)) for kind, node in NODES.items())
        return JobTerms(job=self.job(run), phases=phases)


JOBS = (
    JobShape(name="large", seed=1, samples_per_prompt=8, steps_ratio=1.0),
    JobShape(name="small", seed=2, samples_per_prompt=4, steps_ratio=1.5),
)
