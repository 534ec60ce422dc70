"""Jobs, nodes, placements, leases and engines: the model that gateway and RollMux share."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import (
    EngineId,
    Epoch,
    JobId,
    LeaseId,
    NodeId,
    SlotId,
    TenantId,
    WeightVersion,
)
from harvester.contracts.wire.leases import LeaseEnded, LeaseGranted

NO_JOB = JobId("")
BASE_VERSION = WeightVersion(0)
"""The weights that an engine started with."""


class PhaseKind(StrEnum):
    ROLLOUT = "rollout"
    TRAINING = "training"
    SYNC = "sync"
    """New weights go to the rollout engines; holds no node."""


class Pool(StrEnum):
    """Purpose of a node. Serving nodes are only ever leased, slot by slot."""

    ROLLOUT = "rollout"
    TRAINING = "training"
    SERVING = "serving"


class EngineKind(StrEnum):
    DEDICATED = "dedicated"
    GUEST = "guest"


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a job's iteration; durations are stochastic."""

    kind: PhaseKind
    mean_s: float
    cv: float = 0.0
    max_s: float
    """Longest duration, with every response at its token limit, in s."""
    nodes: int = 1
    divisible: bool = True
    """A rollout may begin on the accelerators that another's tail leaves of its nodes, and bring
    its own tail together on a part of them."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId
    tenant: TenantId
    phases: tuple[PhaseSpec, ...] = ()
    host_bytes_per_node: int = 0
    """State that stays resident in host memory on every node that the job is pinned to."""
    slowdown_slo: float = 1.0
    """Tolerated ratio of an iteration in company to one alone; at least 1."""
    store: str = ""
    """Name of the job's weight store."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    pool: Pool
    type: str = ""
    accelerators: int = 1
    price_per_hour: float = 0.0
    host_bytes: int = 0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The exact nodes that a job is pinned to; pinning decides where its state is resident."""

    job: JobId
    rollout_nodes: tuple[NodeId, ...]
    training_nodes: tuple[NodeId, ...]

    @property
    def by_pool(self) -> tuple[tuple[Pool, tuple[NodeId, ...]], ...]:
        return (Pool.ROLLOUT, self.rollout_nodes), (Pool.TRAINING, self.training_nodes)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return (*self.rollout_nodes, *self.training_nodes)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of one slot for one job until `expires_s` on this side's monotonic clock."""

    lease: LeaseId
    slot: SlotId
    agent: str
    job: JobId
    epoch: Epoch
    expires_s: float

    def mismatch(self, reply: LeaseGranted | LeaseEnded) -> str:
        """Why a reply cannot be about this lease; "" where it can."""
        if reply.lease != self.lease:
            return "the reply names another lease"
        if isinstance(reply, LeaseGranted):
            if reply.slot != self.slot:
                return f"granted on slot {reply.slot} and not on {self.slot}"
            if reply.epoch != self.epoch:
                return f"granted under epoch {reply.epoch} and not {self.epoch}"
        return ""

    def usable(self, *, now: float, margin_s: float) -> bool:
        """The holder stops one margin before the grantor frees the slot."""
        return now < self.expires_s - margin_s


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout engine; a guest serves under a lease on its slot."""

    engine: EngineId
    kind: EngineKind
    url: str
    concurrency: int
    numerics: str = ""
