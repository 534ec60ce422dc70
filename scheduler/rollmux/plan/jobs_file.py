"""`jobs.yaml`: which jobs there are, what nodes cost, and which risk is accepted.

Checked whole before anything is planned; every mistake is named by its field and its line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from pydantic import ConfigDict, Field

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
from scheduler.rollmux.cluster.job_limits import (
    BYTES_MAX,
    CURVE_MAX,
    GB,
    JOB_NODES_MAX,
    SECONDS_MAX,
    SECONDS_MIN,
    SEEN_MAX,
    SLO_MAX,
)
from scheduler.rollmux.planner.group_table import NodeType

JOBS_MAX: Final = 200
POOL_NODES_MAX: Final = 10_000
HOST_GB_MAX: Final = BYTES_MAX / GB

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(ge=SECONDS_MIN, le=SECONDS_MAX)]
Ratio = Annotated[float, Field(ge=0, le=1)]


def defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Defaults of a record's fields by name, for the settings that fill it."""
    return {one.name: one.default for one in msgspec.structs.fields(struct)}


_CONTROL: Final = defaults(ClusterConfig)
_JOB: Final = defaults(JobSpec)
_PHASE: Final = defaults(PhaseSpec)


class StrictSettings(FrozenSettings):
    model_config = ConfigDict(allow_inf_nan=False)


class NodeTypeSettings(StrictSettings):
    """Type of a pool's nodes."""

    type: Name
    accelerators: int = Field(default=8, ge=1, le=1024)
    price_per_hour: float = Field(ge=0, le=1e6)
    """Price of the whole node."""
    host_gb: float = Field(gt=0, le=HOST_GB_MAX)
    """Host memory in which inactive jobs stay resident: a hard limit."""

    @property
    def as_type(self) -> NodeType:
        return NodeType(
            type=self.type,
            accelerators=self.accelerators,
            price_per_hour=self.price_per_hour,
            host_bytes=int(self.host_gb * GB),
        )


class NodeSettings(NodeTypeSettings):
    """The nodes of one pool, all of one type."""

    count: int | None = Field(default=None, ge=0, le=POOL_NODES_MAX)
    """Number of nodes; without it, as many as the plan needs."""


class PoolSettings(StrictSettings):
    rollout: NodeSettings
    training: NodeSettings


class DurationSettings(StrictSettings):
    max_s: Seconds
    """Longest duration, with every response at its token limit, in s."""
    mean_s: Seconds | None = None
    """Measured alone on its nodes; without it the mean is believed to be half of `max_s` to all."""
    cv: Ratio = _PHASE["cv"]
    """Coefficient of variation of one phase."""
    seen: int = Field(default=_PHASE["seen"], ge=1, le=SEEN_MAX)
    """Phases that `mean_s` is of: fewer leave more doubt."""


class PhaseSettings(DurationSettings):
    nodes: int = Field(default=_PHASE["nodes"], ge=1, le=JOB_NODES_MAX)


class RolloutSettings(PhaseSettings):
    divisible: bool = _PHASE["divisible"]
    """The job's engines may begin on the part of a node that another tail leaves, and gather their
    own tail on a part."""


class PlannedJobSettings(StrictSettings):
    id: Name
    tenant: Name = _JOB["tenant"]
    slo: float = Field(ge=1, le=SLO_MAX)
    """Largest allowed slow-down: duration on shared nodes over duration on dedicated nodes."""
    host_gb: float = Field(ge=0, le=HOST_GB_MAX)
    """State that stays resident on every node of the job."""
    rollout: RolloutSettings
    training: PhaseSettings
    harvesting: bool = _JOB["harvesting"]
    """The job's rollouts use leases where a control allows them; no plan counts on a lease."""
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
        points = self.responses if kind is PhaseKind.ROLLOUT else ()
        # A weight sync has no nodes.
        fields = {"nodes": 0, **given.model_dump()}
        return PhaseSpec(kind=kind, curve=tuple(Completion(*each) for each in points), **fields)


class RiskSettings(StrictSettings):
    risk: float = Field(default=_CONTROL["risk"], ge=0.001, le=0.5)
    """Accepted probability that a forecast slow-down exceeds its SLO."""
    slo_counts_queueing: bool = _CONTROL["slo_counts_queueing"]
    """An SLO counts from the placement on; true: from the submission on. No job waits in a plan."""


class PlanSettings(RiskSettings):
    nodes: PoolSettings
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
