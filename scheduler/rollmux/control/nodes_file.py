"""Files of a planning control: `nodes.yaml` with its machines and assumptions, and jobs to submit.

Checked whole before anything is started; every mistake is named by its field and its line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NAME_PATTERN, NodeId
from harvester.platform.yaml_file import (
    FrozenSettings,
    Where,
    named,
    parse_fields,
    read_text,
    validated,
)
from scheduler.model import JobSpec
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.cluster.submission import submission_fault
from scheduler.rollmux.plan.jobs_file import JOBS_MAX, PlannedJobSettings, PoolSettings
from scheduler.rollmux.planner.group_table import NodeType

GB: Final = 10**9
NODES_MAX: Final = 10_000

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class NamedNodes(FrozenSettings):
    """The nodes of one pool, all of one type."""

    type: Name
    names: tuple[Name, ...] = Field(min_length=1, max_length=NODES_MAX)
    """Names that jobs see; a node is the unit that one job holds whole at a time."""
    accelerators: int = Field(default=8, ge=1, le=1024)
    price_per_hour: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    """Price of the whole node."""
    host_gb: float = Field(gt=0, le=1e6, allow_inf_nan=False)
    """Host memory in which inactive jobs stay resident: a hard limit."""

    @property
    def as_pool(self) -> PoolNodes:
        return PoolNodes(
            type=NodeType(
                type=self.type,
                accelerators=self.accelerators,
                price_per_hour=self.price_per_hour,
                host_bytes=int(self.host_gb * GB),
            ),
            names=tuple(map(NodeId, self.names)),
        )


class NamedPools(FrozenSettings):
    rollout: NamedNodes
    training: NamedNodes


class ClusterSettings(FrozenSettings):
    nodes: NamedPools
    risk: float = Field(default=0.25, ge=0.001, le=0.5)
    """Accepted probability that a forecast slow-down exceeds its SLO."""
    slo_counts_queueing: bool = False
    """An SLO counts from the placement on; true: from the submission on."""
    cold_start_s: Seconds = 135.0
    """A job's first load from storage; alone it would take that too."""
    warm_start_s: Seconds = 5.0
    """A phase's start after another job's, from host memory."""
    move_s: Seconds = 300.0
    """Time that a job loses by a move to other nodes."""
    migrate_s: Seconds = 3.0
    """Time that moving a tail costs its job, and the job that starts then."""
    tail_ratio: float | None = Field(default=None, gt=0, le=1)
    """Completed share from which every tail may move; without, each job's own."""
    review_s: float = Field(default=60.0, ge=0.1, le=86_400)
    """Period of reviews for endangered SLOs and savings, in s."""
    gone_s: float = Field(default=900.0, ge=1, le=1e6)
    """A placed job that is silent for this long has left."""
    harvesting: bool = False
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


class JobsFile(FrozenSettings):
    """A file of `rosemux plan`, whose other settings are not read: the control has its own."""

    jobs: tuple[PlannedJobSettings, ...] = Field(min_length=1, max_length=JOBS_MAX)
    nodes: PoolSettings | None = None
    risk: float | None = None
    slo_counts_queueing: bool | None = None


def read_submissions(path: Path) -> tuple[JobSpec, ...]:
    """In the order of the file. Raises ConfigError that names each wrong field with its line."""
    text = read_text(path)
    settings = validated(JobsFile, parse_fields(text, path), text, path)
    found = tuple(job.spec for job in settings.jobs)
    for given in found:
        fault = submission_fault(given)
        if fault:
            raise ConfigError(f"{path}: job {given.job}: {fault}")
    return found
