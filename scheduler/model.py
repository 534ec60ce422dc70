"""Jobs, placements, leases and engines: the model that gateway and RollMux share."""

from enum import StrEnum
from typing import NamedTuple

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


class Completion(NamedTuple):
    """One point of a completion curve: completed share of responses at a share of the rollout's
    time."""

    time_ratio: float
    complete_ratio: float


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One declared phase. A planner chooses its nodes; a weight sync has `nodes` 0."""

    kind: PhaseKind
    max_s: float
    """Longest duration, with every response at its token limit, in s; longer phases cause a
    warning."""
    nodes: int = 1
    mean_s: float | None = None
    """Mean duration measured alone on its nodes; None: only `max_s` is known."""
    cv: float = 0.1
    seen: int = 40
    """Phases that `mean_s` is of."""
    divisible: bool = True
    """Whether a rollout's engines may begin on the accelerators beside another job's tail, and
    gather their own tail on a part of them; if not, it waits until such a tail has ended."""
    curve: tuple[Completion, ...] = ()
    """Completion curve of a rollout; empty: unknown until its own was seen."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as its team declares it: to a control that plans, and to the planner."""

    job: JobId
    phases: tuple[PhaseSpec, ...]
    """Rollout, training, and a weight sync where it takes time between two iterations."""
    slo: float
    """Largest allowed slow-down: duration on shared nodes over duration on dedicated nodes, from
    the placement on."""
    host_bytes: int
    """State that stays resident in host memory of every node of the job."""
    tenant: TenantId = TenantId("default")
    harvesting: bool = False
    """The job's rollouts use leases where the control allows them; no plan counts on a lease."""


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

    @property
    def text(self) -> str:
        """Rollout nodes, a bar, training nodes."""
        return f"{' '.join(self.rollout_nodes)} | {' '.join(self.training_nodes)}"


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
