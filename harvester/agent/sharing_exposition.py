"""Metrics of what one slot's guest and production share: accelerator time and memory.

Unknown values are NaN. They are set per scrape, not per beat.
"""

import math

from harvester.agent.metrics import AgentMetrics
from harvester.contracts.page import Grant, Guest, GuestMemory
from harvester.policy.sample import MpsReading, SlotSample
from harvester.policy.settings import AUTO
from harvester.policy.slot import SlotPolicy

BACKENDS = ("idle-group", "idle", "time-slicing", "mps", "none")
"""Values of a guest's `isolation`; any other value, such as "", counts as no backend."""
PREEMPTING = ("idle-group", "idle")
"""Backends under which production preempts a guest step, and which the guest checks itself."""
_MPS_STATES = ("together", "apart", "fault", "silent")
_MEMORY_PARTS = ("weights", "graphs", "activations", "context", "kv")
_SHARED_PARTS = ("used", "limit", "guest", "guest_limit")


class SharingExposition:
    def __init__(self, slot: str, metrics: AgentMetrics) -> None:
        self._slot = slot
        self._metrics = metrics
        self._blocking = math.nan

    def granted(self, grant: Grant) -> None:
        self._blocking = grant.blocking_ratio

    def refresh(self, sample: SlotSample | None, policy: SlotPolicy) -> None:
        """Set the gauges. Called before every scrape."""
        metrics, slot = self._metrics, self._slot
        guest = None if sample is None else sample.guest.record
        observed = policy.blocking.ratio
        configured = policy.settings.blocking_ratio
        metrics.blocking.labels(slot, "configured").set(
            math.nan if configured == AUTO else configured
        )
        metrics.blocking.labels(slot, "in_force").set(self._blocking)
        metrics.blocking.labels(slot, "observed").set(math.nan if observed is None else observed)
        for backend in BACKENDS:
            said = guest is not None and guest.isolation == backend
            metrics.isolation.labels(slot, backend).set(said)
        metrics.isolation_holds.labels(slot).set(_holds(guest))
        away = math.nan if guest is None else guest.weights_away
        metrics.weights_away.labels(slot).set(away)
        bound = 0 if guest is None else guest.memory.asleep_bytes_max
        metrics.asleep_max.labels(slot).set(bound or math.nan)
        now = _mps_state(None if sample is None else sample.mps, guest)
        for state in _MPS_STATES:
            metrics.mps.labels(slot, state).set(state == now)
        for part, size in zip(_MEMORY_PARTS, _memory_bytes(guest), strict=True):
            metrics.memory.labels(slot, part).set(size)
        for part, size in zip(_SHARED_PARTS, _shared_bytes(sample), strict=True):
            metrics.shared_memory.labels(slot, part).set(size)


def _holds(guest: Guest | None) -> float:
    """1.0 if the guest sees its isolation hold, 0.0 if not, NaN without a preempting backend."""
    if guest is None or guest.isolation not in PREEMPTING:
        return math.nan
    return float(not guest.isolation_fault)


def _mps_state(mps: MpsReading | None, guest: Guest | None) -> str:
    if mps is None:
        return ""
    if mps.fault:
        return "silent"
    if mps.server_fault:
        return "fault"
    processes = () if guest is None else guest.processes
    return "together" if mps.shared_by(processes) else "apart"


def _memory_bytes(guest: Guest | None) -> tuple[float, ...]:
    """Bytes in the order of `_MEMORY_PARTS`; NaN for a guest that has reported none."""
    if guest is None or guest.memory == GuestMemory():
        return (math.nan,) * len(_MEMORY_PARTS)
    memory = guest.memory
    return (
        memory.weights_bytes,
        memory.graphs_bytes,
        memory.activations_bytes,
        memory.other_bytes,
        memory.kv_bytes,
    )


def _shared_bytes(sample: SlotSample | None) -> tuple[float, ...]:
    used = limit = guest = guest_limit = math.nan
    if sample is not None and sample.memory is not None and sample.memory.limit_bytes > 0:
        used, limit = sample.memory.used_bytes, sample.memory.limit_bytes
    if sample is not None and sample.guest_kv is not None and not sample.guest_kv.fault:
        guest, guest_limit = sample.guest_kv.mapped_bytes, sample.guest_kv.limit_bytes
    return used, limit, guest, guest_limit
