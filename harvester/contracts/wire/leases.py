"""Leases between an agent and the scheduler. Every call is idempotent.

    GET    /v1/slots                     -> SlotOffers
    POST   /v1/leases                    LeaseRequest -> LeaseGranted | LeaseRefused
    POST   /v1/leases/{lease}/renew      LeaseRenewal -> LeaseGranted | LeaseEnded
    DELETE /v1/leases/{lease}            -> LeaseEnded

Durations are monotonic on each side; no wall-clock deadline crosses the wire. The holder stops
using a lease one margin before its duration ends, the grantor frees it at the end, so a lost reply
costs idle time and never double use. The epoch fences: a slot's epoch only rises.
"""

import math
from enum import StrEnum
from typing import Annotated

import msgspec

from harvester.contracts.ids import Epoch, JobId, LeaseId, NodeId, SlotId, TenantId
from harvester.contracts.page.records import Lending
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.error_budget import Allotment, BudgetReport
from harvester.contracts.wire.stops import Stop

SentEpoch = Annotated[Epoch, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""An epoch within the range that the files of holder and grantor can record."""
EPOCH_HEADER = "X-RoseMux-Epoch"
SESSION_HEADER = "X-Session-ID"
JOB_HEADER = "X-RoseMux-Job"


class SlotState(StrEnum):
    OFF = "off"
    """The slot only observes, the kill switch holds it, or harvesting is switched off."""
    LEARNING = "learning"
    OFFERED = "offered"
    LEASED = "leased"
    QUARANTINED = "quarantined"


class GuardReading(msgspec.Struct, frozen=True, kw_only=True):
    """One guard of production: harvesting is reduced or stopped where its value exceeds the
    limit."""

    guard: str
    value: float
    limit: float
    binds: bool = False
    """Whether it reduces or stops harvesting now; it may do so for some time after a breach."""

    @property
    def finite(self) -> bool:
        """Whether JSON has words for it."""
        return math.isfinite(self.value) and math.isfinite(self.limit)


class IdleForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Expected share of the next `horizon_s` in which production has nothing to step. The forecast
    promises nothing: the slot may be taken back at once."""

    horizon_s: float
    low_ratio: float
    """Exceeded nine times of ten."""
    median_ratio: float
    high_ratio: float
    """Exceeded once in ten times."""


KILL_SWITCH = "kill switch: "
"""Beginning of the reason of a slot that the kill file closes, before the file's word."""


class SlotOffer(msgspec.Struct, frozen=True, kw_only=True):
    slot: SlotId
    node: NodeId
    state: SlotState
    engine_url: str
    model: str
    epoch: SentEpoch
    concurrency: int
    kv_tokens: int
    idle_ratio: float | None
    """Share of recent time in which production had nothing to step; None: unknown."""
    reason: str = ""
    isolation: str = ""
    """Isolation backend that the guest reports."""
    floor_bytes: int = 0
    """Accelerator memory that the guest holds while its gate is closed; 0 if unknown."""
    tenant: str = ""
    """Tenant of the lease in force; "" without a lease."""
    job: str = ""
    engine: EngineDescription = EngineDescription()
    """The guest engine's own description."""
    guards: tuple[GuardReading, ...] = ()
    lending: Lending = Lending()
    """Steps that the guest may take while production is idle, by its own account."""
    headroom_ratio: float | None = None
    """1 - recent P90 latency / SLO, of TTFT or ITL the smaller; None without recent requests."""
    headroom_age_s: float | None = None
    """Time since the newest latency behind it."""
    budget: BudgetReport | None = None
    """Evidence for the error budget of the slot's service."""
    mode: str = ""
    """Mode in force: the operator's."""
    slot_state: str = ""
    """State of the slot policy: the agent's decision."""
    ttft_s: float | None = None
    """Recent P90 of production's TTFT; None without recent requests."""
    itl_s: float | None = None
    """Recent P90 of production's ITL."""
    guest_tokens_total: int = 0
    """Tokens of the guest's steps since it started."""
    stop: Stop | None = None
    """The strongest order that binds the slot and the tenant of its lease."""
    forecasts: tuple[IdleForecast, ...] = ()
    """Sorted by horizon; a horizon of which too little is known is missing."""
    unready: str = ""
    """Why it could not lend, whatever is ordered; "" if it could. `/readyz` is 503 meanwhile."""
    withheld_ratio: float = 0.0
    """Share of time that the proof withholds from the guest, as of the present slice."""
    proving_left_s: float = 0.0
    """Leased time until the slot has proven itself and less is withheld; 0 once it has."""


class SlotOffers(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    slots: tuple[SlotOffer, ...]
    restart_needed: tuple[str, ...] = ()
    """Fields of the agent's configuration file that are not in force."""
    stops: tuple[Stop, ...] = ()
    """All that are in force on the node."""
    unopened: dict[str, str] = {}
    """Reason of each slot of the configuration that is not open; it is tried again."""
    config_refused: str = ""
    """Why the last reload was refused: the configuration before it goes on."""
    slots_file_age_s: float = 0.0
    """Time since the discovery that keeps the slots file last looked, or since the configured file
    is absent; 0 without one."""
    audit_fault: str = ""
    """Why audit events cannot be written; decisions go on."""
    kill_file_fault: str = ""
    """Why the kill file drains the node although it does not say so."""
    slots_file_absent: str = ""
    """Path of the configured slots file where it is not there yet."""


class LeaseRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    request_id: str
    """Repeating a request with the same id returns the same lease; it must be unguessable too."""
    slot: SlotId
    tenant: TenantId
    job: JobId
    duration_s: float
    allotment: Allotment | None = None
    """The slot's part of its service's error budget; left out to an agent that reports none."""


class LeaseRenewal(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    epoch: SentEpoch
    duration_s: float
    allotment: Allotment | None = None
    """Replaces the one in force; null leaves it."""


class EndReason(StrEnum):
    RELEASED = "released"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    BREACH = "breach"
    BUDGET = "budget"
    KILL_SWITCH = "kill_switch"
    GUEST_LOST = "guest_lost"
    PRODUCTION_LOST = "production_lost"
    DRAIN = "drain"


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="granted"):
    lease: LeaseId
    """A secret: any caller that knows it may renew and end the lease."""
    slot: SlotId
    epoch: SentEpoch
    duration_s: float
    """Counted from the moment at which the grantor wrote this reply."""
    forecasts: tuple[IdleForecast, ...] = ()
    """The slot's forecasts at this reply; left out while unknown."""


class LeaseRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    slot: SlotId
    reason: str
    retry_after_s: float


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    lease: LeaseId
    reason: EndReason
    deadline_s: float = 0.0
    """Seconds for which running turns may go on."""
