"""One slot's beats as metric values. It measures nothing and decides nothing.

Unknown values are exported as NaN, never as 0 or as the previous value.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

from harvester.agent.metrics import AgentMetrics
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.isolation import PREEMPTING, IsolationBackend
from harvester.contracts.page import (
    Calibration,
    Grant,
    Guest,
    GuestMemory,
    Lending,
    PageName,
    Pulse,
)
from harvester.contracts.wire.leases import EndReason, IdleForecast, SlotState
from harvester.contracts.wire.stops import StopOrder
from harvester.policy.effects import Effect, KillGuest, LiftGuest, SettleGuest, WriteGrant
from harvester.policy.headroom import ProductionHeadroom
from harvester.policy.idle_forecast import HORIZONS_S
from harvester.policy.lease_table import SlotLease
from harvester.policy.sample import GuestAction, SlotSample
from harvester.policy.settings import AUTO, Mode
from harvester.policy.slices import Impact
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition, State

_OTHER_TENANT = "other"
_MOST_REQUESTS = 200
"""Most observations of a beat in a histogram: each costs time, and a guest's page may state any
count."""
_ACCOUNTED = ("requests", "slo_misses", "unanswered_requests")
_RECLAIM_OUTCOMES = ("in_time", "missed")
_PREFIX_OUTCOMES = {
    "used": "prefix_tokens_used_total",
    "dropped": "prefix_tokens_dropped_total",
}
_counted = attrgetter("tokens_total", "aborted_total", "steps_met", *_PREFIX_OUTCOMES.values())
_ACTIONS = {
    LiftGuest: GuestAction.LIFT,
    SettleGuest: GuestAction.SETTLE,
    KillGuest: GuestAction.KILL,
}
_ACTION_OUTCOMES = ("requested", "done", "failed")
_UNKNOWN_FORECAST = IdleForecast(
    horizon_s=math.nan, low_ratio=math.nan, median_ratio=math.nan, high_ratio=math.nan
)
_UNKNOWN_IMPACT = Impact(ratio=math.nan, low=math.nan, high=math.nan)
_MPS_STATES = ("together", "apart", "fault", "silent")


class SlotExposition:
    def __init__(self, slot: str, metrics: AgentMetrics, *, tenants: tuple[str, ...]) -> None:
        """Tenants outside the configured list share one label value, so that they add no series."""
        self._slot = slot
        self._metrics = metrics
        self._tenants = tenants
        self._last: SlotSample | None = None
        self.headroom = ProductionHeadroom()
        self._guest: Guest | None = None
        self._unseen: set[str] = set()
        self._missing_lines = 0
        self._was_open, self._step_tokens = False, 0
        self._failed = False
        """Whether the last beat raised, so that the policy's state is of an earlier one."""
        self._decisions: Counter[tuple[str, str]] = Counter()
        """Grants written since the last scrape."""
        self._closing_at_ns: int | None = None
        self._counted = (0.0, 0.0, 0.0)
        self._reclaims = dict.fromkeys(_RECLAIM_OUTCOMES, 0)
        self._blocking_ratio = math.nan
        self._tenant = ""
        self._lease: SlotLease | None = None
        self._holder: tuple[str, str] | None = None
        """Tenant and job of the exported lease, "" without one."""
        self._begin()

    def name_tenants(self, tenants: tuple[str, ...]) -> None:
        """Tenants of a reloaded configuration; relabels the lease in force."""
        self._tenants = tenants
        for tenant in tenants:
            if tenant != self._tenant:
                self._set("leases_active", 0, tenant)
        self._note_lease(self._lease)

    def observe(
        self,
        sample: SlotSample,
        effects: tuple[Effect, ...],
        policy: SlotPolicy,
        lease: SlotLease | None,
    ) -> None:
        """Count one beat. Called after every beat, so it is cheap."""
        for effect in effects:
            if isinstance(effect, WriteGrant):
                self._note_grant(effect.grant, policy)
            elif (action := _ACTIONS.get(type(effect))) is not None:
                self._count("guest_actions", 1, action.value, "requested")
        for done in sample.outcomes:
            outcome = "failed" if done.fault else "done"
            self._count("guest_actions", 1, done.action.value, outcome)
        self._note_guest(sample.guest.record, policy)
        if lease is not self._lease or self._holder is None:
            self._note_lease(lease)
        self._last, self._failed = sample, False
        self.headroom.observe(sample.pulses, now_ns=monotonic_ns())

    def fail(self) -> None:
        """A beat raised, and its slot is closed."""
        self._count("beats_failed", 1)
        self._failed, self._was_open, self._step_tokens = True, False, 0

    def _note_lease(self, lease: SlotLease | None) -> None:
        self._lease = lease
        named = lease is None or lease.tenant in self._tenants
        tenant = "" if lease is None else lease.tenant if named else _OTHER_TENANT
        if tenant != self._tenant:
            for name, active in ((self._tenant, 0), (tenant, 1)):
                if name:
                    self._set("leases_active", active, name)
            self._tenant = tenant
        # One series per slot, so that earlier jobs leave no series behind.
        job = "" if lease is None else tenant if tenant == _OTHER_TENANT else lease.job
        if (tenant, job) != self._holder:
            if self._holder is not None:
                self._metrics.lease_info.remove(self._slot, *self._holder)
            self._metrics.lease_info.labels(self._slot, tenant, job).set(lease is not None)
            self._holder = tenant, job

    def recorded(self, fault: str, missing_total: int) -> None:
        """`fault` is why the journal cannot be written; the count is of missing decisions."""
        self._set("unrecorded", fault != "")
        self._count("journal_missing_lines", missing_total - self._missing_lines)
        self._missing_lines = missing_total

    def refresh(
        self, policy: SlotPolicy, seen_ns: dict[str, int], forecasts: tuple[IdleForecast, ...] = ()
    ) -> None:
        """Set the gauges that need no counting per beat. Called before every scrape."""
        settings, sample = policy.settings, self._last
        guest = None if sample is None else sample.guest.record
        readings = () if sample is None else sample.pulses
        pulses = [reading.record for reading in readings if reading.record is not None]
        for decision, beats in self._decisions.items():
            self._count("admission_decisions", beats, *decision)
        self._decisions.clear()
        # Updated before counting: counting that fails is not tried again.
        counted, self._counted = self._counted, policy.accounted
        for name, now, before in zip(_ACCOUNTED, self._counted, counted, strict=True):
            self._count(name, now - before)
        for outcome in _RECLAIM_OUTCOMES:
            count = getattr(policy.reclaim.state, outcome)
            self._count("kv_reclaims", max(0, count - self._reclaims[outcome]), outcome)
            self._reclaims[outcome] = count
        self._set("grant_step_tokens", self._step_tokens)
        self._set("quarantined", policy.slot_state() is SlotState.QUARANTINED)
        self._set_one("mode", settings.mode, Mode)
        self._set_one("slot_state", State.OFF if self._failed else policy.state, State)
        stop = None if sample is None else sample.stop
        for order in (StopOrder.HOLD, StopOrder.DRAIN):
            self._set("slot_stopped", stop is not None and stop.order is order, order.value)
        now_ns = monotonic_ns()
        for source, stamp_ns in seen_ns.items():
            # A guest that was stopped on purpose has no age: it is expected to be silent.
            stopped = source == PageName.GUEST and policy.guest.state.stopped
            age_s = math.nan if stopped else max(0, now_ns - stamp_ns) / 1e9
            self._set("signal_age_seconds", age_s, source)
        unseen = {reading.name for reading in readings} - seen_ns.keys()
        for source in self._unseen - unseen - seen_ns.keys():
            self._metrics.forget("signal_age_seconds", self._slot, source)
        for source in unseen:
            self._set("signal_age_seconds", math.inf, source)
        self._unseen = unseen
        self._set("idle_ratio", _known(policy.idle_ratio))
        self._set_forecasts(forecasts)
        self._set("slo_objective_ratio", settings.budget.slo_target_ratio)
        self._set("impact_limit_ratio", settings.proof.limit_ratio)
        spent, limit = policy.guards.budget.spent, policy.guards.budget.limit
        if limit is None:
            limit = spent
        ratio = spent / limit if limit > 0 else math.inf if spent else 0.0
        self._set("error_budget_spent_ratio", ratio)
        for guard in policy.guard_readings():
            self._set("guard_value", guard.value, guard.guard)
            self._set("guard_limit", guard.limit, guard.guard)
            self._set("guard_binds", guard.binds, guard.guard)
        for slo, impact in policy.guards.proof.impact().items():
            known = impact or _UNKNOWN_IMPACT
            bounds = {"low": known.low, "mean": known.ratio, "high": known.high}
            self._set_each("impact_ratio", bounds, slo)
        for slo, (ratio, age_s) in self.headroom.of_slos(settings, now_ns=now_ns).items():
            self._set("slo_headroom_ratio", ratio, slo)
            self._set("headroom_age_seconds", age_s, slo)
        self._set_calibrations(guest or Guest(), pulses)
        self._set_guest(guest)
        self._set_sharing(sample, policy)

    def _set_forecasts(self, forecasts: tuple[IdleForecast, ...]) -> None:
        known = {forecast.horizon_s: forecast for forecast in forecasts}
        for horizon_s in HORIZONS_S:
            each = known.get(horizon_s, _UNKNOWN_FORECAST)
            quantiles = {"10": each.low_ratio, "50": each.median_ratio, "90": each.high_ratio}
            self._set_each("idle_forecast_ratio", quantiles, f"{horizon_s:g}")

    @property
    def guest_tokens_total(self) -> int:
        return 0 if self._guest is None else self._guest.tokens_total

    def ended(self, reason: str) -> None:
        self._count("leases_ended", 1, reason)

    def _begin(self) -> None:
        """Create every series at the start: `increase` does not see a counter's first value."""
        for histogram in (self._metrics.reclaim_duration, self._metrics.steps_met):
            histogram.labels(self._slot)
        for name in ("guest_tokens", "journal_missing_lines", "beats_failed", *_ACCOUNTED):
            self._metrics.counter(name, self._slot)
        for name, labels in (
            ("kv_reclaims", _RECLAIM_OUTCOMES),
            ("guest_prefix_tokens", _PREFIX_OUTCOMES),
            ("evictions", Condition),
            ("leases_ended", EndReason),
        ):
            for label in labels:
                self._metrics.counter(name, self._slot, str(label))
        for action in GuestAction:
            for outcome in _ACTION_OUTCOMES:
                self._metrics.counter("guest_actions", self._slot, action.value, outcome)
        for tenant in (*self._tenants, _OTHER_TENANT):
            self._set("leases_active", 0, tenant)

    def _note_grant(self, grant: Grant, policy: SlotPolicy) -> None:
        is_open = grant.mode.admits
        self._blocking_ratio = grant.blocking_ratio
        self._decisions["open" if is_open else "closed", policy.condition] += 1
        self._step_tokens = grant.step_tokens_cap if is_open else 0
        if self._was_open and not is_open:
            self._closing_at_ns = monotonic_ns()
        elif is_open:
            self._closing_at_ns = None
        self._was_open = is_open

    def _note_guest(self, guest: Guest | None, policy: SlotPolicy) -> None:
        if guest is None:
            return
        before = self._guest
        if before is not None and _counted(guest) != _counted(before):
            # A restarted guest's counters begin at 0.
            self._count("guest_tokens", max(0, guest.tokens_total - before.tokens_total))
            aborted = max(0, guest.aborted_total - before.aborted_total)
            self._count("evictions", aborted, policy.condition.value)
            for outcome, field in _PREFIX_OUTCOMES.items():
                tokens = getattr(guest, field) - getattr(before, field)
                self._count("guest_prefix_tokens", max(0, tokens), outcome)
            met_counts = guest.steps_met[:5], before.steps_met  # A page has room for a thousand.
            new = [max(0, count - seen) for count, seen in zip(*met_counts, strict=False)]
            shown_ratio = _MOST_REQUESTS / max(sum(new), _MOST_REQUESTS)
            for met, count in enumerate(new):
                for _ in range(round(count * shown_ratio)):
                    self._metrics.steps_met.labels(self._slot).observe(met)
        self._guest = guest
        if self._closing_at_ns is not None and guest.steps_launched <= guest.steps_finished:
            late_ns = max(0, guest.last_step_end_ns - self._closing_at_ns)
            self._metrics.reclaim_duration.labels(self._slot).observe(late_ns / 1e9)
            self._closing_at_ns = None

    def _set_calibrations(self, guest: Guest, pulses: list[Pulse]) -> None:
        """Production's come from the pulse whose steps exceed their prediction most often."""
        guests = {"alone": guest.step_calibration, "beside": guest.beside_calibration}
        for kind, found in guests.items():
            self._set_each("guest_step_percentile_ratio", _percentiles(found), kind)
        for kind, all_found in (
            ("prefill", [pulse.prefill_calibration for pulse in pulses]),
            ("decode", [pulse.decode_calibration for pulse in pulses]),
        ):
            compared = [found for found in all_found if found.steps]
            worst = max(compared, key=lambda found: found.over_ratio, default=Calibration())
            over = worst.over_ratio if worst.steps else math.nan
            self._set("production_step_over_ratio", over, kind)
            self._set_each("production_step_percentile_ratio", _percentiles(worst), kind)

    def _set_guest(self, guest: Guest | None) -> None:
        known = Guest() if guest is None else guest
        kv_tokens = {
            "held": known.kv_tokens,
            "retained": known.kv_tokens_retained,
            "withheld": known.kv_tokens_withheld,
        }
        kv_tokens["free"] = known.kv_tokens_total - sum(kv_tokens.values())
        memory, lent = known.memory, known.lending
        memory_bytes = {
            "weights": memory.weights_bytes,
            "graphs": memory.graphs_bytes,
            "activations": memory.activations_bytes,
            "context": memory.other_bytes,
            "kv": memory.kv_bytes,
        }
        self._set_each("guest_kv_tokens", kv_tokens, known=guest is not None)
        self._set_each("guest_memory_bytes", memory_bytes, known=memory != GuestMemory())
        lends = lent != Lending()
        self._set("lent_step_tokens", lent.tokens if lends else math.nan)
        self._set("lent_share_ratio", lent.share_ratio if lends else math.nan)
        self._set("guest_step_over_ratio", math.nan if guest is None else guest.step_over_ratio)
        self._set("guest_weights_away", math.nan if guest is None else guest.weights_away)
        self._set("guest_asleep_bytes_max", memory.asleep_bytes_max or math.nan)
        # Any other value, such as "", counts as no backend.
        self._set_one("guest_isolation", known.isolation, tuple(IsolationBackend))
        holds = known.isolation_fault == "" if known.isolation in PREEMPTING else math.nan
        self._set("guest_isolation_holds", holds)

    def _set_sharing(self, sample: SlotSample | None, policy: SlotPolicy) -> None:
        """Accelerator time and memory that guest and production share."""
        configured = policy.settings.blocking_ratio
        ratios = {
            "configured": math.nan if configured == AUTO else configured,
            "in_force": self._blocking_ratio,
            "observed": _known(policy.blocking.ratio),
        }
        self._set_each("blocking_ratio", ratios)
        self._set_one("mps_state", "" if sample is None else _mps_state(sample), _MPS_STATES)
        sizes = dict.fromkeys(("used", "limit", "guest", "guest_limit"), math.nan)
        shared, kv = (None, None) if sample is None else (sample.memory, sample.guest_kv)
        if shared is not None and shared.limit_bytes > 0:
            sizes |= {"used": shared.used_bytes, "limit": shared.limit_bytes}
        if kv is not None and not kv.fault:
            sizes |= {"guest": kv.mapped_bytes, "guest_limit": kv.limit_bytes}
        self._set_each("shared_memory_bytes", sizes)

    def _count(self, name: str, by: float, *labels: str) -> None:
        if by:  # Most counts of most beats are 0, and each would take a lock.
            self._metrics.counter(name, self._slot, *labels).inc(by)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._metrics.gauge(name, self._slot, *labels).set(value)

    def _set_each(
        self, name: str, values: Mapping[str, float], *labels: str, known: bool = True
    ) -> None:
        """Set the series of the last label's values; `labels`: the labels before it."""
        for label, value in values.items():
            self._set(name, value if known else math.nan, *labels, label)

    def _set_one(self, name: str, chosen: str, choices: Iterable[str]) -> None:
        for choice in choices:
            self._set(name, choice == chosen, str(choice))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _percentiles(found: Calibration) -> dict[str, float]:
    ratios = {"50": found.p50_ratio, "90": found.p90_ratio, "99": found.p99_ratio}
    return ratios if found.steps else dict.fromkeys(ratios, math.nan)


def _mps_state(sample: SlotSample) -> str:
    mps, guest = sample.mps, sample.guest.record
    if mps is None:
        return ""
    if mps.fault:
        return "silent"
    if mps.server_fault:
        return "fault"
    processes = () if guest is None else guest.processes
    return "together" if mps.shared_by(processes) else "apart"
