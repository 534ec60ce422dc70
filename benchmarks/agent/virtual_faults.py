"""Faults of a node in virtual time, each by the name of its function."""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.agent.evidence import RefusedCall
from benchmarks.agent.virtual_node import BEAT_S, TICK_S, VirtualNode
from benchmarks.agent.virtual_slot import VirtualHolder, VirtualSlot
from harvester.agent.node import NodeAgent
from harvester.contracts.errors import Exhausted, NotYet
from harvester.contracts.ids import JobId, LeaseId, SlotId, TenantId
from harvester.contracts.page import PageName
from harvester.contracts.wire.leases import LeaseGranted, LeaseRenewal, LeaseRequest
from harvester.contracts.wire.stops import StopOrder, StopRequest

_HUNG_S = 2.0


Fault = Callable[[VirtualNode], None]
FAULTS: dict[str, Fault] = {}


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def _drawn(node: VirtualNode) -> VirtualSlot:
    return node.rng.choice(node.slots)


def _for_a_while(
    node: VirtualNode, changed: object, least_s: float, most_s: float, **fields: Any
) -> None:
    """The fields have these values until a drawn time, and then none: false, empty or 0."""

    def give(values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(changed, name, value)

    give(fields)
    none = {name: type(value)() for name, value in fields.items()}
    node.time.later(node.rng.uniform(least_s, most_s), lambda: give(none))


def _production_back(slot: VirtualSlot) -> None:
    slot.silent, slot.hung_s = False, 0.0


@_fault
def production_stopped(node: VirtualNode) -> None:
    """SIGSTOP: its page stays and expires."""
    slot = _drawn(node)
    slot.silent = True
    node.time.later(node.rng.uniform(0.2, 7.0), lambda: _production_back(slot))


@_fault
def production_hung(node: VirtualNode) -> None:
    """Its middleware has requests and its engine steps no more, while the page goes on."""
    slot, lasts_s = _drawn(node), node.rng.uniform(1.0, 6.0)
    if slot.silent or slot.hung_s:
        return
    slot.hung_s = struck_s = node.time.now_s
    before = len(node.evidence.starts), slot.blinded
    until_s = node.time.later(lasts_s, lambda: _production_back(slot))

    def judge() -> None:
        # A restarted agent has not seen its last step, nor has a slot that was opened anew, or
        # whose beats failed then.
        seen = (len(node.evidence.starts), slot.blinded) == before
        if slot.hung_s == struck_s and seen and not slot.silent:
            node.dark(slot, "hung", since_s=struck_s + _HUNG_S + 2 * BEAT_S, until_s=until_s)

    node.time.later(lasts_s - TICK_S, judge)


@_fault
def production_restarted(node: VirtualNode) -> None:
    """Its counters begin anew, and its step times are not known yet."""
    slot = _drawn(node)
    if slot.hung_s:
        return
    slot.steps = slot.samples = 0
    if not slot.silent:
        node.dark(slot, "restarted", until_s=node.time.now_s + 0.3)


@_fault
def pulse_torn(node: VirtualNode) -> None:
    _spoil(node, lambda path, rng: path.write_bytes(rng.randbytes(rng.randrange(5000))))


@_fault
def pulse_cut(node: VirtualNode) -> None:
    _spoil(node, lambda path, rng: path.write_bytes(path.read_bytes()[: rng.randrange(200)]))


@_fault
def pulse_bit_flipped(node: VirtualNode) -> None:
    def flip(path: Path, rng: random.Random) -> None:
        page = bytearray(path.read_bytes())
        page[rng.randrange(16, 60)] ^= 1 << rng.randrange(8)
        path.write_bytes(page)

    _spoil(node, flip)


@_fault
def pulse_of_another_kind(node: VirtualNode) -> None:
    slot = _drawn(node)
    guest = slot.pages.path / PageName.GUEST
    _spoil(node, lambda path, _: path.write_bytes(guest.read_bytes()), slot)


@_fault
def pulse_removed(node: VirtualNode) -> None:
    _spoil(node, lambda path, _: path.unlink())


def _spoil(
    node: VirtualNode,
    action: Callable[[Path, random.Random], Any],
    slot: VirtualSlot | None = None,
) -> None:
    """Production is silent and its page is no page. A reader that has decoded the page before may
    go on with that record until it expires, as if production were silent alone."""
    slot = slot or _drawn(node)
    path = slot.pages.path / "pulse.prod.0"
    if slot.silent or not path.exists():
        return
    action(path, node.rng)
    slot.silent = True
    node.time.later(node.rng.uniform(0.1, 3.0), lambda: _production_back(slot))


@_fault
def scrape_spoilt(node: VirtualNode) -> None:
    moods = ("nan", "truncated", "huge", "empty", "negative", "half_open", "error")
    for slot in node.slots:
        if (server := slot.scraped) is not None:
            server.mood = node.rng.choice(moods)
            good = partial(setattr, server, "mood", "good")
            node.time.later(node.rng.uniform(1.0, 5.0), good)


@_fault
def scrape_reset(node: VirtualNode) -> None:
    for slot in node.slots:
        if slot.scraped is not None:
            slot.scraped.tokens = 0


@_fault
def guest_stopped(node: VirtualNode) -> None:
    _for_a_while(node, _drawn(node), 0.2, 9.0, guest_silent=True)


@_fault
def kv_full(node: VirtualNode) -> None:
    _for_a_while(node, _drawn(node), 0.2, 4.0, kv_usage_ratio=0.97)


@_fault
def calls_lose_requests(node: VirtualNode) -> None:
    _for_a_while(node, _drawn(node), 1.0, 12.0, lose="request")


@_fault
def calls_lose_replies(node: VirtualNode) -> None:
    _for_a_while(node, _drawn(node), 1.0, 12.0, lose="reply")


@_fault
def calls_late(node: VirtualNode) -> None:
    """Calls and answers between gateways and agent are late, and overtake each other."""
    _for_a_while(node, _drawn(node), 1.0, 9.0, late_s=node.rng.uniform(0.1, 6.0))


@_fault
def calls_repeated(node: VirtualNode) -> None:
    """A proxy before the agent sends calls again, up to seconds later."""
    _for_a_while(node, _drawn(node), 1.0, 9.0, twice=True)


@_fault
def turns_late(node: VirtualNode) -> None:
    """The proxy before a guest's engine holds turns back."""
    _for_a_while(node, _drawn(node), 1.0, 9.0, turn_late_s=node.rng.uniform(0.2, 6.0))


@_fault
def gateway_killed(node: VirtualNode) -> None:
    """The next one knows no lease and no request of it."""
    for slot in node.slots:
        slot.holders[:1] = [VirtualHolder()]


@_fault
def rival_gateway(node: VirtualNode) -> None:
    """Another gateway wants the same slots."""
    for slot in node.slots:
        slot.holders.append(VirtualHolder())


@_fault
def beats_fail(node: VirtualNode) -> None:
    """The policy of a slot raises at every beat, or at every other one."""
    agent = node.agent
    if agent is None or not agent.slots:
        return
    failing, share = node.rng.choice(agent.slots), node.rng.choice((0.5, 1.0))
    name, policy, observe = failing.name, failing.policy, failing.policy.observe
    struck_s = node.time.now_s
    until_s = struck_s + node.rng.uniform(0.3, 8.0)

    def raising(*given: Any, **named: Any) -> Any:
        if node.time.now_s < until_s and node.rng.random() < share:
            raise ZeroDivisionError
        return observe(*given, **named)

    policy.observe = raising  # type: ignore[method-assign]

    def judge() -> None:
        # A restart, a reload or another fault may have given the slot other decisions.
        slots = () if node.agent is None else node.agent.slots
        still = any(each.policy is policy for each in slots)
        slot = next(each for each in node.slots if each.name == name)
        slot.blinded += 1
        if share == 1.0 and still and vars(policy).get("observe") is raising:
            node.dark(slot, "beats fail", since_s=struck_s + TICK_S / 2, until_s=until_s)

    node.time.later(until_s - struck_s - TICK_S, judge)


@_fault
def agent_killed(node: VirtualNode) -> None:
    if node.agent is not None:
        node.kill()
        node.time.later(node.rng.uniform(0.0, 6.0), node.start)


@_fault
def agent_stopped(node: VirtualNode) -> None:
    """SIGSTOP between two of its system calls: half of the time between sample and grant."""
    agent = node.agent
    if agent is None or not agent.slots:
        return
    slot = node.rng.choice(agent.slots)
    observe, leap_s = slot.policy.observe, node.rng.uniform(0.3, 20.0)

    def stopped(*given: Any, **named: Any) -> Any:
        effects = observe(*given, **named)
        vars(slot.policy).pop("observe", None)
        node.time.leap(leap_s)
        return effects

    if node.rng.random() < 0.5:
        slot.policy.observe = stopped  # type: ignore[method-assign]
    else:
        node.time.leap(leap_s)


@_fault
def machine_suspended(node: VirtualNode) -> None:
    """All clocks leap for all processes."""
    node.time.leap(node.rng.choice((1.0, 30.0, 3600.0)))


@_fault
def wall_clock_jumped(node: VirtualNode) -> None:
    node.time.wall_s += node.rng.choice((-86_400.0, -3600.0, 3600.0, 400 * 86_400.0))


@_fault
def disk_full(node: VirtualNode) -> None:
    node.evidence.recording = False
    _for_a_while(node, node, 0.3, 4.0, disk_full=True)


@_fault
def state_dir_taken(node: VirtualNode) -> None:
    """Another program moves it away, and a second agent with other pages wants it."""
    if node.agent is None:
        return
    moved = node.root / f"state.{len(node.moved)}"
    (node.root / "state").rename(moved)
    node.moved.append(moved)
    node.evidence.recording = False

    def second() -> None:
        if node.agent is None:
            return
        config = node.config().model_copy(update={"page_root": node.root / "others"})
        try:
            NodeAgent(config, clock=node.time, version="1").close()
        except NotYet:
            return
        node.evidence.refused.append(RefusedCall(name="second agent", status=0, granted=True))

    node.time.later(2 * BEAT_S, second)


@_fault
def kill_file(node: VirtualNode) -> None:
    path = node.root / "pages" / "kill"
    path.write_bytes(node.rng.choice((b"hold", b"drain", b"", b"\xff\x00")))
    _ordered(node, "kill file", path.unlink)


@_fault
def stop_file(node: VirtualNode) -> None:
    path = node.root / "pages" / "stop"
    path.write_bytes(node.rng.choice((b"drain incident", b"HoldAndDrain", b"", b"\xff")))
    _ordered(node, "stop file", path.unlink)


def _ordered(node: VirtualNode, cause: str, lift: Callable[[], Any]) -> None:
    """Grants from the next beat on are closed, until the last order of this cause is lifted."""
    until_s = node.time.now_s + node.rng.uniform(0.2, 3.0)
    node.ordered_s[cause] = max(until_s, node.ordered_s.get(cause, 0.0))

    def lift_last() -> None:
        if node.time.now_s >= node.ordered_s[cause]:
            with suppress(FileNotFoundError, Exhausted):
                lift()

    node.time.later(until_s - node.time.now_s, lift_last)
    for slot in node.slots:
        node.dark(slot, cause, until_s=until_s - TICK_S, since_s=node.time.now_s + TICK_S / 2)


@_fault
def order_to_drain(node: VirtualNode) -> None:
    agent = node.agent
    if agent is None:
        return
    cluster = node.rng.random() < 0.5
    placed = StopRequest(order=StopOrder.DRAIN, by="alice", reason="incident", cluster=cluster)
    if not agent.order(placed).recorded:
        return  # A restarted agent would not know it.
    lifted = StopRequest(order=StopOrder.NONE, by="alice", cluster=cluster)

    def lift() -> None:
        if node.agent is not None:
            node.agent.order(lifted)

    _ordered(node, f"order to drain, cluster {cluster}", lift)


@_fault
def caps_lowered(node: VirtualNode) -> None:
    if node.agent is None:
        return
    node.tokens_max = node.rng.choice((1, 17, 128, 300))
    node.agent.reconfigure(node.config())
    node.note_caps()


@_fault
def slot_gone(node: VirtualNode) -> None:
    """It leaves the configuration of a running agent, and is back later, there or in another."""
    slot = _drawn(node)
    if node.agent is None or slot.name in node.gone:
        return
    node.gone.add(slot.name)
    slot.blinded += 1
    node.agent.reconfigure(node.config())

    def back() -> None:
        node.gone.discard(slot.name)
        slot.blinded += 1
        if node.agent is not None:
            node.agent.reconfigure(node.config())

    until_s = node.time.later(node.rng.uniform(0.1, 4.0), back)
    node.dark(slot, "gone", since_s=node.time.now_s + TICK_S / 2, until_s=until_s - TICK_S)


@_fault
def hostile_calls(node: VirtualNode) -> None:
    """Other tenants, guessed ids, absurd durations: nothing is granted while the lease is held."""
    agent = node.agent
    if agent is None:
        return
    for slot in node.slots:
        held = None if slot.name in node.gone else agent.leases.live(SlotId(slot.name))
        if slot.lease is None or held is None or held.ends_s <= node.time.now_s:
            continue
        guess = LeaseId(f"{slot.name}.{slot.lease.epoch}.{node.rng.randbytes(16).hex()}")
        renewal = LeaseRenewal(epoch=slot.lease.epoch, duration_s=1e300)
        agent.release(guess)
        answers: list[Any] = [agent.renew(guess, renewal)]
        for duration_s in (-1.0, float("nan"), float("inf"), 1e300):
            request = LeaseRequest(
                request_id=f"h{node.rng.random()}",
                slot=SlotId(slot.name),
                tenant=TenantId("other"),
                job=JobId("other"),
                duration_s=duration_s,
            )
            answers.append(agent.take(request))
        node.evidence.refused += [
            RefusedCall(name="guess", status=0, granted=isinstance(answer, LeaseGranted))
            for answer in answers
        ]
