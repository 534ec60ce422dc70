"""A gateway's status: `GET /v1/status -> GatewayStatus`.

docs/protocol/gateway-api.md explains the fields. A gateway of another version may lack fields with
a default. A job's client and its phases read the part in GatewayFleet.
"""

import msgspec

from harvester.contracts.ids import EngineId, Epoch, JobId, SlotId, WeightVersion
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.rollouts import OnInterrupt
from harvester.contracts.wire.stops import Stop


class GatewayEngine(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    url: str = ""
    up: bool = False
    state: str | None = None
    version: WeightVersion | None = None
    switch_s: float | None = None
    concurrency: int = 0
    open_turns: int = 0
    s_per_token_alone: float | None = None
    epoch: Epoch | None = None
    numerics: str = ""
    identity: str = ""
    context_tokens: int = 0
    description: EngineDescription | None = None
    fault: str = ""


class GatewayJob(msgspec.Struct, frozen=True, kw_only=True):
    version: WeightVersion = WeightVersion(0)
    store: str = ""
    may_lease: bool = False
    paused: bool = False
    may_use_dedicated: bool = True
    on_interrupt: OnInterrupt = OnInterrupt.CONTINUE
    tokens: dict[str, int] = {}
    turns: dict[str, int] = {}
    open_turns: int = 0


class GatewayLease(msgspec.Struct, frozen=True, kw_only=True):
    lease: str
    slot: SlotId = SlotId("")
    agent: str
    job: JobId
    epoch: Epoch = Epoch(0)
    left_s: float


class GatewaySlot(msgspec.Struct, frozen=True, kw_only=True):
    agent: str
    state: str
    idle_ratio: float | None = None
    reason: str = ""


class GatewayBudget(msgspec.Struct, frozen=True, kw_only=True):
    budget_misses: float = 0.0
    spent_misses: float = 0.0
    outstanding_misses: float = 0.0
    known_s: float = 0.0


class GatewayFleet(msgspec.Struct, frozen=True, kw_only=True):
    active_job: JobId | None = None
    engines: dict[EngineId, GatewayEngine]
    jobs: dict[JobId, GatewayJob]


class GatewayStatus(GatewayFleet, frozen=True, kw_only=True):
    target_version: WeightVersion | None = None
    settled: bool = False
    queued_turns: int = 0
    deferred_turns: int = 0
    placed_turns: int = 0
    dispatched: dict[str, int] = {}
    leases: tuple[GatewayLease, ...] = ()
    slots: dict[SlotId, GatewaySlot] = {}
    services: dict[str, GatewayBudget] = {}
    stops: tuple[Stop, ...] = ()
    stop_faults: dict[str, str] = {}
    silent_agents: dict[str, str] = {}
    unrecorded: tuple[str, ...] = ()
