"""Turns one slot's beats into metric values. It measures nothing and decides nothing.

Unknown values are exported as NaN, never as 0 or as the previous value.
"""

import math
from collections.abc import Callable

from harvester.agent.metrics import AgentMetrics
from harvester.agent.sharing_exposition import SharingExposition
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Calibration, Grant, Guest, PageName, Pulse
from harvester.contracts.wire.leases import EndReason, SlotState
from harvester.policy.effects import Effect, KillGuest, LiftGuest, SettleGuest, WriteGrant
from harvester.policy.leases import SlotLease
from harvester.policy.sample import GuestAction, SlotSample
from harvester.policy.settings import Mode
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition, State

_OTHER_TENANT = "other"
_OUTCOMES = ("in_time", "missed")
_PREFIX_OUTCOMES = ("used", "dropped")
_ACTIONS = {
    LiftGuest: GuestAction.LIFT,
    SettleGuest: GuestAction.SETTLE,
    KillGuest: GuestAction.KILL,
}
_BECAME = ("asked", "done", "failed")
_PERCENTILES = ("50", "90", "99")
_KV_STATES = ("held", "retained", "withheld", "free")


class SlotExposition:
    def __init__(self, slot: str, metrics: AgentMetrics, *, tenants: tuple[str, ...]) -> None:
        """Tenants outside the configured list share one label value, so that they add no series."""
        self._slot = slot
        self._metrics = metrics
        self._tenants = tenants
        self._last: SlotSample | None = None
        self._sharing = SharingExposition(slot, metrics)
        # A child looked up by its labels costs as much as everything else that is done per beat.
        self._requests = metrics.requests.labels(slot)
        self._misses = metrics.misses.labels(slot)
        self._step_tokens = metrics.step_tokens.labels(slot)
        self._guest_tokens = metrics.guest_tokens.labels(slot)
        self._unrecorded = metrics.unrecorded.labels(slot)
        self._missing = metrics.missing_lines.labels(slot)
        self._missed = 0
        self._guest: Guest | None = None
        self._was_open = False
        self._closing_at_ns: int | None = None
        self._counted = (0.0, 0.0)
        self._reclaims = (0, 0)
        self._tenant = ""
        self._begin()

    def name_tenants(self, tenants: tuple[str, ...]) -> None:
        """Take the tenants of a reloaded configuration; the lease in force is relabelled at the
        next beat.
        """
        self._tenants = tenants
        for tenant in tenants:
            if tenant != self._tenant:
                self._metrics.leases_active.labels(self._slot, tenant).set(0)

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
                self._metrics.guest_actions.labels(self._slot, action.value, "asked").inc()
        for done in sample.outcomes:
            became = "failed" if done.fault else "done"
            self._metrics.guest_actions.labels(self._slot, done.action.value, became).inc()
        self._note_guest(sample.guest.record, policy)
        requests, misses = policy.accounted
        self._requests.inc(requests - self._counted[0])
        self._misses.inc(misses - self._counted[1])
        self._counted = (requests, misses)
        reclaims = (policy.reclaim.state.in_time, policy.reclaim.state.missed)
        for outcome, count, before in zip(_OUTCOMES, reclaims, self._reclaims, strict=True):
            if count > before:
                self._metrics.kv_reclaims.labels(self._slot, outcome).inc(count - before)
        self._reclaims = reclaims
        tenant = "" if lease is None else self._label(lease.tenant)
        if tenant != self._tenant:
            for name, active in ((self._tenant, 0), (tenant, 1)):
                if name:
                    self._metrics.leases_active.labels(self._slot, name).set(active)
            self._tenant = tenant
        self._last = sample

    def recorded(self, fault: str, missing_total: int) -> None:
        """Export whether the journal can be written (`fault` is empty) and count missing
        decisions.
        """
        self._unrecorded.set(fault != "")
        self._missing.inc(missing_total - self._missed)
        self._missed = missing_total

    def refresh(self, policy: SlotPolicy, seen_ns: dict[str, int]) -> None:
        """Set the gauges that need no counting per beat. Called before every scrape."""
        metrics, slot, settings = self._metrics, self._slot, policy.settings
        metrics.quarantined.labels(slot).set(policy.slot_state() is SlotState.QUARANTINED)
        for mode in Mode:
            metrics.mode.labels(slot, mode.value).set(mode is settings.mode)
        for state in State:
            metrics.state.labels(slot, state.value).set(state is policy.state)
        now_ns = monotonic_ns()
        for source, stamp_ns in seen_ns.items():
            # A guest that was stopped on purpose has no age: its silence is no fault.
            stopped = source == PageName.GUEST and policy.guest.state.stopped
            age_s = math.nan if stopped else max(0, now_ns - stamp_ns) / 1e9
            metrics.signal_age.labels(slot, source).set(age_s)
        for reading in self._last.pulses if self._last is not None else ():
            if reading.name not in seen_ns:
                metrics.signal_age.labels(slot, reading.name).set(math.inf)
        self._set_guest()
        self._sharing.refresh(self._last, policy)
        idle = policy.idle_ratio
        metrics.idle.labels(slot).set(math.nan if idle is None else idle)
        metrics.objective.labels(slot).set(settings.budget.slo_target_ratio)
        metrics.impact_limit.labels(slot).set(settings.proof.limit_ratio)
        spent, allowance = policy.budget.spent, policy.budget.allowance
        ratio = spent / allowance if allowance > 0 else float("inf") if spent else 0.0
        metrics.budget_spent.labels(slot).set(ratio)
        for slo, impact in policy.impact().items():
            known = (math.nan,) * 3 if impact is None else (impact.low, impact.ratio, impact.high)
            for bound, value in zip(("low", "mean", "high"), known, strict=True):
                metrics.impact.labels(slot, slo, bound).set(value)
        self._set_headroom("ttft", settings.ttft_slo_s)
        self._set_headroom("itl", settings.itl_slo_s)

    def ended(self, reason: str) -> None:
        self._metrics.leases_ended.labels(self._slot, reason).inc()

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else _OTHER_TENANT

    def _begin(self) -> None:
        """Create every series at the start: `increase` does not see a counter's first value."""
        metrics, slot = self._metrics, self._slot
        metrics.guest_tokens.labels(slot)
        metrics.reclaim.labels(slot)
        for outcome in _OUTCOMES:
            metrics.kv_reclaims.labels(slot, outcome)
        for outcome in _PREFIX_OUTCOMES:
            metrics.prefixes.labels(slot, outcome)
        for action in GuestAction:
            for became in _BECAME:
                metrics.guest_actions.labels(slot, action.value, became)
        for condition in Condition:
            metrics.evictions.labels(slot, condition.value)
        for reason in EndReason:
            metrics.leases_ended.labels(slot, reason.value)
        for tenant in (*self._tenants, _OTHER_TENANT):
            metrics.leases_active.labels(slot, tenant).set(0)

    def _note_grant(self, grant: Grant, policy: SlotPolicy) -> None:
        metrics, is_open = self._metrics, grant.mode.admits
        self._sharing.granted(grant)
        decision = "open" if is_open else "closed"
        metrics.decisions.labels(self._slot, decision, policy.condition.value).inc()
        self._step_tokens.set(grant.step_tokens_cap if is_open else 0)
        if self._was_open and not is_open:
            self._closing_at_ns = monotonic_ns()
        elif is_open:
            self._closing_at_ns = None
        self._was_open = is_open

    def _note_guest(self, guest: Guest | None, policy: SlotPolicy) -> None:
        if guest is None:
            return
        metrics, before = self._metrics, self._guest
        if before is not None:
            # After the guest restarted its counters begin anew at 0.
            tokens = guest.tokens_total - before.tokens_total
            aborted = guest.aborted_total - before.aborted_total
            self._guest_tokens.inc(max(0, tokens))
            if aborted > 0:
                metrics.evictions.labels(self._slot, policy.condition.value).inc(aborted)
            for outcome, now, then in zip(
                _PREFIX_OUTCOMES, _prefix_tokens(guest), _prefix_tokens(before), strict=True
            ):
                if now > then:
                    metrics.prefixes.labels(self._slot, outcome).inc(now - then)
        self._guest = guest
        if self._closing_at_ns is not None and guest.steps_launched <= guest.steps_finished:
            late_ns = max(0, guest.last_step_end_ns - self._closing_at_ns)
            metrics.reclaim.labels(self._slot).observe(late_ns / 1e9)
            self._closing_at_ns = None

    def _set_guest(self) -> None:
        guest = self._last.guest.record if self._last is not None else None
        known: dict[str, float] = dict.fromkeys(_KV_STATES, math.nan)
        if guest is not None:
            taken = (guest.kv_tokens, guest.kv_tokens_retained, guest.kv_tokens_withheld)
            free = guest.kv_tokens_total - sum(taken)
            known = dict(zip(_KV_STATES, (*taken, free), strict=True))
        over = math.nan if guest is None else guest.step_over_ratio
        self._metrics.step_over.labels(self._slot).set(over)
        unknown = Calibration()
        self._set_percentiles("alone", guest.step_calibration if guest else unknown)
        self._set_percentiles("beside", guest.beside_calibration if guest else unknown)
        self._set_calibration("prefill", lambda pulse: pulse.prefill_calibration)
        self._set_calibration("decode", lambda pulse: pulse.decode_calibration)
        for state, tokens in known.items():
            self._metrics.kv.labels(self._slot, state).set(tokens)

    def _set_percentiles(self, kind: str, found: Calibration) -> None:
        ratios = (found.p50_ratio, found.p90_ratio, found.p99_ratio)
        for percentile, ratio in zip(_PERCENTILES, ratios, strict=True):
            value = ratio if found.steps else math.nan
            self._metrics.guest_percentiles.labels(self._slot, kind, percentile).set(value)

    def _set_calibration(self, kind: str, of: Callable[[Pulse], Calibration]) -> None:
        """Export the calibration of the pulse whose steps exceed their prediction most often."""
        readings = self._last.pulses if self._last is not None else ()
        found = [of(reading.record) for reading in readings if reading.record is not None]
        known = [one for one in found if one.steps]
        values = (math.nan,) * 4
        if known:
            worst = max(known, key=lambda one: one.over_ratio)
            values = (worst.over_ratio, worst.p50_ratio, worst.p90_ratio, worst.p99_ratio)
        self._metrics.production_over.labels(self._slot, kind).set(values[0])
        for percentile, ratio in zip(_PERCENTILES, values[1:], strict=True):
            self._metrics.production_percentiles.labels(self._slot, kind, percentile).set(ratio)

    def _set_headroom(self, slo: str, slo_s: float) -> None:
        readings = self._last.pulses if self._last is not None else ()
        pulses = [reading.record for reading in readings if reading.record is not None]
        recent = sorted(
            x for p in pulses for x in (p.ttft_s_recent if slo == "ttft" else p.itl_s_recent)
        )
        p90 = recent[min(len(recent) - 1, int(0.9 * len(recent)))] if recent else math.nan
        self._metrics.headroom.labels(self._slot, slo).set(1 - p90 / slo_s)


def _prefix_tokens(guest: Guest) -> tuple[int, int]:
    return guest.prefix_tokens_used_total, guest.prefix_tokens_dropped_total
