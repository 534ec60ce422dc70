"""`jobs.yaml`: which jobs there are, what nodes cost, and which risk is accepted.

Checked whole before anything is planned; every mistake is named by its field and its line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NAME_PATTERN, JobId, TenantId
from harvester.platform.yaml_file import (
    FrozenSettings,
    Where,
    named,
    parse_fields,
    read_text,
    validated,
)
from scheduler.model import Completion, JobSpec, PhaseKind, PhaseSpec, Pool
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.cluster.submission import CURVE_MAX
from scheduler.rollmux.planner.group_table import NodeType

GB: Final = 10**9
JOBS_MAX: Final = 200

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class NodeSettings(FrozenSettings):
    """Type of the nodes of one pool."""

    type: Name
    accelerators: int = Field(default=8, ge=1, le=1024)
    price_per_hour: float = Field(ge=0, le=1e6)
    """Price of the whole node."""
    host_gb: float = Field(gt=0, le=1e6)
    """Host memory in which inactive jobs stay resident."""
    count: int | None = Field(default=None, ge=0, le=10_000)
    """Number of nodes; without it, as many as the plan needs."""

    @property
    def as_type(self) -> NodeType:
        return NodeType(
            type=self.type,
            accelerators=self.accelerators,
            price_per_hour=self.price_per_hour,
            host_bytes=int(self.host_gb * GB),
        )


class PoolSettings(FrozenSettings):
    rollout: NodeSettings
    training: NodeSettings


class DurationSettings(FrozenSettings):
    max_s: Seconds
    """Longest duration, with every response at its token limit, in s."""
    mean_s: Seconds | None = None
    """Measured alone on its nodes; without it the mean is believed to be half of `max_s` to all."""
    cv: float = Field(default=0.1, ge=0, le=1)
    """Coefficient of variation of one phase."""
    seen: int = Field(default=40, ge=1, le=1000)
    """Phases that `mean_s` is of: fewer leave more doubt."""


class PhaseSettings(DurationSettings):
    nodes: int = Field(default=1, ge=1, le=8)


class RolloutSettings(PhaseSettings):
    divisible: bool = True
    """Its engines may begin on the part of a node that another's tail leaves, and bring their own
    tail together on a part."""


class PlannedJobSettings(FrozenSettings):
    id: Name
    tenant: Name = "default"
    slo: float = Field(ge=1, le=100)
    """Tolerated slow-down: time in company over time alone."""
    host_gb: float = Field(ge=0, le=1e6)
    """State that stays resident on every node of the job."""
    rollout: RolloutSettings
    training: PhaseSettings
    harvesting: bool = False
    """Its rollouts use leases where a control allows them; no plan counts on one."""
    sync: DurationSettings | None = None
    """New weights on their way to the rollout engines, where the next rollout waits for them."""
    responses: tuple[tuple[Ratio, Ratio], ...] = Field(default=(), max_length=CURVE_MAX)
    """Completion curve: pairs of the rollout's passed time and the completed share. Without it, the
    rollout is taken to fill its nodes to its end."""

    @property
    def phases(self) -> tuple[tuple[PhaseKind, DurationSettings], ...]:
        """Phases in the order of an iteration."""
        sync = () if self.sync is None else ((PhaseKind.SYNC, self.sync),)
        return (PhaseKind.ROLLOUT, self.rollout), (PhaseKind.TRAINING, self.training), *sync

    @property
    def spec(self) -> JobSpec:
        """The job as a control and a plan's planner take it."""
        return JobSpec(
            job=JobId(self.id),
            tenant=TenantId(self.tenant),
            slo=self.slo,
            host_bytes=int(self.host_gb * GB),
            harvesting=self.harvesting,
            phases=tuple(self._declared(kind, given) for kind, given in self.phases),
        )

    def _declared(self, kind: PhaseKind, given: DurationSettings) -> PhaseSpec:
        curve = self.responses if kind is PhaseKind.ROLLOUT else ()
        return PhaseSpec(
            kind=kind,
            max_s=given.max_s,
            nodes=given.nodes if isinstance(given, PhaseSettings) else 0,
            mean_s=given.mean_s,
            cv=given.cv,
            seen=given.seen,
            divisible=not isinstance(given, RolloutSettings) or given.divisible,
            curve=tuple(Completion(*point) for point in curve),
        )


class PlanSettings(FrozenSettings):
    nodes: PoolSettings
    risk: float = Field(default=0.25, ge=0.001, le=0.5)
    """Accepted probability that a forecast slow-down exceeds its SLO."""
    slo_counts_queueing: bool = False
    """The same setting of the control that will run the jobs; no job waits in a plan."""
    jobs: tuple[PlannedJobSettings, ...] = Field(min_length=1, max_length=JOBS_MAX)
    """Jobs in the order of their arrival."""

    @property
    def as_control(self) -> ClusterConfig:
        """A control with these settings and else the defaults; its nodes have no names."""
        pools = (self.nodes.rollout.as_type, self.nodes.training.as_type)
        rollout, training = (PoolNodes(type=kind, names=()) for kind in pools)
        return ClusterConfig(
            rollout=rollout,
            training=training,
            risk=self.risk,
            slo_counts_queueing=self.slo_counts_queueing,
        )

    @property
    def supply(self) -> dict[Pool, int]:
        """Number of nodes by pool; a pool without an entry is unlimited."""
        sides = ((Pool.ROLLOUT, self.nodes.rollout), (Pool.TRAINING, self.nodes.training))
        return {pool: one.count for pool, one in sides if one.count is not None}


def read_jobs(path: Path) -> PlanSettings:
    """Raises ConfigError that names each wrong field with its line."""
    text = read_text(path)
    settings = validated(PlanSettings, parse_fields(text, path), text, path)
    faults = [named(where, message, text, path) for where, message in _faults(settings)]
    if faults:
        raise ConfigError("; ".join(faults))
    return settings


def _faults(settings: PlanSettings) -> Iterator[tuple[Where, str]]:
    """Faults that span several fields."""
    first: dict[str, int] = {}
    pools = (("rollout", settings.nodes.rollout), ("training", settings.nodes.training))
    if settings.nodes.rollout.type == settings.nodes.training.type:
        yield ("nodes", "training", "type"), "the pools need types of different names"
    for at, job in enumerate(settings.jobs):
        if first.setdefault(job.id, at) != at:
            yield ("jobs", at, "id"), f"{job.id} is the name of jobs.{first[job.id]} too"
        for name, nodes in pools:
            if job.host_gb > nodes.host_gb:
                yield (
                    ("jobs", at, "host_gb"),
                    f"{job.host_gb:g} GB do not fit on a {name} node of {nodes.host_gb:g} GB",
                )
        for kind, phase in job.phases:
            if phase.mean_s is not None and phase.mean_s > phase.max_s:
                yield (
                    ("jobs", at, kind.value, "mean_s"),
                    f"{phase.mean_s:g} is more than max_s, {phase.max_s:g}",
                )
        if list(job.responses) != sorted(job.responses):
            yield ("jobs", at, "responses"), "both numbers must rise from pair to pair"
