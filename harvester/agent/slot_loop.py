"""One slot of the agent: sense, decide, act and record, once per beat."""

import logging
import os
import secrets
from contextlib import ExitStack, suppress

import msgspec

from harvester.agent.audit.audit_log import AuditLog
from harvester.agent.audit.slot_audit import SlotAudit
from harvester.agent.engine_probes import GuestDescription
from harvester.agent.exposition import SlotExposition
from harvester.agent.guest_processes import GuestProcesses
from harvester.agent.lease_file import LeaseFile
from harvester.agent.mps_watch import MpsWatch
from harvester.agent.operator_files import ReleaseFile
from harvester.agent.record import SlotRecord
from harvester.agent.sense import SlotSensor, epoch_left
from harvester.agent.shared_memory import shared_memory_of
from harvester.agent.state_file import StateFile
from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.clock import monotonic_ns, wall_seconds
from harvester.contracts.errors import ConfigError, NotYet
from harvester.contracts.ids import SlotId
from harvester.contracts.page import (
    Grant,
    GrantMode,
    Guest,
    Lending,
    PageDirectory,
    PageHeld,
    PageName,
    PageOwners,
)
from harvester.contracts.wire.leases import EndReason, IdleForecast, SlotOffer, SlotState
from harvester.contracts.wire.stops import Stop
from harvester.policy.effects import (
    Effect,
    EndLease,
    KillGuest,
    LiftGuest,
    Quarantine,
    SettleGuest,
    WriteGrant,
)
from harvester.policy.idle_forecast import IdleForecaster
from harvester.policy.lease_table import LeaseTable, SlotLease
from harvester.policy.production import silence
from harvester.policy.sample import (
    SCRAPED_PULSE,
    ActionOutcome,
    GuestAction,
    KillSwitch,
    SlotSample,
)
from harvester.policy.settings import SlotSettings
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition, State
from harvester.policy.stop_table import binding

_log = logging.getLogger(__name__)


class Slot:
    """Takes over the pages of an earlier agent and owns the grant page until `close`."""

    def __init__(
        self,
        config: AgentConfig,
        slot: SlotConfig,
        *,
        leases: LeaseTable,
        exposition: SlotExposition,
        audit: AuditLog,
        now: float,
    ) -> None:
        self.name = SlotId(slot.name)
        self.config = slot
        self._lending = Lending()
        self._lends: bool | None = None
        """Whether anything was lent, as last logged."""
        self._unfit = ""
        self._stop: Stop | None = None
        self._unready = "no beat yet"
        self.failed = ""
        """Why the last beat raised: the next one opens nothing, as it may raise again."""
        self._failing_since_s: float | None = None
        self.guest_description = GuestDescription(
            lambda: self.config.engine_url, lambda: self.config.offered_url, config.guests
        )
        self._leases = leases
        self.exposition = exposition
        directory = PageDirectory.create(
            config.pages_of(slot), owners=_owners(config, slot), group=config.page_gid
        )
        self._grant_page = directory.grant_page()
        try:
            self._grant_page.reserve()
            self._take_over(config, directory, audit, now)
        except PageHeld as error:
            # Two agents on one page would undo each other's closing.
            text = f"another agent runs on pages {directory.path}: {error}; stop it first"
            raise NotYet(text) from error
        except BaseException:
            # Frees the page's lock for another try.
            self._grant_page.close()
            raise
        if self._mps is not None:
            self._mps.start()

    def _take_over(
        self, config: AgentConfig, directory: PageDirectory, audit: AuditLog, now: float
    ) -> None:
        """Go on from an earlier agent: its lease, processes that it lifted, its policy's state."""
        slot, leases = self.config, self._leases
        self.lease_file = LeaseFile(config.file_of(slot, "lease"))
        # The holder counts from an earlier moment, so the lease ends for the holder first.
        recorded = self.lease_file.read(ends_s=now + leases.ttl_s)
        leases.add_slot(self.name, epoch=epoch_left(directory), recorded=recorded)
        self._mps = None
        if slot.mps is not None:
            _log.warning("mps by consent: a fault of the guest ends production as well")
            self._mps = MpsWatch(slot.mps.daemon, look_s=slot.mps.look_s)
        self._guest = GuestProcesses(
            directory.path / PageName.GUEST, memo=config.file_of(slot, "lifted"), mps=self._mps
        )
        self._grant_page.make()
        # A page that was taken over has no epoch until this agent writes it; epochs must only rise.
        self._write_closed("agent starts")
        self.sensor = SlotSensor(
            directory,
            # A scrape that never succeeded is missing, too: such a slot is never opened.
            pulses=slot.pulses if slot.metrics_url is None else (*slot.pulses, SCRAPED_PULSE),
            memory=shared_memory_of(slot, directory.owners),
            mps=self._mps,
        )
        # Settle the processes that an earlier agent had lifted when it ended.
        self._guest.settle()
        self.policy = SlotPolicy(config.settings_of(slot))
        self._release = ReleaseFile(config.file_of(slot, "release"))
        self._record = SlotRecord(
            slot.name,
            config.file_of(slot, "journal"),
            self.policy,
            max_bytes=config.journal_max_bytes,
            state=StateFile(
                config.file_of(slot, "state"),
                node=config.node,
                slot=slot.name,
                configured=[each.name for each in config.slots],
            ),
        )
        self._forecaster = IdleForecaster(self._record.resume(now=now))
        self.policy.begin(secrets.token_hex(8))
        self.audit = SlotAudit(slot.name, audit, self.policy)
        self._record.begin(self.policy.snapshot(), now=now)
        # After a kill before the first beat a journal without a state would be a lost history.
        self._record.save(self._forecaster, now=now)

    def beat(
        self, kill_switch: KillSwitch, stops: tuple[Stop, ...], *, sampled_ns: int, now: float
    ) -> None:
        """`stops`: every order in force on the node; `sampled_ns`: the stamp of the grant."""
        lease = self.live_lease
        self.lease_file.follow(lease)
        # A tenant's order binds only while the tenant has the lease.
        self._stop = binding(stops, slot=self.name, tenant="" if lease is None else lease.tenant)
        self._leases.stop(self.name, "" if self._stop is None else self._stop.text, now=now)
        sample = self._sample(kill_switch, now)
        effects = self.policy.observe(sample, now=now)
        self._forecaster.observe(self.policy.busy_s, now=now, wall_s=wall_seconds())
        self._report(sample.guest.record)
        self._record.decided(now=now, sample=sample, effects=effects)
        unrecorded = (self._record.unrecorded if self._record.missing else "") or self.failed
        if unrecorded:
            effects = tuple(effect.without_record(unrecorded) for effect in effects)
        for effect in effects:
            self._carry_out(effect, sampled_ns, now)
        self._record.save(self._forecaster, now=now)
        if sample.release and not unrecorded:
            self._release.taken()
        state, reason = self.policy.slot_state(), self.policy.reason
        if unrecorded and state is SlotState.OFFERED:
            # The policy sees the fault only from the next beat on.
            state, reason = SlotState.OFF, unrecorded
        self._leases.offer(self.name, state, reason)
        # In the policy's words: where silence is the offer's reason too, it is said once.
        self._unready = self.fault or silence(sample.pulses)
        lease = self.live_lease
        self.exposition.observe(sample, effects, self.policy, lease)
        self.audit.observe(sample, effects, self.policy, lease, now=now)
        if not self.failed:
            # A beat after one that raised opens nothing: two in a row are a recovery.
            self._failing_since_s = None
        self.failed = ""

    @property
    def unready(self) -> str:
        """Why it could not lend, whatever is ordered: a beat that raised, a pulse that is not
        there, or no record."""
        return self.failed or self._unready

    def refresh_metrics(self) -> None:
        self.exposition.refresh(self.policy, self.sensor.seen_ns, self.forecasts())
        self.exposition.recorded(self.fault, self._record.missing_total)

    def fail(self, fault: str, *, now: float) -> None:
        """A beat raised. The grant is over at once; a lease ends as beside a lost production, since
        its holder's turns meet a closed gate."""
        if self._failing_since_s is None:
            self._failing_since_s = now
        with suppress(Exception):  # The slot's page may be at fault; the grant then expires.
            self.shut(fault)
        self.exposition.fail()
        lease, failing_s = self.live_lease, now - self._failing_since_s
        if lease is not None and failing_s >= self.policy.settings.production_lost_s:
            self._leases.end(lease.lease, EndReason.DRAIN, now=now)
        self._leases.offer(self.name, SlotState.OFF, fault)

    def shut(self, reason: str) -> None:
        """Leave a grant page that is closed and already expired."""
        self.failed = reason
        self._write_closed(reason)

    def _carry_out(self, effect: Effect, sampled_ns: int, now: float) -> None:
        match effect:
            case WriteGrant():
                if self.sensor.listed:  # Now and then: is the page still in its directory?
                    self._grant_page.keep()
                # Counted from the sample: an agent that is stopped between the two, or waits for
                # its disk, would else open the gate for data as old as the stop.
                ttl_ns = int(effect.ttl_s * 1e9)
                self._grant_page.write(effect.grant, now_ns=sampled_ns, ttl_ns=ttl_ns)
            case EndLease():
                lease, in_s = self.live_lease, effect.deadline_s
                if lease is not None and lease.name == effect.lease:
                    self._leases.end(lease.lease, effect.reason, deadline_s=in_s, now=now)
                    # At once: it stays ended even if the agent is killed before its next beat.
                    self.lease_file.follow(self.live_lease)
            case LiftGuest():
                self._guest.lift(effect.processes)
            case SettleGuest():
                self._guest.settle()
            case KillGuest():
                _log.error("slot %s: ending the guest: %s", self.name, effect.reason)
                self._guest.kill(effect.processes)
            case Quarantine():
                _log.error("slot %s is quarantined: %s", self.name, effect.reason)

    def _write_closed(self, reason: str) -> None:
        """Leave a grant that is closed and already expired."""
        epoch = self._leases.view(self.name).epoch
        grant = Grant(epoch=epoch, mode=GrantMode.CLOSED, reason=reason)
        self._grant_page.write(grant, now_ns=monotonic_ns(), ttl_ns=0)

    def _outcomes(self) -> tuple[ActionOutcome, ...]:
        """Outcomes of earlier effects on the guest that became known since the last call."""
        outcomes = self._guest.outcomes()
        for outcome in outcomes:
            if outcome.fault:
                message = "slot %s: %s of the guest failed: %s"
                _log.error(message, self.name, outcome.action, outcome.fault)
            elif outcome.action is GuestAction.KILL:
                _log.warning("slot %s: the guest has ended", self.name)
        return outcomes

    def _report(self, guest: Guest | None) -> None:
        """Log each change between lending and not lending, with the reason."""
        unfit = self.policy.reason if self.policy.condition is Condition.UNFIT else ""
        if unfit and unfit != self._unfit:
            _log.error("slot %s lends nothing: %s", self.name, unfit)
        self._unfit = unfit
        bound = guest is not None and not self.config.policy.ungated
        self._lending = guest.lending if guest and bound else Lending()
        lends = self._lending.tokens > 0
        if lends is not self._lends and self._lending.summary:
            self._lends = lends
            level = logging.INFO if lends else logging.WARNING
            _log.log(level, "slot %s lends %s", self.name, self._lending.summary)

    @property
    def fault(self) -> str:
        """Why the journal, the state file or the record of lifted processes cannot be written."""
        return self._record.unrecorded or self._guest.memo_fault

    def _sample(self, kill_switch: KillSwitch, now: float) -> SlotSample:
        self._record.check(now=now)
        sample = self.sensor.sample(lease=self._leases.view(self.name), kill_switch=kill_switch)
        pulses = (reading.record for reading in sample.pulses if reading.record is not None)
        self._guest.exclude(pulse.root for pulse in pulses if pulse.root is not None)
        if sample.guest.record is not None:
            self._guest.record_named(sample.guest.record.processes)
        outcomes = self._outcomes()
        # A release serves the guest, so it waits until the journal can be written.
        release = "" if self.fault else self._release.read()
        if not (self._stop or outcomes or self.fault or release):
            return sample
        return msgspec.structs.replace(
            sample, stop=self._stop, outcomes=outcomes, record_fault=self.fault, release=release
        )

    @property
    def live_lease(self) -> SlotLease | None:
        return self._leases.live(self.name)

    def policy_with(self, settings: SlotSettings) -> SlotPolicy:
        """The policy under new settings, with its memory."""
        policy = SlotPolicy(settings)
        policy.restore(self.policy.snapshot())
        return policy

    def reconfigure(
        self, slot: SlotConfig, policy: SlotPolicy, *, restart_needed: tuple[str, ...], now: float
    ) -> None:
        self.policy, self.config = policy, slot
        settings = msgspec.to_builtins(policy.settings)
        self._record.reconfigure(policy, settings, restart_needed=restart_needed, now=now)

    def forecasts(self) -> tuple[IdleForecast, ...]:
        return self._forecaster.forecasts(wall_s=wall_seconds())

    def offer(self) -> SlotOffer:
        state, reason, epoch = self._leases.entry(self.name)
        lease = self.live_lease
        settings, proof = self.policy.settings, self.policy.guards.proof
        headroom, now_ns = self.exposition.headroom, monotonic_ns()
        headroom_ratio, headroom_age_s = headroom.least(settings, now_ns=now_ns)
        budget = None
        if self._record.run_saved:
            # Not before: a scheduler takes lower counts of a run that it knows for late ones, until
            # they exceed what that run had.
            service = self.config.service or self.config.model or self.name
            number = self._leases.allotted_number(self.name)
            budget = self.policy.budget_report(service, number=number, leased=lease is not None)
        return SlotOffer(
            slot=self.name,
            node=self._leases.node,
            state=state,
            engine_url=self.config.offered_url or self.config.engine_url,
            model=self.config.model,
            epoch=epoch,
            concurrency=self.config.concurrency,
            kv_tokens=self.config.kv_tokens,
            idle_ratio=self.policy.idle_ratio,
            reason=reason,
            isolation=self.policy.guest.state.isolation,
            floor_bytes=self.policy.guest.state.floor_bytes,
            tenant=lease.tenant if lease is not None else "",
            job=lease.job if lease is not None else "",
            engine=self.guest_description.latest,
            guards=tuple(guard for guard in self.policy.guard_readings() if guard.finite),
            lending=self._lending,
            headroom_ratio=headroom_ratio,
            headroom_age_s=headroom_age_s,
            budget=budget,
            mode=settings.mode,
            slot_state=State.OFF if self.failed else self.policy.state,
            ttft_s=headroom.latency_s("ttft", now_ns=now_ns),
            itl_s=headroom.latency_s("itl", now_ns=now_ns),
            guest_tokens_total=self.exposition.guest_tokens_total,
            stop=self._stop,
            forecasts=self.forecasts(),
            unready=self.unready,
            withheld_ratio=proof.withheld_share,
            proving_left_s=proof.proving_left_s,
        )

    def close(self, *, now: float, wait: bool = True, records: bool = True) -> None:
        """End the lease and leave a page that is closed and already expired. `wait`: for a query of
        the MPS daemon, which may take seconds; `records`: whether its files are still its own."""
        lease = self.live_lease
        if lease is not None:
            self._leases.end(lease.lease, EndReason.DRAIN, now=now)
        # Each step runs even if another fails; the step entered last runs first.
        with ExitStack() as steps:
            steps.callback(self._record.close)
            if records:
                steps.callback(self._record.save, self._forecaster, now=now, last=True)
                steps.callback(self.lease_file.follow, None)
            steps.callback(self.sensor.close)
            if self._mps is not None:
                steps.callback(self._mps.close, wait=wait)
            steps.callback(self._guest.close, wait=wait, records=records)
            steps.callback(self._grant_page.close)
            steps.callback(self.shut, "agent stopped")

    def saved(self, *, now: float) -> bool:
        """Whether all that the slot must not forget is on disk."""
        self._record.save(self._forecaster, now=now, last=True)
        return not self.fault


def _owners(config: AgentConfig, slot: SlotConfig) -> PageOwners:
    """Users whose pages are believed. Raises ConfigError if the agent's user is not among them."""
    owners = config.owners_of(slot)
    if owners.agent and os.geteuid() not in owners.agent:
        raise ConfigError(
            f"owners.agent names user {' or '.join(map(str, sorted(owners.agent)))}, and this is "
            f"user {os.geteuid()}: start the agent as the user that is named"
        )
    return owners
