"""Files of a planning control: `nodes.yaml` with its machines and assumptions, and jobs to submit.

Checked whole before anything is started; every mistake is named by its field and its line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NodeId
from harvester.platform.yaml_file import Where, named, parse_fields, read_text, validated
from scheduler.model import JobSpec
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.cluster.job_limits import spec_fault
from scheduler.rollmux.plan.jobs_file import (
    JOBS_MAX,
    POOL_NODES_MAX,
    Name,
    NodeTypeSettings,
    PlannedJobSettings,
    PoolSettings,
    RiskSettings,
    StrictSettings,
    defaults,
)

Seconds = Annotated[float, Field(ge=0, le=1e6)]
_CONTROL: Final = defaults(ClusterConfig)


class NamedNodes(NodeTypeSettings):
    """The machines of one pool, all of one type."""

    names: tuple[Name, ...] = Field(min_length=1, max_length=POOL_NODES_MAX)
    """Names that jobs see; a node is the unit that one job holds whole at a time."""

    @property
    def as_pool(self) -> PoolNodes:
        return PoolNodes(type=self.as_type, names=tuple(map(NodeId, self.names)))


class NamedPools(StrictSettings):
    rollout: NamedNodes
    training: NamedNodes


class ClusterSettings(RiskSettings):
    nodes: NamedPools
    cold_start_s: Seconds = _CONTROL["cold_start_s"]
    """A job's first load from storage; alone it would take that too."""
    warm_start_s: Seconds = _CONTROL["warm_start_s"]
    """A phase's start after another job's, from host memory; nothing is loaded ahead."""
    move_s: Seconds = _CONTROL["move_s"]
    """Time that a job loses by a move to other nodes."""
    migrate_s: Seconds = _CONTROL["migrate_s"]
    """Time that moving a tail costs its job, and the job that starts then."""
    tail_ratio: float | None = Field(default=_CONTROL["tail_ratio"], gt=0, le=1)
    """Completed share from which every tail may move, as RollMux has it with 0.8; without, each
    job's own."""
    review_s: float = Field(default=_CONTROL["review_s"], ge=0.1, le=86_400)
    """Period of reviews for endangered SLOs and savings, in s."""
    gone_s: float = Field(default=_CONTROL["gone_s"], ge=1, le=1e6)
    """A placed job that is silent for this long has left."""
    harvesting: bool = _CONTROL["harvesting"]
    """Jobs that ask for it may use leases of serving nodes in their rollouts."""

    @property
    def as_config(self) -> ClusterConfig:
        return ClusterConfig(
            rollout=self.nodes.rollout.as_pool,
            training=self.nodes.training.as_pool,
            **self.model_dump(exclude={"nodes"}),
        )


def read_nodes(path: Path) -> ClusterConfig:
    """Raises ConfigError that names each wrong field with its line."""
    text = read_text(path)
    settings = validated(ClusterSettings, parse_fields(text, path), text, path)
    faults = [named(where, message, text, path) for where, message in _faults(settings.nodes)]
    if faults:
        raise ConfigError("; ".join(faults))
    return settings.as_config


def _faults(nodes: NamedPools) -> Iterator[tuple[Where, str]]:
    """Faults that span several fields."""
    if nodes.rollout.type == nodes.training.type:
        yield ("nodes", "training", "type"), "the pools need types of different names"
    first: dict[str, str] = {}
    for pool, names in (("rollout", nodes.rollout.names), ("training", nodes.training.names)):
        for at, name in enumerate(names):
            place = f"nodes.{pool}.names.{at}"
            if first.setdefault(name, place) != place:
                yield ("nodes", pool, "names", at), f"{name} is the name of {first[name]} too"


class JobsFile(StrictSettings):
    """A file of `rosemux plan`, whose other settings are not read: the control has its own."""

    jobs: tuple[PlannedJobSettings, ...] = Field(min_length=1, max_length=JOBS_MAX)
    nodes: PoolSettings | None = None
    risk: float | None = None
    slo_counts_queueing: bool | None = None


def read_specs(path: Path) -> tuple[JobSpec, ...]:
    """Nodes in the file's order. Raises ConfigError that names each wrong field with its line."""
    text = read_text(path)
    settings = validated(JobsFile, parse_fields(text, path), text, path)
    found = tuple(job.spec for job in settings.jobs)
    for given in found:
        fault = spec_fault(given)
        if fault:
            raise ConfigError(f"{path}: job {given.job}: {fault}")
    return found
