"""The gateway's orders against agents that are away, forget, refuse, or hear another gateway."""

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import TenantId
from harvester.contracts.wire.stops import (
    NUMBER_MAX,
    Stop,
    StopOrder,
    StopReply,
    StopRequest,
    StopSource,
)
from harvester.policy.stop_table import StopTable
from scheduler.gateway.capacity.cluster_stops import ClusterStops
from scheduler.gateway.gateway_state import SchedulerState


@dataclass
class Agent:
    """The agent's own table behind an AgentClient's call."""

    table: StopTable = field(default_factory=StopTable)
    away: bool = False
    calls: int = 0

    async def order(self, request: StopRequest) -> StopReply:
        self.calls += 1
        if self.away:
            raise Exhausted("away")
        where = {"tenant": request.tenant}
        if request.order is StopOrder.NONE:
            left = self.table.lift(StopSource.CLUSTER, number=request.number, **where)
            return StopReply(in_force=left)
        stop = Stop(
            order=request.order,
            source=StopSource.CLUSTER,
            by=request.by,
            reason=request.reason,
            number=request.number,
            **where,
        )
        return StopReply(in_force=self.table.place(stop))

    @property
    def orders(self) -> list[tuple[str, str]]:
        return [(stop.tenant, stop.order.value) for stop in self.table.stops]


def stops_of(agents: dict[str, Agent], path: Path | None = None) -> ClusterStops:
    return ClusterStops(SchedulerState(path), cast(Any, agents))


def wanted(order: StopOrder, tenant: str = "") -> StopRequest:
    return StopRequest(order=order, tenant=tenant, by="alice", reason="incident")


async def report(stops: ClusterStops, agents: dict[str, Agent]) -> None:
    for name, agent in agents.items():
        if not agent.away:
            await stops.agree(name, agent.table.stops)


async def test_an_order_reaches_every_agent_before_the_call_returns() -> None:
    agents = {"a": Agent(), "b": Agent()}
    stops = stops_of(agents)
    reply = await stops.order(wanted(StopOrder.DRAIN))
    assert reply.agents == {"a": "", "b": ""}
    assert [agent.orders for agent in agents.values()] == [[("", "drain")]] * 2


async def test_an_agent_that_was_away_gets_the_order_when_it_reports() -> None:
    agents = {"a": Agent(), "b": Agent(away=True)}
    stops = stops_of(agents)
    reply = await stops.order(wanted(StopOrder.HOLD))
    assert "away" in reply.agents["b"]
    agents["b"].away = False
    await report(stops, agents)
    assert agents["b"].orders == [("", "hold")]
    assert stops.faults == {}
    calls = agents["a"].calls
    await report(stops, agents)
    assert agents["a"].calls == calls, "an agent that obeys is left in peace"


async def test_an_agent_that_was_away_at_the_end_of_an_order_lifts_it_later() -> None:
    agents = {"a": Agent()}
    stops = stops_of(agents)
    await stops.order(wanted(StopOrder.DRAIN))
    agents["a"].away = True
    reply = await stops.order(wanted(StopOrder.NONE))
    assert reply.in_force is None
    assert reply.agents["a"]
    agents["a"].away = False
    await report(stops, agents)
    assert agents["a"].orders == []


async def test_an_end_says_whether_any_order_of_the_cluster_was_known() -> None:
    agents = {"a": Agent()}
    stops = stops_of(agents)
    assert not (await stops.order(wanted(StopOrder.NONE))).lifted
    await stops.order(wanted(StopOrder.HOLD, "t"))
    assert not (await stops.order(wanted(StopOrder.NONE))).lifted, "another scope"
    after = stops_of(agents)
    await report(after, agents)
    assert (await after.order(wanted(StopOrder.NONE, "t"))).lifted, "another gateway's"
    await report(after, agents)
    assert not (await after.order(wanted(StopOrder.NONE, "t"))).lifted


async def test_an_agent_that_lost_its_table_gets_the_order_again() -> None:
    agents = {"a": Agent()}
    stops = stops_of(agents)
    await stops.order(wanted(StopOrder.HOLD, "t"))
    agents["a"].table = StopTable()
    await report(stops, agents)
    assert agents["a"].orders == [("t", "hold")]


async def test_a_restarted_gateway_goes_on_with_its_orders(tmp_path: Path) -> None:
    agents = {"a": Agent()}
    await stops_of(agents, tmp_path / "state").order(wanted(StopOrder.DRAIN, "t"))
    agents["a"].table = StopTable()
    stops = stops_of(agents, tmp_path / "state")
    assert stops.order_for(TenantId("t")) is StopOrder.DRAIN
    assert stops.order_for(TenantId("u")) is StopOrder.NONE
    await report(stops, agents)
    assert agents["a"].orders == [("t", "drain")]


async def test_a_hold_after_a_drain_changes_nothing_until_it_is_resumed() -> None:
    agents = {"a": Agent()}
    stops = stops_of(agents)
    await stops.order(wanted(StopOrder.DRAIN))
    reply = await stops.order(wanted(StopOrder.HOLD))
    assert reply.in_force is not None
    assert reply.in_force.order is StopOrder.DRAIN
    await stops.order(wanted(StopOrder.NONE))
    await stops.order(wanted(StopOrder.HOLD))
    assert agents["a"].orders == [("", "hold")]
    assert [stop.number for stop in agents["a"].table.stops] == [3]


async def test_a_gateway_without_orders_leaves_another_ones_alone() -> None:
    agents = {"a": Agent()}
    one, other = stops_of(agents), stops_of(agents)
    await one.order(wanted(StopOrder.DRAIN))
    await report(other, agents)
    assert agents["a"].orders == [("", "drain")]
    await other.order(wanted(StopOrder.HOLD))
    assert agents["a"].orders == [("", "drain")], "the weaker one lifts nothing"
    reply = await other.order(wanted(StopOrder.NONE))
    assert reply.agents == {"a": ""}
    assert agents["a"].orders == []


async def test_a_gateway_that_forgot_its_order_can_lift_it() -> None:
    agents = {"a": Agent()}
    before = stops_of(agents)
    await before.order(wanted(StopOrder.NONE))
    await before.order(wanted(StopOrder.DRAIN))
    after = stops_of(agents)
    await report(after, agents)
    await after.order(wanted(StopOrder.NONE))
    assert agents["a"].orders == []


async def test_a_slot_is_ordered_at_its_agent() -> None:
    with pytest.raises(PeerProtocolError, match="slot"):
        await stops_of({}).order(StopRequest(order=StopOrder.HOLD, slot="s", reason="r"))


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_end_of_one_gateway_does_not_lift_a_later_order_of_another(
    tmp_path: Path, restarted: bool
) -> None:
    agents = {"a": Agent()}
    one, other = stops_of(agents, tmp_path / "state"), stops_of(agents)
    await one.order(wanted(StopOrder.DRAIN))
    await one.order(wanted(StopOrder.NONE))
    await report(one, agents)
    await report(other, agents)
    await other.order(wanted(StopOrder.DRAIN))
    one = stops_of(agents, tmp_path / "state") if restarted else one
    for _ in range(3):
        await report(one, agents)
        assert agents["a"].orders == [("", "drain")]
    await other.order(wanted(StopOrder.NONE))
    assert agents["a"].orders == []


async def test_an_order_of_two_gateways_stays_until_both_lift_it() -> None:
    agents = {"a": Agent()}
    one, other = stops_of(agents), stops_of(agents)
    for gateway in (one, other):
        await gateway.order(wanted(StopOrder.DRAIN))
    await one.order(wanted(StopOrder.NONE))
    await report(other, agents)
    for _ in range(3):
        await report(one, agents)
        assert agents["a"].orders == [("", "drain")]
        await report(other, agents)
    await other.order(wanted(StopOrder.NONE))
    for gateway in (one, other):
        await report(gateway, agents)
    assert agents["a"].orders == []


@pytest.mark.parametrize("number", [NUMBER_MAX, 1 << 63])
async def test_no_number_that_one_agent_reports_keeps_orders_from_the_others(number: int) -> None:
    agents = {"a": Agent(), "b": Agent()}
    stops = stops_of(agents)
    lie = Stop(order=StopOrder.HOLD, source=StopSource.CLUSTER, number=number)
    await stops.agree("a", (lie,))
    await stops.order(wanted(StopOrder.DRAIN))
    assert agents["b"].table.stops[0].number <= NUMBER_MAX
    await stops.order(wanted(StopOrder.NONE))
    assert agents["b"].orders == []


class FullState(SchedulerState):
    full = True

    def keep_stop(self, stop: Stop) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        super().keep_stop(stop)


async def test_an_order_that_cannot_be_recorded_reaches_the_agents_and_is_recorded_later(
    tmp_path: Path,
) -> None:
    agents = {"a": Agent()}
    state = FullState(tmp_path / "state")
    stops = ClusterStops(state, cast(Any, agents))
    reply = await stops.order(wanted(StopOrder.DRAIN))
    assert (reply.agents, reply.recorded) == ({"a": ""}, False)
    assert agents["a"].orders == [("", "drain")]
    with pytest.raises(Exhausted, match="stays"):
        await stops.order(wanted(StopOrder.NONE))
    assert agents["a"].orders == [("", "drain")]
    await report(stops, agents)
    assert stops_of(agents, tmp_path / "state").stops == ()
    state.full = False
    await report(stops, agents)
    assert [stop.order for stop in stops_of(agents, tmp_path / "state").stops] == ["drain"]
    assert (await stops.order(wanted(StopOrder.NONE))).recorded


async def test_an_agent_that_does_not_answer_costs_one_call_whatever_was_ordered() -> None:
    agents = {"a": Agent()}
    stops = stops_of(agents)
    for tenant in ("t", "u", "v"):
        await stops.order(wanted(StopOrder.DRAIN, tenant))
    agents["a"].away, agents["a"].calls = True, 0
    await stops.agree("a", ())
    assert agents["a"].calls == 1
    agents["a"].away, agents["a"].table = False, StopTable()
    await report(stops, agents)
    assert [tenant for tenant, _ in agents["a"].orders] == ["t", "u", "v"]


async def test_an_order_of_a_gateway_that_this_one_has_not_heard_of_is_lifted_at_once() -> None:
    agents = {"a": Agent(), "b": Agent()}
    before = stops_of(agents)
    for order in (StopOrder.DRAIN, StopOrder.NONE, StopOrder.DRAIN):
        await before.order(wanted(order))
    reply = await stops_of(agents).order(wanted(StopOrder.NONE))
    assert reply.agents == {"a": "", "b": ""}
    assert [agent.orders for agent in agents.values()] == [[], []]
