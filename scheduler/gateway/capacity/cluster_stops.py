"""Orders to stop for every agent of the gateway, or for one tenant: kept, sent and sent again.

Each agent reports its stops with its offers, once a second. An agent that does not report an order
of this gateway gets it again; an agent that holds an order lifted here lifts it. A gateway that
never had an order for a tenant leaves what other gateways ordered alone.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Mapping

import msgspec

from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import TenantId
from harvester.contracts.wire.stops import (
    NUMBER_MAX,
    ClusterStopReply,
    Stop,
    StopOrder,
    StopRequest,
    StopSource,
)
from scheduler.gateway.capacity.agent_client import AgentClient
from scheduler.gateway.gateway_state import SchedulerState

_log = logging.getLogger(__name__)


class ClusterStops:
    def __init__(self, state: SchedulerState, agents: Mapping[str, AgentClient]) -> None:
        self._state = state
        self._agents = agents
        self._stops = {stop.tenant: stop for stop in state.stops()}
        """The last order for each tenant, "" for all; one of `none` was lifted."""
        self.unrecorded: set[str] = set()
        """Tenants whose last order is not in the state file."""
        self._reported: dict[str, tuple[Stop, ...]] = {}
        self.faults: dict[str, str] = {}
        """Reason why an agent is not known to obey, by agent."""

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Orders in force."""
        stops = (stop for _, stop in sorted(self._stops.items()))
        return tuple(stop for stop in stops if stop.order is not StopOrder.NONE)

    def order_for(self, tenant: TenantId) -> StopOrder:
        orders = [stop.order for stop in self.stops if stop.tenant in ("", tenant)]
        return max(orders, key=lambda order: order.strength, default=StopOrder.NONE)

    async def order(self, request: StopRequest) -> ClusterStopReply:
        """Keep an order and send it to all agents at once, even if it cannot be recorded. Raises
        PeerProtocolError for a slot's order, and Exhausted for an end that cannot be recorded."""
        request.check()
        if request.slot:
            raise PeerProtocolError(
                "slot: send the order to the slot's agent; a gateway orders all agents"
            )
        before = self._stops.get(request.tenant)
        lifts = request.order is StopOrder.NONE
        lifted = any(stop.order is not StopOrder.NONE for stop in self._known(request.tenant))
        if lifts or before is None or before.order.strength < request.order.strength:
            stop = Stop(
                order=request.order,
                source=StopSource.CLUSTER,
                tenant=request.tenant,
                by=request.by,
                reason=request.reason,
                at=wall_time_utc(),
                number=1 + self._latest(request.tenant),
            )
            scope = f"tenant {stop.tenant}" if stop.tenant else "all agents"
            _log.warning("order for %s: %s", scope, stop.text)
            if not self._recorded(stop) and lifts:
                # A restarted gateway would stop again: the operator shall know now.
                raise Exhausted("the stop stays: its end cannot be written to state_file")
            self._stops[request.tenant] = stop
        in_force = self._stops[request.tenant]
        await self._tell_all(in_force)
        if lifts and (latest := self._latest(request.tenant)) > in_force.number:
            # Another gateway's, or this one's before its state file was lost.
            in_force = msgspec.structs.replace(in_force, number=1 + latest)
            self._recorded(in_force)
            self._stops[request.tenant] = in_force
            await self._tell_all(in_force)
        return ClusterStopReply(
            in_force=None if lifts else in_force,
            agents={name: self.faults.get(name, "") for name in sorted(self._agents)},
            recorded=request.tenant not in self.unrecorded,
            lifted=lifted,
        )

    async def agree(self, agent: str, reported: tuple[Stop, ...]) -> None:
        """Send an agent the orders and ends of orders that its report lacks."""
        self._reported[agent] = reported
        for tenant in tuple(self.unrecorded & self._stops.keys()):
            self._recorded(self._stops[tenant])
        held = {stop.tenant: stop for stop in reported if stop.source is StopSource.CLUSTER}
        wrong = [
            stop for tenant, stop in sorted(self._stops.items()) if _differs(stop, held.get(tenant))
        ]
        if not wrong:
            self.faults.pop(agent, None)
        for stop in wrong:
            if not await self._tell(agent, stop):
                break

    async def _tell_all(self, stop: Stop) -> None:
        await asyncio.gather(*(self._tell(name, stop) for name in sorted(self._agents)))

    async def _tell(self, agent: str, stop: Stop) -> bool:
        """Sends an order; returns whether the agent answers."""
        request = StopRequest(
            order=stop.order,
            tenant=stop.tenant,
            by=stop.by,
            reason=stop.reason,
            cluster=True,
            number=stop.number,
        )
        try:
            reply = await self._agents[agent].order(request)
        except (Exhausted, PeerProtocolError) as error:
            self.faults[agent] = str(error)
            return not isinstance(error, Exhausted)
        if reply.in_force is not None:
            self._reported[agent] = (*self._reported.get(agent, ()), reply.in_force)
        if _differs(stop, reply.in_force):
            self.faults[agent] = f"has another order: {reply.in_force and reply.in_force.text}"
        elif not reply.recorded:
            self.faults[agent] = "obeys, and a restart of it would forget that"
        else:
            self.faults.pop(agent, None)
        return True

    def _known(self, tenant: str) -> list[Stop]:
        """Any gateway's orders, and ends of orders, that are known here for this scope."""
        reported = (stop for stops in self._reported.values() for stop in stops)
        every = (*self._stops.values(), *reported)
        cluster = (stop for stop in every if stop.source is StopSource.CLUSTER)
        return [stop for stop in cluster if stop.tenant == tenant]

    def _latest(self, tenant: str) -> int:
        """The highest number of an order that is known here, with one left above it."""
        numbers = (stop.number for stop in self._known(tenant))
        # An agent may report any number; a number that no agent accepts would stop nothing.
        return min(max(numbers, default=0), NUMBER_MAX - 1)

    def _recorded(self, stop: Stop) -> bool:
        try:
            self._state.keep_stop(stop)
        except sqlite3.Error as error:
            if stop.tenant not in self.unrecorded:
                _log.error("a restart would forget this order: %s: %s", error, stop.text)
            self.unrecorded.add(stop.tenant)
            return False
        self.unrecorded.discard(stop.tenant)
        return True


def _differs(required: Stop, held: Stop | None) -> bool:
    """Whether the agent's order must change; a stronger order of another gateway stays as it is."""
    if required.order is StopOrder.NONE:
        return held is not None and held.number <= required.number
    return held is None or held.order.strength < required.order.strength
