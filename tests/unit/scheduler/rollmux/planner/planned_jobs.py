"""Jobs and node types for tests of the planner."""

from collections.abc import Iterable

from msgspec.structs import replace

from harvester.contracts.ids import JobId, TenantId
from scheduler.model import Completion, JobSpec, PhaseKind, PhaseSpec, Pool
from scheduler.rollmux.planner.group_effects import AssignNodes, PlacementDecision
from scheduler.rollmux.planner.group_table import NodeType

TYPES = {
    Pool.ROLLOUT: NodeType(type="r", accelerators=8, price_per_hour=15.0, host_bytes=2000),
    Pool.TRAINING: NodeType(type="t", accelerators=8, price_per_hour=42.0, host_bytes=2000),
}


def planned_job(
    name: str,
    rollout_s: float,
    training_s: float,
    *,
    slo: float = 1.6,
    host: int = 400,
    nodes: int = 1,
) -> JobSpec:
    """Means are what 0.8 and 0.7 of the declared maxima are, as in W1."""
    kinds = ((PhaseKind.ROLLOUT, rollout_s / 0.8), (PhaseKind.TRAINING, training_s / 0.7))
    return JobSpec(
        job=JobId(name),
        tenant=TenantId("t"),
        phases=tuple(PhaseSpec(kind=kind, max_s=most, nodes=nodes) for kind, most in kinds),
        host_bytes=host,
        slo=slo,
    )


def with_curve(job: JobSpec, *curve: Completion) -> JobSpec:
    """The job with a declared completion of its rollouts."""
    rollout, training = job.phases
    return replace(job, phases=(replace(rollout, curve=curve), training))


def moves(effects: Iterable[AssignNodes]) -> list[AssignNodes]:
    return _places(effects, PlacementDecision.MOVED)


def restarts(effects: Iterable[AssignNodes]) -> list[AssignNodes]:
    return _places(effects, PlacementDecision.RESTARTED)


def _places(effects: Iterable[AssignNodes], decision: PlacementDecision) -> list[AssignNodes]:
    return [each for each in effects if each.decision is decision]
