"""Leases and epochs: one slot, its agent, its guest, and two gateways that want it.

    real      LeaseTable, SlotPolicy with its durable state, the order that binds; CapacityPolicy,
              Lease; the gate's decision from the grant
    modelled  files, pages and messages between them, the guest's fence by epoch, and the order in
              which the shells (`NodeAgent`, `Slot`, `HarvestedSlots`, `EpochMiddleware`) call the
              policies

A tick is a second: half of a margin's worth of anything is over with it, so that a grant page that
was written before it has expired, and the fence has seen the page. Invariants:

    a lease is granted only while no other of the slot is in force
    a lease ends within its TTL of the last renewal, or of the agent's start
    a holder stops before its grantor does, unless the grantor ended the lease
    the grant opens only under a lease; the page names an epoch, and the guest takes turns and steps
        under it, only while its lease is in force or within the tick in which that ended
    a lease is released by its tenant, and drained by an order that reaches its tenant
    once faults are over the guest steps again for a gateway that wants it
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from coserve.law.gate import GuestLoad, decide
from coserve.law.step_time import StepTimeModel
from harvester.contracts.ids import Epoch, JobId, LeaseId, NodeId, SlotId, TenantId
from harvester.contracts.page import (
    Grant,
    Guest,
    PageFault,
    ProductionModel,
    Pulse,
    Reading,
)
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotState,
)
from harvester.contracts.wire.stops import Stop, StopOrder, StopSource
from harvester.policy.durable import moved
from harvester.policy.effects import EndLease, WriteGrant
from harvester.policy.lease_table import LeaseTable, SlotLease
from harvester.policy.sample import GuestReading, KillSwitch, LeaseView, PulseReading, SlotSample
from harvester.policy.settings import ProofSettings, SlotSettings
from harvester.policy.slot import SlotPolicy
from harvester.policy.stop_table import binding
from scheduler.gateway.policy.capacity import (
    CapacityConfig,
    CapacityPolicy,
    CapacitySample,
    Demand,
    DropLease,
    LeasableSlot,
    ReleaseLease,
    RenewLease,
    SlotRefusal,
    TakeLease,
)
from scheduler.model import Lease
from tests.explore.part import Part
from tests.explore.search import FAULT, Broken, Move

TICK_S, TTL_S, MARGIN_S = 1.0, 4.0, 1.0
SLOT, AGENT = SlotId("slot0"), "agent"
PULSE = "pulse.prod.0"
NAMES, LATE_MAX = "ab", 2
"""Gateways, each with its own tenant and job."""

_MODEL = ProductionModel(
    prefill_base_s=0.001, prefill_s_per_token=1e-5, decode_base_s=0.004, decode_s_per_request=1e-4
)
_PULSE = Pulse(model=_MODEL, model_samples=1000)
_LOAD = GuestLoad(
    step_time=StepTimeModel(base_s=2e-4, decode_s=2e-5, prefill_s=5e-5, factor=1.0, samples=1000),
    decodes=1,
    context_tokens=100,
    launched_s=0.0,
    cap=64,
)
_SETTINGS = SlotSettings(
    proof=ProofSettings(share_ratio=0.0),
    guest_away_s=1.0,
    guest_lost_s=1.0,
    cooldown_s=1.0,
    quarantine_losses=1000,
    quarantine_window_s=2.0,
    sleep_after_s=0.0,
)


def _order(order: StopOrder, tenant: str = "") -> tuple[Stop, ...]:
    return (Stop(order=order, source=StopSource.FILE, tenant=tenant, reason="explored"),)


class Orders(NamedTuple):
    """Operators' orders, in files that outlive the agent."""

    words: str = "lift all orders"
    switch: KillSwitch = KillSwitch.NONE
    stops: tuple[Stop, ...] = ()


ORDERS = (
    Orders(),
    Orders("kill switch: hold", switch=KillSwitch.HOLD),
    Orders("kill switch: drain", switch=KillSwitch.DRAIN),
    Orders("order to hold the node", stops=_order(StopOrder.HOLD)),
    Orders("order to drain tenant b", stops=_order(StopOrder.DRAIN, tenant="b")),
)


class Keeper:
    """The agent's lease table. Its answers come with the leases that ended meanwhile."""

    def __init__(self, epoch: Epoch, recorded: SlotLease | None) -> None:
        self.now = 0.0
        self.kept_s = 0.0
        """Last time at which the lease in force was given time."""
        self.table = LeaseTable(node=NodeId("node"), ttl_s=TTL_S)
        self.table.add_slot(SLOT, epoch=epoch, recorded=recorded)

    def tick(self) -> None:
        self.now += TICK_S

    def live(self) -> SlotLease | None:
        return self.table.live(SLOT)

    def offered(self) -> bool:
        return self.table.entry(SLOT)[0] is SlotState.OFFERED

    def take(self, request: LeaseRequest, stops: tuple[Stop, ...]) -> Any:
        before = self.live()
        stop = binding(stops, slot=SLOT, tenant=request.tenant)
        text = "" if stop is None else stop.text
        answer = self.table.take(request, secret=request.request_id, stop=text, now=self.now)
        return self._answered(answer, before)

    def renew(self, lease: LeaseId, renewal: LeaseRenewal) -> Any:
        answer = self.table.renew(lease, renewal, now=self.now)
        if isinstance(answer, LeaseGranted):
            self.kept_s = self.now
        return answer, self._news()

    def release(self, lease: LeaseId) -> Any:
        return self.table.release(lease, now=self.now), self._news()

    def expire(self) -> tuple[LeaseView, SlotLease | None, Any]:
        self.table.expire(now=self.now)
        live = self.live()
        if live is not None and self.now - self.kept_s >= TTL_S:
            raise Broken(f"lease {live.name} is in force beyond its TTL without a renewal")
        return self.table.view(SLOT), live, self._news()

    def beaten(self, ended: str, reason: EndReason, state: SlotState) -> Any:
        """The end of a beat: the policy's word on the lease, and its state as it is offered."""
        live = self.live()
        if live is not None and live.name == ended:
            self.table.end(live.lease, reason, now=self.now)
        self.table.offer(SLOT, state, "explored")
        return self._news()

    def _answered(self, answer: object, before: SlotLease | None) -> Any:
        live = self.live()
        if isinstance(answer, LeaseGranted) and (before is None or before != live):
            self.kept_s = self.now
        return answer, self._news()

    def _news(self) -> tuple[tuple[SlotLease, EndReason], ...]:
        return self.table.take_ended()


class Warden:
    """The agent's slot policy; a new process begins with the durable state of the last."""

    def __init__(self) -> None:
        self.now = 0.0
        self.policy = SlotPolicy(_SETTINGS)
        self.policy.begin("life")

    def __deepcopy__(self, memo: object) -> "Warden":
        twin = Warden()
        twin.now = self.now
        twin.policy.restore(self.policy.snapshot())
        return twin

    def tick(self) -> None:
        self.now += TICK_S

    def restart(self) -> None:
        left = moved(self.policy.durable(), from_s=self.now, to_s=0.0)
        self.now, self.policy = 0.0, SlotPolicy(_SETTINGS)
        self.policy.resume(left, now=0.0)
        self.policy.begin("life")

    def beat(self, sample: SlotSample) -> tuple[Grant, str, EndReason, SlotState]:
        """The grant, the lease that ends and why, and the state that is offered."""
        ended, reason, grants = "", EndReason.UNKNOWN, []
        for effect in self.policy.observe(sample, now=self.now):
            if isinstance(effect, WriteGrant):
                grants.append(effect.grant)
            elif isinstance(effect, EndLease):
                ended, reason = effect.lease, effect.reason
        (grant,) = grants
        return grant, ended, reason, self.policy.slot_state()


class Gateway:
    """A gateway's capacity policy and its leases; its state file outlives it."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.name, self.life = name, 0
        self.stored: dict[LeaseId, Lease] = {}
        self._begin()

    def _begin(self) -> None:
        self.policy = CapacityPolicy(
            CapacityConfig(
                instance=f"{self.name}{self.life}",
                duration_s=TTL_S,
                margin_s=MARGIN_S,
                renew_ratio=0.25,
                idle_release_s=2.0,
            )
        )
        self.leases: dict[LeaseId, Lease] = {}
        self.asked: dict[LeaseId, Lease] = {}
        """Leases whose renewal is under way."""
        self.called_s = 0.0
        self.refusals: list[SlotRefusal] = []

    def tick(self) -> None:
        self.now += TICK_S

    def restart(self) -> tuple[Any, ...]:
        """Asks to renew what an earlier process held."""
        self.life += 1
        self._begin()
        self.called_s = self.now
        adopted, self.stored = tuple(self.stored.values()), {}
        return tuple(map(self._renewal, adopted))

    def usable(self) -> Lease | None:
        usable = [each for each in self.leases.values() if self._usable(each)]
        if len(usable) > 1:
            raise Broken(f"gateway {self.name} uses two leases of one slot")
        return usable[0] if usable else None

    def _usable(self, lease: Lease) -> bool:
        return lease.usable(now=self.now, margin_s=MARGIN_S)

    def held(self) -> frozenset[LeaseId]:
        return frozenset(self.leases)

    def look(self, wants: bool, silent: bool, free: bool, emptied: bool) -> tuple[Any, ...]:
        demand = Demand(
            job=JobId(self.name),
            active=True,
            harvesting=wants,
            queued=1,
            running=0,
            dedicated_places=0,
        )
        offered = LeasableSlot(slot=SLOT, agent=AGENT, free=free, emptied=emptied)
        sample = CapacitySample(
            demands=(demand,),
            slots=() if silent else (offered,),
            leases=tuple(self.leases.values()),
            refusals=tuple(self.refusals),
        )
        self.refusals.clear()
        self.called_s = self.now
        calls = map(self._apply, self.policy.observe(sample, now=self.now))
        return tuple(call for call in calls if call is not None)

    def _apply(self, effect: object) -> tuple[Any, ...] | None:
        match effect:
            case TakeLease():
                request = LeaseRequest(
                    request_id=effect.request_id,
                    slot=effect.slot,
                    tenant=TenantId(self.name),
                    job=effect.job,
                    duration_s=effect.duration_s,
                )
                return "take", request
            case RenewLease():
                return self._renewal(self.leases[effect.lease])
            case ReleaseLease():
                self._end(effect.lease)
                return "release", effect.lease
            case DropLease():
                self._end(effect.lease)
        return None

    def _renewal(self, lease: Lease) -> tuple[Any, ...]:
        self.asked[lease.lease] = lease
        renewal = LeaseRenewal(epoch=lease.epoch, duration_s=self.policy.duration_s)
        return "renew", lease.lease, renewal

    def answered(self, call: tuple[Any, ...], reply: object) -> None:
        match reply:
            case LeaseRefused():
                refused = SlotRefusal(slot=reply.slot, retry_after_s=reply.retry_after_s)
                self.refusals.append(refused)
            case LeaseGranted() if call[0] == "take":
                self._hold(
                    Lease(
                        lease=reply.lease,
                        slot=reply.slot,
                        agent=AGENT,
                        job=call[1].job,
                        epoch=reply.epoch,
                        expires_s=self.called_s + min(reply.duration_s, call[1].duration_s),
                    )
                )
            case LeaseGranted() | LeaseEnded() if call[0] == "renew":
                lease = self.asked.pop(call[1])
                if isinstance(reply, LeaseEnded) or lease.mismatch(reply):
                    self._end(lease.lease)
                    return
                ends_s = self.called_s + min(reply.duration_s, self.policy.duration_s)
                self._hold(msgspec.structs.replace(lease, expires_s=ends_s))

    def failed(self, call: tuple[Any, ...]) -> None:
        if call[0] == "renew":
            self.asked.pop(call[1])

    def _hold(self, lease: Lease) -> None:
        self.leases[lease.lease] = lease
        self.stored[lease.lease] = msgspec.structs.replace(lease, expires_s=float("-inf"))

    def _end(self, lease: LeaseId) -> None:
        self.leases.pop(lease, None)
        self.stored.pop(lease, None)


class Call(NamedTuple):
    """A gateway's call that waits for its reply."""

    gateway: int
    said: tuple[Any, ...]
    reply: Any = None
    """None: the agent has not heard it."""


class Page(NamedTuple):
    """The grant page."""

    grant: int
    """Its number in the model's list of grants."""
    epoch: Epoch
    opens: bool
    held: bool
    fresh: bool = True


class World(NamedTuple):
    keeper: int | None
    """None while the agent is down."""
    warden: int
    """While the agent is down, as its state file has it."""
    record: SlotLease | None
    """The lease file."""
    page: Page | None
    turns: frozenset[Epoch] | None
    """Epochs of the turns that are open on the guest; None while it is down."""
    gateways: tuple[int, ...]
    calls: tuple[Call, ...] = ()
    late: tuple[Any, ...] = ()
    """Messages that nobody waits for any more, or that need no answer, in one order."""
    orders: int = 0
    """Which of `ORDERS`."""
    faults: int = 0
    """Faults that may still strike them."""
    commands: int = 0
    """Calls that operators and trainers may still make."""
    promise: tuple[LeaseId, Epoch, int] | None = None
    """The lease in force by what the agent has answered, and the ticks that it has left."""
    gone: frozenset[LeaseId] = frozenset()
    """Leases that the agent ended before their time, as far as a gateway still holds one."""
    fading: frozenset[Epoch] = frozenset()
    """Epochs that ended since the last tick."""
    newest: Epoch = Epoch(0)
    """The highest epoch that a lease has had."""


def _later(world: World, message: tuple[Any, ...]) -> World:
    late = world.late if message in world.late else (*world.late, message)
    return world._replace(late=tuple(sorted(late, key=repr)))


def _without(world: World, message: tuple[Any, ...]) -> World:
    return world._replace(late=tuple(each for each in world.late if each != message))


class LeaseModel:
    def __init__(self, *, faults: int = 3, commands: int = 2) -> None:
        ignored = {
            *("settings", "_settings", "_config", "config", "guards", "_watch", "evictions"),
            *("blocking", "_kv_level", "guest", "reclaim", "run", "node"),
            # Nothing of production happens here: what is counted of it stays empty.
            *("budget", "proof", "misses", "itl_misses", "served", "step_level", "kv_level"),
            # No exploration takes as many leases as are too many.
            *("_news", "pace"),
        }
        moments = {
            *("ends_s", "expires_s", "kept_s", "called_s", "at_s", "_not_before_s", "_busy_at_s"),
            *("since_s", "breached_at_s", "unleased_since_s", "empty_since_s", "seen_at_s"),
            *("active_at_s", "losses_s", "idle_at_s", "observed_at_s", "progress_at_s"),
            *("beside_at_s", "crashes_s"),
        }
        # The policies' memory holds what they remember of the guest and of reclaims.
        self._keepers: Part[Keeper] = Part(moments=moments, ignored=ignored, age_max_s=2 * TTL_S)
        self._wardens: Part[Warden] = Part(
            moments=moments, ignored=ignored - {"guest", "reclaim"}, age_max_s=2 * TTL_S
        )
        self._gateways: Part[Gateway] = Part(moments=moments, ignored=ignored, age_max_s=2 * TTL_S)
        self._grants: dict[Grant, int] = {}
        self._opens: list[bool] = []
        """Whether the gate opens by each grant."""
        self._faults, self._commands = faults, commands

    def starts(self) -> Iterator[World]:
        """A slot that was never leased, and one whose guest runs a turn of gateway a."""
        world = self._beat(
            World(
                keeper=self._keepers.add(Keeper(Epoch(0), None)),
                warden=self._wardens.add(Warden()),
                record=None,
                page=None,
                turns=frozenset(),
                gateways=tuple(self._gateways.add(Gateway(name)) for name in NAMES),
                faults=self._faults,
                commands=self._commands,
            )
        )
        # Learning is left through one beat of closed.
        world = self._beat(world)
        yield world
        while not self._works(world):
            world = self._course(world, 1)
        yield world

    def moves(self, world: World) -> Iterator[Move[World]]:
        yield Move("a second passes", partial(self._tick, world))
        if world.keeper is not None:
            yield Move("the agent beats", partial(self._beat, world))
        for at, name in enumerate(NAMES):
            if not any(call.gateway == at for call in world.calls):
                yield Move(f"gateway {name} looks", partial(self._look, world, at))
            if self._lease_of(world, at) is not None and len(world.late) < LATE_MAX:
                yield Move(f"gateway {name} sends a turn", partial(self._send, world, at))
        for call in world.calls:
            yield self._heard(world, call)
        for message in world.late:
            if message[0] == "turn" and world.turns is not None:
                go = partial(self._arrive, world, message)
                yield Move(f"a turn of epoch {message[1]} arrives", go)
            elif message[0] != "turn" and world.keeper is not None:
                yield Move(f"a late {message[0]} arrives", partial(self._hear_late, world, message))
        if world.turns:
            for epoch in sorted(world.turns):
                left = world._replace(turns=world.turns - {epoch})
                yield Move(f"a turn of epoch {epoch} ends", lambda left=left: left)
        if world.keeper is None:
            yield Move("the agent starts", partial(self._start_agent, world))
        if world.turns is None:
            yield Move("the guest starts", lambda: world._replace(turns=frozenset()))
        yield Move("a stranger tries public names", partial(self._stranger, world))
        if world.commands:
            yield from self._commands_to(world._replace(commands=world.commands - 1))
        if world.faults:
            yield from self._faults_of(world._replace(faults=world.faults - 1))

    def _heard(self, world: World, call: Call) -> Move[World]:
        name, what = NAMES[call.gateway], call.said[0]
        if call.reply is not None:
            return Move(
                f"gateway {name} hears the reply to its {what}", partial(self._reply, world, call)
            )
        if world.keeper is None:
            go = partial(self._fail, world, call)
            return Move(f"gateway {name} is refused its connection", go)
        return Move(f"the agent hears {what} of {name}", partial(self._hear, world, call))

    def _commands_to(self, world: World) -> Iterator[Move[World]]:
        for number, orders in enumerate(ORDERS):
            if number != world.orders:
                after = world._replace(orders=number)
                yield Move(orders.words, lambda after=after: after, FAULT)
        for at, name in enumerate(NAMES):
            if not any(call.gateway == at for call in world.calls):
                go = partial(self._look, world, at, wants=False)
                yield Move(f"gateway {name} wants no more", go, FAULT)

    def _faults_of(self, world: World) -> Iterator[Move[World]]:
        for call in world.calls:
            yield from self._lost(world, call)
        if world.keeper is not None:
            yield Move("the agent dies", lambda: world._replace(keeper=None), FAULT)
        if world.turns is not None:
            yield Move("the guest dies", lambda: world._replace(turns=None), FAULT)
        yield Move("the machine starts anew", partial(self._reboot, world), FAULT)
        for at, name in enumerate(NAMES):
            go = partial(self._restart_gateway, world, at)
            yield Move(f"gateway {name} starts anew", go, FAULT)

    def _lost(self, world: World, call: Call) -> Iterator[Move[World]]:
        name, what = NAMES[call.gateway], call.said[0]
        if call.reply is not None:
            go = partial(self._fail, world, call)
            yield Move(f"the reply to {name}'s {what} is lost", go, FAULT)
            return
        yield Move(f"{name}'s {what} is lost", partial(self._fail, world, call), FAULT)
        if len(world.late) < LATE_MAX:
            late = _later(world, (*call.said, call.gateway))
            go = partial(self._fail, late, call)
            yield Move(f"{name} gives its {what} up, which is late", go, FAULT)
            if world.keeper is not None:
                twice = f"the agent hears {what} of {name}, which comes again"
                yield Move(twice, partial(self._hear, late, call), FAULT)
        if world.keeper is not None and what == "take":
            words = "the agent dies between a lease's record and its page"
            yield Move(words, partial(self._kill_recording, world, call), FAULT)

    def check(self, world: World) -> None:
        for at, name in enumerate(NAMES):
            lease = self._lease_of(world, at)
            if lease is None or lease.lease in world.gone:
                continue
            if world.promise is None or world.promise[0] != lease.lease:
                raise Broken(f"gateway {name} uses a lease that is not in force")
        page = world.page
        if page is None or not page.fresh:
            return
        alive = set(world.fading)
        if world.promise is not None:
            alive.add(world.promise[1])
        # An agent that dies before it has written a lease's page leaves the one before.
        stands = world.keeper is not None and 0 < page.epoch <= world.newest
        if stands and page.epoch not in alive:
            raise Broken(f"the page names epoch {page.epoch}, whose lease has ended")
        if page.opens and page.epoch not in alive:
            raise Broken(f"the grant is open under epoch {page.epoch}, which has no lease")
        if world.turns and self._steps(page):
            # The fence ends older ones than the page's at its next look.
            for epoch in sorted(world.turns - alive):
                if epoch >= page.epoch:
                    raise Broken(f"the guest steps for a turn of epoch {epoch}, which has ended")

    def mended(self, world: World) -> World:
        for call in world.calls:
            world = self._fail(world, call)
        world = world._replace(
            late=(),
            orders=0,
            faults=0,
            commands=0,
            turns=world.turns or frozenset(),
        )
        return world if world.keeper is not None else self._start_agent(world)

    def onward(self, world: World) -> World | None:
        """One fair second: each gateway looks, its calls are answered, turns run; then it ends."""
        if self._works(world):
            return None
        world = self._course(world, len(NAMES))
        return None if self._works(world) else self._beat(self._tick(world))

    def _course(self, world: World, gateways: int) -> World:
        for at in range(gateways):
            world = self._look(world, at)
            while world.calls:
                world = self._hear(world, world.calls[0])
                world = self._reply(world, world.calls[0])
        world = self._beat(world)
        for at in range(len(NAMES)):
            if self._lease_of(world, at) is not None:
                world = self._send(world, at)
        for message in world.late:
            world = self._arrive(world, message)
        return world

    def _works(self, world: World) -> bool:
        """Whether the guest steps for the holder of the lease in force."""
        if world.promise is None or not world.turns or world.page is None:
            return False
        holders = [self._lease_of(world, at) for at in range(len(NAMES))]
        held = any(each is not None and each.epoch == world.promise[1] for each in holders)
        return held and world.promise[1] in world.turns and self._steps(world.page)

    def _steps(self, page: Page) -> bool:
        """Whether the gate opens, by its own decision."""
        return page.fresh and self._opens[page.grant]

    def _page(self, grant: Grant) -> Page:
        number = self._grants.setdefault(grant, len(self._grants))
        if number == len(self._opens):
            pulses = [Reading(_PULSE, None) for _ in grant.pulses]
            reading: Reading[Grant] = Reading(grant, None)
            found = decide(reading, pulses, _LOAD, may_probe=False, now_ns=1)
            self._opens.append(found.open)
        return Page(number, Epoch(grant.epoch), grant.mode.admits, grant.held)

    # Time.

    def _tick(self, world: World) -> World:
        promise = world.promise
        if promise is not None:
            promise = (promise[0], promise[1], promise[2] - 1) if promise[2] > 1 else None
        fenced = self._fence(world)
        page = fenced.page
        return fenced._replace(
            keeper=None if world.keeper is None else self._keepers.call(world.keeper, "tick")[0],
            # A durable state's ages stand still while no agent runs.
            warden=world.warden
            if world.keeper is None
            else self._wardens.call(world.warden, "tick")[0],
            gateways=tuple(self._gateways.call(each, "tick")[0] for each in world.gateways),
            page=None if page is None else page._replace(fresh=False),
            promise=promise,
            gone=world.gone & self._known(world) if world.gone else world.gone,
            fading=frozenset(),
        )

    # The agent.

    def _beat(self, world: World) -> World:
        assert world.keeper is not None
        keeper, (view, live, news) = self._keepers.call(world.keeper, "expire")
        world = self._told(world._replace(keeper=keeper), news)
        if world.record is not None and (live is None or live.lease != world.record.lease):
            world = world._replace(record=None)
        orders = ORDERS[world.orders]
        tenant = "" if live is None else live.tenant
        guest = GuestReading(fault=PageFault.EXPIRED)
        if world.turns is not None:
            guest = GuestReading(record=Guest(running=len(world.turns)))
        sample = SlotSample(
            pulses=(PulseReading(name=PULSE, record=_PULSE),),
            guest=guest,
            lease=view,
            kill_switch=orders.switch,
            stop=binding(orders.stops, slot=SLOT, tenant=tenant),
        )
        warden, (grant, *rest) = self._wardens.call(world.warden, "beat", sample)
        keeper, news = self._keepers.call(keeper, "beaten", *rest)
        world = world._replace(keeper=keeper, warden=warden, page=self._page(grant))
        return self._told(world, news)

    def _told(
        self,
        world: World,
        news: tuple[tuple[SlotLease, EndReason], ...],
        *,
        by: str = "",
    ) -> World:
        """The leases that ended; `by` is the tenant whose call was heard."""
        for lease, reason in news:
            if reason is EndReason.RELEASED and lease.tenant != by:
                raise Broken(f"lease {lease.name} of tenant {lease.tenant} was released by {by!r}")
            orders = ORDERS[world.orders]
            drains = orders.switch is KillSwitch.DRAIN or any(
                stop.tenant in ("", lease.tenant) for stop in orders.stops
            )
            if reason in (EndReason.DRAIN, EndReason.KILL_SWITCH) and not drains:
                raise Broken(f"lease {lease.name} of tenant {lease.tenant} was drained by no order")
            world = self._ended(world, lease, on_time=reason is EndReason.EXPIRED)
        return world

    def _ended(self, world: World, lease: SlotLease, *, on_time: bool) -> World:
        gone = world.gone if on_time else world.gone | {lease.lease}
        promise = world.promise
        if promise is not None and promise[0] == lease.lease:
            promise = None
        fading = world.fading | {lease.epoch}
        return world._replace(promise=promise, gone=gone, fading=fading)

    def _known(self, world: World) -> frozenset[LeaseId]:
        """Leases that a gateway holds, or that a reply to one names."""
        held = (self._gateways.look(number).held() for number in world.gateways)
        replies = (call.reply for call in world.calls)
        told = (reply.lease for reply in replies if isinstance(reply, LeaseGranted))
        return frozenset(told).union(*held)

    def _hear(self, world: World, call: Call, *, beats: bool = True) -> World:
        world, reply = self._said(world, call.said, NAMES[call.gateway], beats=beats)
        others = tuple(each for each in world.calls if each != call)
        calls = (*others, call._replace(reply=reply))
        return world._replace(calls=tuple(sorted(calls, key=lambda each: each.gateway)))

    def _hear_late(self, world: World, message: tuple[Any, ...]) -> World:
        world = _without(world, message)
        return self._said(world, message[:-1], NAMES[message[-1]])[0]

    def _said(
        self, world: World, said: tuple[Any, ...], by: str, *, beats: bool = True
    ) -> tuple[World, Any]:
        assert world.keeper is not None
        method, *arguments = said
        if method == "take":
            arguments.append(ORDERS[world.orders].stops)
        keeper, (reply, news) = self._keepers.call(world.keeper, method, *arguments)
        world = self._told(world._replace(keeper=keeper), news, by=by)
        if isinstance(reply, LeaseGranted):
            world = self._promised(world, reply)
        if method == "take" and isinstance(reply, LeaseGranted):
            world = world._replace(record=self._recorded(keeper))
        heard = isinstance(reply, LeaseEnded) and reply.reason is not EndReason.UNKNOWN
        if beats and (
            (method == "take" and isinstance(reply, LeaseGranted))
            or (method == "release" and heard)
        ):
            world = self._beat(world)
        return world, reply

    def _recorded(self, keeper: int) -> SlotLease | None:
        live = self._keepers.look(keeper).live()
        return None if live is None else msgspec.structs.replace(live, ends_s=0.0)

    def _promised(self, world: World, granted: LeaseGranted) -> World:
        promise = world.promise
        if promise is not None and promise[0] != granted.lease:
            raise Broken(f"lease {granted.lease} was granted while {promise[0]} is in force")
        if promise is None and granted.epoch <= world.newest:
            raise Broken(f"epoch {granted.epoch} is given again")
        ticks = round(granted.duration_s / TICK_S)
        return world._replace(
            promise=(granted.lease, granted.epoch, ticks), newest=max(world.newest, granted.epoch)
        )

    def _kill_recording(self, world: World, call: Call) -> World:
        before = world.page
        world = self._hear(world, call, beats=False)
        heard = next(each for each in world.calls if each.said == call.said)
        unanswered = tuple(
            each._replace(reply=None) if each is heard else each for each in world.calls
        )
        return world._replace(keeper=None, page=before, calls=unanswered)

    def _start_agent(self, world: World) -> World:
        epoch = Epoch(0) if world.page is None else world.page.epoch
        keeper = self._keepers.add(Keeper(epoch, self._reread(world.record)))
        warden, _ = self._wardens.call(world.warden, "restart")
        live = self._keepers.look(keeper).live()
        world = world._replace(keeper=keeper, warden=warden)
        if world.record is not None and live is None:
            world = self._ended(world, world.record, on_time=False)
        elif live is not None:
            ticks = round(TTL_S / TICK_S)
            world = world._replace(promise=(live.lease, live.epoch, ticks))
        return self._beat(world)

    def _reread(self, record: SlotLease | None) -> SlotLease | None:
        return None if record is None else msgspec.structs.replace(record, ends_s=TTL_S)

    def _reboot(self, world: World) -> World:
        """The page directory ends with the machine's memory; files stay. It takes a machine longer
        than a TTL to be there again."""
        world = world._replace(keeper=None, page=None, turns=None, newest=Epoch(0))
        if world.record is not None:
            world = self._ended(world, world.record, on_time=False)
        for _ in range(round(TTL_S / TICK_S)):
            world = self._tick(world)
        return world

    def _stranger(self, world: World) -> World:
        """Whoever reads the slot's status knows its epoch, and so the lease's public name."""
        if world.keeper is None:
            return world
        live = self._keepers.look(world.keeper).live()
        if live is None:
            return world
        name = LeaseId(live.name)
        world, _ = self._said(world, ("release", name), "stranger")
        renewal = LeaseRenewal(epoch=live.epoch, duration_s=TTL_S)
        return self._said(world, ("renew", name, renewal), "stranger")[0]

    # The gateways.

    def _lease_of(self, world: World, at: int) -> Lease | None:
        found: Lease | None = self._gateways.ask(world.gateways[at], "usable")
        return found

    def _with(self, world: World, at: int, gateway: int) -> World:
        gateways = (*world.gateways[:at], gateway, *world.gateways[at + 1 :])
        return world._replace(gateways=gateways)

    def _look(self, world: World, at: int, *, wants: bool = True) -> World:
        silent, free, emptied = True, False, False
        if world.keeper is not None:
            silent, free = False, self._keepers.look(world.keeper).offered()
            live = self._keepers.look(world.keeper).live()
            tenant = "" if live is None else live.tenant
            held = binding(ORDERS[world.orders].stops, slot=SLOT, tenant=tenant) is not None
            emptied = held and not (live and world.turns and live.epoch in world.turns)
        gateway, said = self._gateways.call(
            world.gateways[at], "look", wants, silent, free, emptied
        )
        calls = (*world.calls, *(Call(at, each) for each in said))
        world = self._with(world, at, gateway)
        return world._replace(calls=tuple(sorted(calls, key=lambda each: each.gateway)))

    def _reply(self, world: World, call: Call) -> World:
        gateway, _ = self._gateways.call(
            world.gateways[call.gateway], "answered", call.said, call.reply
        )
        return self._done(world, call, gateway)

    def _fail(self, world: World, call: Call) -> World:
        gateway, _ = self._gateways.call(world.gateways[call.gateway], "failed", call.said)
        return self._done(world, call, gateway)

    def _done(self, world: World, call: Call, gateway: int) -> World:
        world = self._with(world, call.gateway, gateway)
        return world._replace(calls=tuple(each for each in world.calls if each != call))

    def _restart_gateway(self, world: World, at: int) -> World:
        gateway, said = self._gateways.call(world.gateways[at], "restart")
        others = (call for call in world.calls if call.gateway != at)
        calls = (*others, *(Call(at, each) for each in said))
        world = self._with(world, at, gateway)
        return world._replace(calls=tuple(sorted(calls, key=lambda each: each.gateway)))

    # The guest.

    def _send(self, world: World, at: int) -> World:
        lease = self._lease_of(world, at)
        assert lease is not None
        return _later(world, ("turn", lease.epoch))

    def _arrive(self, world: World, message: tuple[Any, ...]) -> World:
        """The guest takes a turn of the grant's epoch, unless it is held."""
        assert world.turns is not None
        world, page, epoch = _without(world, message), world.page, message[1]
        if page is None or not page.fresh or page.held or page.epoch != epoch:
            return world
        alive = None if world.promise is None else world.promise[1]
        if epoch != alive and epoch not in world.fading:
            raise Broken(f"the guest takes a turn of epoch {epoch}, which has ended")
        return world._replace(turns=world.turns | {epoch})

    def _fence(self, world: World) -> World:
        """The guest ends turns of older epochs than the page's."""
        page = world.page
        if not world.turns or page is None or not page.fresh:
            return world
        return world._replace(turns=frozenset(e for e in world.turns if e >= page.epoch))
