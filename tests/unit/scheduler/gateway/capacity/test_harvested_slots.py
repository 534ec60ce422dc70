"""The holder of leases against agents that restart, answer for others, or answer nonsense."""

import asyncio
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import EngineId, Epoch, JobId, LeaseId, NodeId, SlotId
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import (
    EndReason,
    IdleForecast,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    SlotOffer,
    SlotOffers,
    SlotState,
)
from harvester.platform.tls import Credentials
from harvester.policy.lease_table import LeaseTable
from scheduler.decision_log import DecisionLog
from scheduler.gateway.capacity.agent_offers import AgentOffers
from scheduler.gateway.capacity.cluster_stops import ClusterStops
from scheduler.gateway.capacity.harvested_slots import HarvestedSlots
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.gateway_status import why_unused
from scheduler.gateway.policy.capacity import CapacityConfig, CapacityPolicy, Demand
from scheduler.gateway.running_attempt import CutReason
from scheduler.model import Engine, Lease
from tests.unit.scheduler.gateway.registry import registry_of

SLOTS = tuple(SlotId(f"slot{number}") for number in range(3))
JOB = JobId("job")


@dataclass
class Clock:
    at_s: float = 0.0

    def now(self) -> float:
        return self.at_s


class Fleet:
    """Guests open to turns, and their leases."""

    def __init__(self) -> None:
        self.guests: dict[EngineId, tuple[Engine, Lease]] = {}
        self.idle_ratios: dict[EngineId, float | None] = {}
        self.registry = registry_of(JOB, tenant="t")

    def add(
        self, engine: Engine, _client: object, *, lease: Lease, idle_ratio: float | None
    ) -> None:
        self.guests[engine.engine] = (engine, lease)
        self.idle_ratios[engine.engine] = idle_ratio

    def remove(self, engine: EngineId, _reason: str) -> None:
        self.guests.pop(engine, None)

    def renewed(self, engine: EngineId, lease: Lease, *, idle_ratio: float | None = None) -> bool:
        if engine not in self.guests:
            return False
        self.guests[engine] = (self.guests[engine][0], lease)
        self.idle_ratios[engine] = idle_ratio
        return True

    def hold(self, _engine: EngineId, *, held: bool) -> bool:
        return held

    def down(self, _member: object, _fault: str, *, cut: CutReason) -> None:
        assert cut is CutReason.LEASE

    def review_contexts(self) -> None: ...


@dataclass
class Agent:
    """The agent's own lease table behind an AgentClient's calls."""

    clock: Clock
    name: str = "n"
    slots: tuple[SlotId, ...] = SLOTS
    lost: bool = False
    reply: Any = None
    """Sent instead of the next answer to a renewal or a request."""
    forecasts: tuple[IdleForecast, ...] = ()
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = LeaseTable(node=NodeId(self.name), ttl_s=10.0)
        for slot in self.slots:
            self.leases.add_slot(slot, epoch=Epoch(0))
            self.leases.offer(slot, SlotState.OFFERED)

    def restart(self) -> None:
        leases = LeaseTable(node=NodeId(self.name), ttl_s=10.0)
        for slot in reversed(self.slots):
            live = self.leases.live(slot)
            kept = (
                None
                if live is None
                else msgspec.structs.replace(live, ends_s=self.clock.at_s + 10.0)
            )
            leases.add_slot(slot, epoch=self.leases.view(slot).epoch, recorded=kept)
            leases.offer(slot, SlotState.OFFERED)
        self.leases = leases

    async def offers(self) -> SlotOffers:
        return SlotOffers(node=NodeId(self.name), slots=tuple(map(self._offer, self.slots)))

    async def take(self, request: LeaseRequest) -> LeaseGranted | LeaseRefused:
        self.asked.append(f"take {request.slot}")
        answer = self.leases.take(
            request, secret=f"{self.name}{len(self.asked):031d}", now=self.clock.at_s
        )
        return self._said(answer)

    async def renew(
        self, lease: LeaseId, *, epoch: Epoch, duration_s: float, allotment: Allotment | None
    ) -> LeaseGranted | LeaseEnded:
        from harvester.contracts.wire.leases import LeaseRenewal

        self.asked.append("renew")
        renewal = LeaseRenewal(epoch=epoch, duration_s=duration_s, allotment=allotment)
        return self._said(self.leases.renew(lease, renewal, now=self.clock.at_s))

    async def release(self, lease: LeaseId) -> LeaseEnded:
        self.asked.append("release")
        return self.leases.release(lease, now=self.clock.at_s)

    def _said(self, answer: Any) -> Any:
        if self.lost:
            raise Exhausted("lost")
        said, self.reply = self.reply or answer, None
        if isinstance(said, LeaseGranted):
            said = msgspec.structs.replace(said, forecasts=self.forecasts)
        return said

    def _offer(self, slot: SlotId) -> SlotOffer:
        state, reason, epoch = self.leases.entry(slot)
        return SlotOffer(
            slot=slot,
            node=NodeId(self.name),
            state=state,
            engine_url=f"http://{self.name}-{slot}",
            model="m",
            epoch=epoch,
            concurrency=4,
            kv_tokens=0,
            idle_ratio=None,
            reason=reason,
            forecasts=self.forecasts,
        )


class Stage:
    def __init__(
        self,
        *agents: str,
        credentials: Credentials | None = None,
        state: SchedulerState | None = None,
    ) -> None:
        self.clock = Clock()
        self.agents = {name: Agent(self.clock, name) for name in agents or ("n",)}
        self.fleet = Fleet()
        policy, state = CapacityPolicy(CapacityConfig(instance="i")), state or SchedulerState(None)
        demand = Demand(
            job=JOB, active=True, harvesting=True, queued=9, running=0, dedicated_places=0
        )
        agents: Any = self.agents
        trusted = dict.fromkeys(self.agents, credentials or Credentials())
        self.harvest = HarvestedSlots(
            policy,
            self.fleet,  # type: ignore[arg-type]
            AgentOffers(agents, trusted, {}),
            ClusterStops(state, agents),
            SimpleNamespace(observe=lambda: (demand,)),  # type: ignore[arg-type]
            state,
            DecisionLog(None, policy, {}, max_bytes=1 << 20, now=0.0),
            self.clock,
            wake=asyncio.Event(),
            client_of=lambda _url, *, credentials: None,  # type: ignore[arg-type, return-value]
        )

    async def looks(self, *, after_s: float = 0.0) -> None:
        self.clock.at_s += after_s
        await self.harvest.decide()

    @property
    def held(self) -> dict[SlotId, Lease]:
        return {lease.slot: lease for lease in self.harvest.leases.values()}


async def test_leases_survive_the_restart_of_their_agent_each_on_its_slot() -> None:
    stage = Stage()
    await stage.looks()
    before = {slot: lease.lease for slot, lease in stage.held.items()}
    assert set(before) == set(SLOTS)
    stage.agents["n"].restart()
    await stage.looks(after_s=4.0)
    assert {slot: lease.lease for slot, lease in stage.held.items()} == before
    assert all(lease.expires_s == 14.0 for lease in stage.held.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slot": SLOTS[1]}, "slot"),
        ({"epoch": Epoch(9)}, "epoch"),
        ({"lease": LeaseId("other")}, "another lease"),
    ],
)
async def test_a_lease_whose_reply_names_another_is_dropped_at_once(
    changes: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    await stage.looks()
    lease = stage.held[SLOTS[0]]
    granted = LeaseGranted(lease=lease.lease, slot=lease.slot, epoch=lease.epoch, duration_s=10.0)
    fields = {name: getattr(granted, name) for name in granted.__struct_fields__}
    stage.agents["n"].reply = LeaseGranted(**{**fields, **changes})
    await stage.harvest._renew(lease)
    assert SLOTS[0] not in stage.held
    assert EngineId("guest.slot0") not in stage.fleet.guests
    assert says in caplog.text


async def test_the_log_names_leases_that_begin_and_end_and_bounds_those_of_one_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    stage = Stage()
    await stage.looks()
    lease = stage.held[SLOTS[0]]
    assert f"slot slot0 of agent n: lease {lease.epoch} of job job begins" in caplog.messages
    stage.harvest._end(lease, "ended by its agent: breach")
    assert "lease 1 of job job ends: ended by its agent: breach" in caplog.messages[-1]
    assert not any(lease.lease in message for message in caplog.messages), "its id is a secret"
    caplog.clear()
    for _ in range(100):
        stage.harvest._end(lease, "breach")
    assert len(caplog.messages) == 4
    stage.clock.at_s += 60.0
    stage.harvest._end(lease, "breach")
    assert caplog.messages[-1].endswith("breach (96 lines left out before)")


async def test_a_slot_that_takes_no_turns_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, slot = Stage(), SLOTS[0]
    agent, harvest = stage.agents["n"], stage.harvest

    def reason(state: SlotState, why: str) -> str:
        agent.leases.offer(slot, state, why)
        return why_unused(agent._offer(slot), harvest, stage.fleet.registry)

    assert reason(SlotState.OFF, "proof slice of at most 58 s") == "proof slice of at most 58 s"
    assert reason(SlotState.OFF, "") == "its agent says off"
    assert reason(SlotState.OFFERED, "no lease") == "no lease"
    registry = stage.fleet.registry
    clash = "vocabulary 32, not 64"
    monkeypatch.setattr(type(registry), "clash_of", lambda _registry, _engine: clash)
    assert reason(SlotState.OFFERED, "no lease") == clash
    monkeypatch.setattr(harvest.budgets, "exhausted", lambda _offer: True)
    assert reason(SlotState.OFFERED, "no lease") == "the error budget of its service is spent"
    guest = SimpleNamespace(fault="cannot read the engine's identity")
    registry.members[EngineId(f"guest.{slot}")] = guest  # type: ignore[assignment]
    assert reason(SlotState.LEASED, "") == "cannot read the engine's identity"
    guest.fault = ""
    assert reason(SlotState.LEASED, "") == ""


async def test_the_forecast_of_a_lease_reaches_the_fleet_and_that_of_an_offer_the_policy() -> None:
    stage = Stage()
    forecasts = tuple(
        IdleForecast(horizon_s=horizon_s, low_ratio=low, median_ratio=0.8, high_ratio=0.9)
        for horizon_s, low in ((10.0, 0.7), (30.0, 0.6), (120.0, 0.5))
    )
    stage.agents["n"].forecasts = forecasts[:1]
    await stage.looks()
    assert set(stage.fleet.idle_ratios.values()) == {None}, "too short for a turn"
    stage.agents["n"].forecasts = forecasts
    await stage.looks(after_s=4.0)
    assert set(stage.fleet.idle_ratios.values()) == {0.6}
    stage.agents["n"].forecasts = ()
    await stage.looks(after_s=4.0)
    assert set(stage.fleet.idle_ratios.values()) == {None}


async def test_a_doubt_that_comes_while_another_is_settled_is_for_the_next_look() -> None:
    stage = Stage()
    await stage.looks()
    agent, members = stage.agents["n"], [SimpleNamespace(lease=stage.held[s]) for s in SLOTS[:2]]
    stage.harvest.refused(members[0])  # type: ignore[arg-type]
    renew = agent.renew

    async def interrupted(*args: Any, **kwargs: Any) -> LeaseGranted | LeaseEnded:
        agent.renew = renew  # type: ignore[method-assign]
        stage.harvest.refused(members[1])  # type: ignore[arg-type]
        return await renew(*args, **kwargs)

    agent.renew = interrupted  # type: ignore[method-assign]
    await stage.looks()
    assert agent.asked.count("renew") == 1
    await stage.looks()
    assert agent.asked.count("renew") == 2
    await stage.looks()
    assert agent.asked.count("renew") == 2


async def test_an_end_of_another_lease_is_no_reply_to_ours_either() -> None:
    stage = Stage()
    await stage.looks()
    lease = stage.held[SLOTS[0]]
    stage.agents["n"].reply = LeaseEnded(lease=LeaseId("other"), reason=EndReason.RELEASED)
    await stage.harvest._renew(lease)
    assert SLOTS[0] not in stage.held


async def test_a_grant_of_another_slot_is_not_used() -> None:
    stage = Stage()
    stage.agents["n"].reply = LeaseGranted(
        lease=LeaseId("x"), slot=SlotId("elsewhere"), epoch=Epoch(1), duration_s=10.0
    )
    await stage.looks()
    assert set(stage.held) == set(SLOTS[1:])
    assert SlotId("elsewhere") not in stage.held


async def test_a_reply_gives_no_more_time_than_requested() -> None:
    stage = Stage()
    stage.agents["n"].reply = LeaseGranted(
        lease=LeaseId("x"), slot=SLOTS[0], epoch=Epoch(1), duration_s=1e9
    )
    await stage.looks()
    assert stage.held[SLOTS[0]].expires_s == 10.0


async def test_a_repeated_request_after_a_lost_reply_gets_the_same_lease() -> None:
    stage = Stage()
    agent = stage.agents["n"]
    agent.lost = True
    await stage.looks()
    assert stage.held == {}
    agent.lost = False
    granted = {slot: agent.leases.live(slot) for slot in SLOTS}
    agent.restart()
    await stage.looks(after_s=1.0)
    assert {slot: lease.lease for slot, lease in stage.held.items()} == {
        slot: lease.lease for slot, lease in granted.items() if lease is not None
    }
    assert len(stage.held) == len(SLOTS)


@pytest.mark.parametrize("first", ["a", "b"])
async def test_a_slot_name_of_two_agents_sends_no_turn_to_the_wrong_one(first: str) -> None:
    stage = Stage("a", "b")
    await stage.harvest._refresh_offers(first)
    for step in range(4):
        await stage.looks(after_s=3.0 if step else 0.0)
        assert set(stage.held) == set(SLOTS)
        for engine, lease in stage.fleet.guests.values():
            assert lease.agent == first
            assert engine.url == f"http://{first}-{lease.slot}"
    other = "b" if first == "a" else "a"
    assert (
        f"agent {first} offers slot0, slot1, slot2 too" in stage.harvest.offers.silent_agents[other]
    )
    assert stage.agents[other].asked == []


async def test_no_token_goes_to_a_guest_that_an_agent_offers_by_plain_http(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 20)
    token.chmod(0o600)
    stage = Stage(credentials=Credentials(token_file=token))
    await stage.looks()
    assert not stage.held
    assert "http://n-slot" in stage.harvest.offers.silent_agents["n"]
    assert "engine-proxy" in stage.harvest.offers.silent_agents["n"]


class FullState(SchedulerState):
    full = False

    def keep_lease(self, lease: Lease) -> None:
        self._fails()
        super().keep_lease(lease)

    def end(self, lease: LeaseId) -> None:
        self._fails()
        super().end(lease)

    def _fails(self) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")


async def test_leases_that_cannot_be_recorded_are_used_and_recorded_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = FullState(None)
    stage = Stage(state=state)
    state.full = True
    await stage.looks()
    assert set(stage.held) == set(SLOTS)
    await stage.looks(after_s=1.0)
    assert stage.harvest.unrecorded == set(stage.harvest.leases)
    assert caplog.text.count("cannot be recorded") == 1
    assert state.leases() == []
    state.full = False
    await stage.looks(after_s=1.0)
    assert stage.harvest.unrecorded == set()
    assert {lease.lease for lease in state.leases()} == set(stage.harvest.leases)


async def test_a_lease_whose_end_cannot_be_recorded_is_not_used_and_is_forgotten_later() -> None:
    state = FullState(None)
    stage = Stage(state=state)
    await stage.looks()
    lease = stage.held[SLOTS[0]]
    state.full = True
    stage.agents["n"].reply = LeaseEnded(lease=lease.lease, reason=EndReason.RELEASED)
    await stage.harvest._renew(lease)
    assert SLOTS[0] not in stage.held
    assert EngineId("guest.slot0") not in stage.fleet.guests
    assert lease.lease in {each.lease for each in state.leases()}
    state.full = False
    stage.harvest._demands = SimpleNamespace(observe=lambda: ())  # type: ignore[assignment]
    await stage.looks()
    assert lease.lease not in {each.lease for each in state.leases()}


async def test_a_restart_on_a_full_disk_renews_its_leases() -> None:
    state = FullState(None)
    before = Stage(state=state)
    await before.looks()
    after = Stage(state=state)
    after.agents = before.agents
    after.harvest.offers.agents = before.agents  # type: ignore[assignment]
    state.full = True
    await after.harvest._adopt()
    assert set(after.held) == set(SLOTS)


async def test_a_renewal_is_not_recorded_again() -> None:
    state = FullState(None)
    stage = Stage(state=state)
    await stage.looks()
    state.full = True
    await stage.looks(after_s=4.0)
    assert all(lease.expires_s == 14.0 for lease in stage.held.values())
    assert stage.harvest.unrecorded == set()


async def test_a_restart_whose_first_look_at_the_offers_is_lost_uses_its_leases_later() -> None:
    state = SchedulerState(None)
    first = Stage(state=state)
    await first.looks()
    second = Stage(state=state)
    second.agents = second.harvest.offers.agents = first.agents  # type: ignore[assignment]
    agent, lost = first.agents["n"], [Exhausted("timeout")]
    offers = agent.offers

    async def offers_later() -> SlotOffers:
        if lost:
            raise lost.pop()
        return await offers()

    agent.offers = offers_later  # type: ignore[method-assign]
    await second.harvest._adopt()
    assert len(second.harvest.leases) == len(SLOTS) > len(second.fleet.guests)
    for _ in range(5):
        await second.looks(after_s=1.0)
    assert len(second.fleet.guests) == len(SLOTS)


async def test_a_restart_takes_leases_over_while_another_agent_is_away() -> None:
    state = SchedulerState(None)
    first = Stage("away", "there", state=state)
    first.agents["away"] = Agent(first.clock, "away", slots=(SlotId("of-away"),))
    await first.looks()
    assert len(first.held) == 1 + len(SLOTS)
    second, answers = Stage("away", "there", state=state), asyncio.Event()
    second.agents |= first.agents
    offers = first.agents["away"].offers

    async def offers_later() -> SlotOffers:
        await answers.wait()
        return await offers()

    first.agents["away"].offers = offers_later  # type: ignore[method-assign]
    adopting = asyncio.create_task(second.harvest._adopt())
    async with asyncio.timeout(30):
        while second.held.keys() != set(SLOTS):  # noqa: ASYNC110 - a fact without an event
            await asyncio.sleep(0)
        # Its first look comes while the other agent still says nothing: leases need renewals.
        await adopting
    answers.set()
    await asyncio.sleep(0.01)
    await second.looks()
    assert second.held.keys() == {"of-away", *SLOTS}


@pytest.mark.parametrize("old", ["0-old", "z-old"])
async def test_an_ended_lease_that_a_restart_finds_takes_no_guest_from_its_successor(
    old: str,
) -> None:
    state = SchedulerState(None)
    first = Stage(state=state)
    await first.looks()
    live = next(iter(first.harvest.leases.values()))
    state.keep_lease(msgspec.structs.replace(live, lease=LeaseId(old)))
    second = Stage(state=state)
    second.agents = second.harvest.offers.agents = first.agents  # type: ignore[assignment]
    await second.harvest._adopt()
    assert len(second.harvest.leases) == len(second.fleet.guests) == len(SLOTS)


def _two_nodes() -> tuple[Stage, asyncio.Event]:
    """Agents with slots of their own. Until the event, `away` answers nothing that it does."""
    stage, answers = Stage("away", "there"), asyncio.Event()
    away = stage.agents["away"] = Agent(stage.clock, "away", slots=(SlotId("of-away"),))
    offers, renew = away.offers, away.renew

    async def offers_later() -> SlotOffers:
        away.asked.append("offers")
        reply = await offers()
        await answers.wait()
        return reply

    async def renew_later(*args: Any, **kwargs: Any) -> LeaseGranted | LeaseEnded:
        reply = await renew(*args, **kwargs)
        await answers.wait()
        return reply

    away.offers, away.renew = offers_later, renew_later  # type: ignore[method-assign]
    return stage, answers


async def test_a_silent_agent_is_asked_once_and_delays_no_renewal_of_another() -> None:
    stage, answers = _two_nodes()
    answers.set()
    await stage.looks()
    answers.clear()
    for _ in range(3):
        await stage.looks(after_s=4.0)
    asked = stage.agents["away"].asked
    assert (asked.count("offers"), asked.count("renew")) == (2, 1)
    assert {slot: lease.expires_s for slot, lease in stage.held.items()} == dict.fromkeys(
        SLOTS, 22.0
    )
    assert EngineId("guest.of-away") not in stage.fleet.guests
    answers.set()
    await stage.looks()
    await stage.looks()
    assert asked.count("offers") == 3


async def test_a_renewal_that_is_answered_after_its_lease_was_dropped_does_not_revive_it() -> None:
    stage, answers = _two_nodes()
    answers.set()
    await stage.looks()
    answers.clear()
    await stage.looks(after_s=4.0)
    await stage.looks(after_s=5.0)
    assert SlotId("of-away") not in stage.held
    assert stage.agents["away"].leases.live(SlotId("of-away")) is not None
    answers.set()
    await stage.looks()
    assert SlotId("of-away") not in stage.held
    assert EngineId("guest.of-away") not in stage.fleet.guests


async def test_a_late_call_that_fails_unexpectedly_fails_the_next_look() -> None:
    stage, answers = _two_nodes()

    async def broken(agent: str, _stops: object) -> None:
        if agent == "away":
            raise ZeroDivisionError

    stage.harvest.stops.agree = broken  # type: ignore[method-assign]
    await stage.looks()
    answers.set()
    await asyncio.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        await stage.looks()


async def test_a_gateway_looks_again_before_the_use_of_a_lease_must_end() -> None:
    stage, answers = _two_nodes()
    answers.set()
    await stage.looks()
    assert stage.harvest.slack_s == 9.0
    stage.clock.at_s = 8.9
    stage.harvest._adopt = stage.harvest.decide  # type: ignore[method-assign]
    answers.clear()
    stage.agents["there"].lost = True
    running = asyncio.create_task(stage.harvest.run(period_s=60.0))
    async with asyncio.timeout(30):
        while stage.agents["there"].asked.count("renew") < 2 * len(SLOTS):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stage.clock.at_s = 9.0
        while stage.held:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
