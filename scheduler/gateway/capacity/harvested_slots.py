"""The shell around the capacity policy: asks agents, takes, renews and releases leases.

A lease in hand becomes a guest in the fleet; a lease that ends takes its guest out at once.
"""

import asyncio
import logging
import math
import sqlite3
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import JobId, LeaseId, SlotId, TenantId
from harvester.contracts.wire.leases import (
    IdleForecast,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    SlotState,
)
from harvester.contracts.wire.stops import StopOrder
from scheduler.decision_log import DecisionLog
from scheduler.gateway.capacity.agent_offers import AgentOffers
from scheduler.gateway.capacity.cluster_stops import ClusterStops
from scheduler.gateway.capacity.job_demands import JobDemands
from scheduler.gateway.capacity.shared_budgets import BudgetAllotments
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.policy.capacity import (
    CapacityEffect,
    CapacityPolicy,
    CapacitySample,
    DropLease,
    LeasableSlot,
    ReleaseLease,
    RenewLease,
    SlotRefusal,
    TakeLease,
)
from scheduler.gateway.running_attempt import CutReason
from scheduler.model import Lease

_log = logging.getLogger(__name__)

_TURN_S = 30.0
"""Horizon of the forecast that matters: about how long a turn keeps its place. Routing learns the
longest and shortest turns by itself."""

# Between two decisions when turns queue up: an agent answers in a millisecond.
_LEAST_PERIOD_S = 0.1
# A decision waits this long for agents; a later answer counts in the next one.
_ANSWER_S = 0.25

_Calls = dict[tuple[str, str], Callable[[], Coroutine[Any, Any, None]]]
"""Calls by their kind and the agent, slot or lease that they are about."""


class HarvestedSlots:
    def __init__(
        self,
        policy: CapacityPolicy,
        fleet: EngineFleet,
        offers: AgentOffers,
        stops: ClusterStops,
        demands: JobDemands,
        state: SchedulerState,
        log: DecisionLog,
        clock: Clock,
        *,
        wake: asyncio.Event,
        client_of: Callable[..., EngineClient],
    ) -> None:
        """`wake`: set where something changed, to decide at once instead of at the next period.
        `client_of`: makes a guest's client of its URL and `credentials`."""
        self._policy = policy
        self._fleet = fleet
        self.offers = offers
        self.stops = stops
        self._demands = demands
        self._state = state
        self._log = log
        self._clock = clock
        self._client_of = client_of
        self._refusals: list[SlotRefusal] = []
        self._limits: dict[SlotId, EventLimit] = {}
        self._doubted: set[LeaseId] = set()
        self._open: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._wake = wake
        self.budgets = BudgetAllotments(state, clock)
        self.leases: dict[LeaseId, Lease] = {}
        self.unrecorded: set[LeaseId] = set()
        """Leases whose beginning or end is not in the state file."""

    @property
    def slack_s(self) -> float:
        """Least time that is left to use a lease; infinite without leases."""
        ends = (lease.expires_s for lease in self.leases.values())
        return min(ends, default=math.inf) - self._policy.margin_s - self._clock.now()

    async def run(self, *, period_s: float) -> None:
        now = asyncio.get_running_loop().time
        try:
            await self._adopt()
            while True:
                next_s = now() + period_s
                await self.decide()
                await asyncio.sleep(_LEAST_PERIOD_S)
                try:
                    async with asyncio.timeout_at(min(next_s, now() + self.slack_s)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
        finally:
            for call in self._open.values():
                call.cancel()
            await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def decide(self) -> None:
        """Takes a sample, decides, and applies the effects.

        An agent that does not answer delays no decision about the leases of others for longer than
        `_ANSWER_S`, and is not asked the same again meanwhile.
        """
        for name in sorted(self.unrecorded):
            self._record(name)
        # Doubts that come while agents are asked are for the next decision.
        doubted, self._doubted = self._doubted, set()
        calls: _Calls = {
            ("renew", name): partial(self._renew, self.leases[name])
            for name in sorted(doubted & self.leases.keys())
        }
        for agent in sorted(self.offers.agents):
            calls["offers", agent] = partial(self._refresh_offers, agent)
        await self._ask(calls)
        demands = self._demands.observe()
        # Agents refuse by themselves; one from before stops, or out of reach, is not asked at all.
        stopped = any(each.active and self._is_stopped(each.job) for each in demands)
        emptied = self._hold_stopped()
        sample = CapacitySample(
            demands=demands,
            slots=tuple(
                LeasableSlot(
                    slot=offer.slot,
                    agent=agent,
                    free=offer.state is SlotState.OFFERED
                    and not stopped
                    and not self._fleet.registry.clash_of(offer.engine)
                    and not self.budgets.exhausted(offer),
                    idle_ratio=offer.idle_ratio,
                    forecast_ratio=_forecast_ratio(offer.forecasts),
                    emptied=offer.slot in emptied,
                )
                for agent, offer in self.offers.slots.values()
            ),
            leases=tuple(self.leases.values()),
            refusals=tuple(self._refusals),
        )
        self._refusals.clear()
        now = self._clock.now()
        effects = self._policy.observe(sample, now=now)
        self._log.decided(now=now, sample=sample, effects=effects)
        self._end_leases(effects)
        await self._ask({_call_of(effect): partial(self._apply, effect) for effect in effects})

    async def _ask(self, calls: _Calls) -> None:
        """Starts the calls that are not open already and waits for them for `_ANSWER_S`. Raises
        what any call raised since the last time."""
        self._raise_faults()
        started = {
            key: asyncio.create_task(call()) for key, call in calls.items() if key not in self._open
        }
        self._open |= started
        if started:
            await asyncio.wait(started.values(), timeout=_ANSWER_S)
        self._raise_faults()

    def _raise_faults(self) -> None:
        for key, call in tuple(self._open.items()):
            if call.done():
                del self._open[key]
                call.result()

    def _is_stopped(self, job: JobId) -> bool:
        return self.stops.order_for(self._tenant(job)) is not StopOrder.NONE

    def _tenant(self, job: JobId) -> TenantId:
        return TenantId(self._fleet.registry.jobs[job].tenant)

    def _hold_stopped(self) -> set[SlotId]:
        """Send no new turn to guests on held slots; returns those slots that run none any more."""
        emptied = set()
        for lease in self.leases.values():
            offer = self.offers.find(lease.slot, lease.agent)
            held = self._is_stopped(lease.job) or (offer is not None and offer.stop is not None)
            idle = self._fleet.hold(self.offers.guest_id(lease.slot), held=held)
            if held and idle:
                emptied.add(lease.slot)
        return emptied

    def refused(self, member: FleetMember) -> None:
        """Handles a guest's report that its lease is not the one in force.

        The guest may read a new grant later than its lease reached us, so this alone ends no
        lease: the engine rests until its next health check, and the agent is asked.
        """
        self._fleet.down(member, "refused the lease epoch", cut=CutReason.LEASE)
        if member.lease is not None:
            self._doubted.add(member.lease.lease)
            self._wake.set()

    async def release_all(self) -> None:
        effects = [
            ReleaseLease(lease=lease.lease, agent=lease.agent, reason="shutting down")
            for lease in self.leases.values()
        ]
        self._end_leases(effects)
        await asyncio.gather(*map(self._apply, effects))

    async def _adopt(self) -> None:
        """Renew what an earlier process held; what its agent does not renew is forgotten."""
        held: dict[str, list[Lease]] = {name: [] for name in self.offers.agents}
        for lease in self._state.leases():
            self._record(lease.lease)
            if lease.agent in held:
                held[lease.agent].append(lease)
        await self._ask(
            {
                ("offers", name): partial(self._adopt_from, name, leases)
                for name, leases in held.items()
                if leases
            }
        )

    async def _adopt_from(self, agent: str, leases: list[Lease]) -> None:
        await self._refresh_offers(agent)
        await asyncio.gather(*map(self._renew, leases))

    async def _refresh_offers(self, agent: str) -> None:
        if (reply := await self.offers.refresh(agent)) is not None:
            await self.stops.agree(agent, reply.stops)
            self.budgets.report(reply.slots)
            self._fleet.review_contexts()

    def _end_leases(self, effects: Iterable[CapacityEffect]) -> None:
        """Stop using leases before their slots are free for others."""
        for effect in effects:
            if isinstance(effect, ReleaseLease | DropLease):
                self._end(self.leases[effect.lease], effect.reason)

    async def _apply(self, effect: CapacityEffect) -> None:
        """The agent's part of an effect."""
        try:
            match effect:
                case TakeLease():
                    await self._take(effect)
                case RenewLease():
                    lease = self.leases.get(effect.lease)
                    if lease is not None:
                        await self._renew(lease)
                case ReleaseLease():
                    await self.offers.agents[effect.agent].release(effect.lease)
        except (Exhausted, PeerProtocolError) as error:
            self.offers.note_silence(effect.agent, str(error))

    async def _take(self, effect: TakeLease) -> None:
        called_at_s = self._clock.now()
        request = LeaseRequest(
            request_id=effect.request_id,
            slot=effect.slot,
            tenant=self._tenant(effect.job),
            job=effect.job,
            duration_s=effect.duration_s,
            allotment=self.budgets.allot(self.offers.find(effect.slot, effect.agent)),
        )
        match await self.offers.agents[effect.agent].take(request):
            case LeaseRefused() as refused:
                refusal = SlotRefusal(slot=effect.slot, retry_after_s=refused.retry_after_s)
                self._refusals.append(refusal)
            case LeaseGranted(slot=slot) if slot != effect.slot:
                _log.warning("agent %s: requested %s, granted %s", effect.agent, effect.slot, slot)
                self._refusals.append(SlotRefusal(slot=effect.slot, retry_after_s=0.0))
            case LeaseGranted() as granted:
                lease = Lease(
                    lease=granted.lease,
                    slot=effect.slot,
                    agent=effect.agent,
                    job=effect.job,
                    epoch=granted.epoch,
                    # The grantor counts from its reply, later than the question.
                    expires_s=called_at_s + min(granted.duration_s, effect.duration_s),
                )
                self._take_in(lease, granted.forecasts)

    async def _renew(self, lease: Lease) -> None:
        called_at_s, duration_s = self._clock.now(), self._policy.duration_s
        held = lease.lease in self.leases  # Not yet when it is adopted.
        try:
            offer = self.offers.find(lease.slot, lease.agent)
            reply = await self.offers.agents[lease.agent].renew(
                lease.lease,
                epoch=lease.epoch,
                duration_s=duration_s,
                allotment=self.budgets.allot(offer, epoch=lease.epoch),
            )
        except (Exhausted, PeerProtocolError) as error:
            self.offers.note_silence(lease.agent, str(error))
            return
        if held and lease.lease not in self.leases:
            return  # Its use ended while the answer was on its way.
        mismatch = lease.mismatch(reply)
        if mismatch:
            _log.warning("agent %s, slot %s: %s", lease.agent, lease.slot, mismatch)
            self._end(lease, mismatch)
            return
        match reply:
            case LeaseEnded():
                self._end(lease, f"ended by its agent: {reply.reason}")
            case LeaseGranted():
                expires_s = called_at_s + min(reply.duration_s, duration_s)
                self._take_in(msgspec.structs.replace(lease, expires_s=expires_s), reply.forecasts)

    def _take_in(self, lease: Lease, forecasts: tuple[IdleForecast, ...]) -> None:
        known = self.leases.get(lease.lease)
        self.leases[lease.lease] = lease
        idle_ratio = _forecast_ratio(forecasts)
        if known is not None and known.epoch == lease.epoch:
            guest = self.offers.guest_id(lease.slot)
            if self._fleet.renewed(guest, lease, idle_ratio=idle_ratio):
                return
            # The lease came from an earlier process, before its offer was known.
        else:
            self._record(lease.lease)
            self._log_lease(lease, "begins")
        offer = self.offers.find(lease.slot, lease.agent)
        if offer is None:
            return
        self._fleet.remove(self.offers.guest_id(lease.slot), "leased again")
        engine = self.offers.guest(offer)
        credentials = self.offers.credentials(lease.agent, lease.slot)
        client = self._client_of(engine.url, credentials=credentials)
        self._fleet.add(engine, client, lease=lease, idle_ratio=idle_ratio)

    def _end(self, lease: Lease, reason: str) -> None:
        self.leases.pop(lease.lease, None)
        # A restart also finds leases whose end could not be recorded: the slot may have another.
        if all(other.slot != lease.slot for other in self.leases.values()):
            self._fleet.remove(self.offers.guest_id(lease.slot), reason)
        self._record(lease.lease)
        self._log_lease(lease, f"ends: {reason}")

    def _log_lease(self, lease: Lease, what: str) -> None:
        """A slot whose production flaps gets a few lines, then one a minute."""
        limit = self._limits.setdefault(lease.slot, EventLimit.of_lines())
        if limit.admits(now=self._clock.now()):
            omitted = f" ({before} lines left out before)" if (before := limit.taken()) else ""
            line = "slot %s of agent %s: lease %d of job %s %s%s"
            _log.info(line, lease.slot, lease.agent, lease.epoch, lease.job, what, omitted)

    def _record(self, name: LeaseId) -> None:
        """Tried again at each decision while the state file cannot take it. A restart asks the
        agent about each recorded lease, so an ended lease is not used; an unrecorded lease ends by
        itself."""
        lease = self.leases.get(name)
        try:
            self._state.end(name) if lease is None else self._state.keep_lease(lease)
        except sqlite3.Error as error:
            if not self.unrecorded:
                _log.error("leases cannot be recorded in state_file: %s", error)
            self.unrecorded.add(name)
        else:
            self.unrecorded.discard(name)


def _call_of(effect: CapacityEffect) -> tuple[str, str]:
    match effect:
        case TakeLease():
            return "take", effect.slot
        case RenewLease():
            return "renew", effect.lease
        case _:
            return "end", effect.lease


def _forecast_ratio(forecasts: tuple[IdleForecast, ...]) -> float | None:
    """Idle share of a turn's time at its P10; None if unknown."""
    fitting = (each.low_ratio for each in forecasts if each.horizon_s >= _TURN_S)
    return next(fitting, None)
