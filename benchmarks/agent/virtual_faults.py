"""Faults in virtual time: the agent's own `NodeAgent`, with its pages, files and scrapes, under a
seeded script. Only the clock, the scraped server and the disk's refusals are simulated.

A scenario lasts twelve virtual seconds: production and guest write every 50 ms, the agent
beats every 100 ms, a lease holder calls, and two to five faults strike at drawn times.
"""

import asyncio
import errno
import gc
import logging
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import aiohttp

from benchmarks.agent.evidence import (
    SCRAPE,
    Caps,
    Dark,
    Evidence,
    GoodData,
    LeaseCall,
    RefusedCall,
    audit_of,
    decisions_of,
    grant_on,
)
from benchmarks.agent.metrics_page import metrics_page
from harvester.agent.audit_file import AuditFile
from harvester.agent.engine_probes import MetricsProbe
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.errors import Exhausted, RoseMuxError
from harvester.contracts.ids import JobId, LeaseId, SlotId, TenantId
from harvester.contracts.journal import JournalWriter
from harvester.contracts.page import GrantMode, Guest, PageDirectory, PageName, Pulse
from harvester.contracts.wire.leases import LeaseGranted, LeaseRenewal, LeaseRequest
from harvester.contracts.wire.stops import StopOrder, StopRequest
from harvester.platform import whole_file
from harvester.policy.sample import SCRAPED_PULSE
from scheduler.sim.replay import replay_journal

TICK_S = 0.05
LASTS_S = 12.0
STEP_TOKENS, KV_TOKENS = 512, 4096
_BEAT_S, _TTL_S, _LEASE_S = 0.1, 0.5, 10.0
_PULSE_S = 0.3
_COOLDOWN_S = 0.3
_HUNG_S = 2.0
_EARLIEST_S = 3.0
"""Slots are open by then."""


@dataclass
class VirtualTime:
    now_s: float = 1000.0
    wall_s: float = 0.0
    """Wall clock's offset, which jumps."""

    @contextmanager
    def governing(self) -> Iterator[None]:
        """The one module that reads a clock reads this one."""
        origin = datetime(2026, 1, 1, tzinfo=UTC)
        clock = SimpleNamespace(
            monotonic=lambda: self.now_s, monotonic_ns=lambda: round(self.now_s * 1e9)
        )
        wall = SimpleNamespace(
            now=lambda _: origin + timedelta(seconds=self.now_s + self.wall_s),
        )
        with (
            patch("harvester.contracts.clock.time", clock),
            patch("harvester.contracts.clock.datetime", wall),
        ):
            yield

    def now(self) -> float:
        return self.now_s


class ScrapedServer:
    """An `aiohttp.ClientSession` whose server answers by its mood."""

    def __init__(self) -> None:
        self.mood = "good"
        self.tokens = 1000

    def get(self, *_: Any, **__: Any) -> "ScrapedServer":
        return self

    async def __aenter__(self) -> Any:
        if self.mood == "half_open":
            raise TimeoutError
        if self.mood == "error":
            raise aiohttp.ClientPayloadError("Response payload is not completed")
        self.tokens += 50
        body = metrics_page(self.mood, running=2, tokens=self.tokens)
        content = SimpleNamespace(read=_reads(body))
        return SimpleNamespace(content=content, raise_for_status=lambda: None)

    async def __aexit__(self, *_: object) -> None:
        return


def _reads(body: bytes) -> Callable[[int], Any]:
    left = bytearray(body)

    async def read(most: int) -> bytes:
        part = bytes(left[:most])
        del left[:most]
        return part

    return read


@dataclass
class VirtualSlot:
    """Production, guest and lease holder of one slot."""

    name: str
    pages: PageDirectory
    scraped: ScrapedServer | None
    silent: bool = False
    hung_s: float = 0.0
    """Since when its engine hangs."""
    guest_silent: bool = False
    samples: int = 1000
    steps: int = 0
    kv_usage_ratio: float = 0.0
    lease: LeaseGranted | None = None
    request: str = ""
    lose: str = ""
    """`request` or `reply`: what the next calls lose."""
    guest_steps: int = 0
    scraped_ns: int = 0
    """Stamps of the last pulse from a scrape, and of the last grant."""
    granted_s: float = 0.0
    probe: MetricsProbe | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.pulse_page = self.pages.own_pulse("prod", 0)
        self.guest_page = self.pages.guest_page()
        if self.scraped is not None:
            self.probe = MetricsProbe("http://h/metrics", pages=self.pages.path)


class VirtualNode:
    def __init__(self, seed: int, root: Path) -> None:
        self.rng = random.Random(seed)
        self.time = VirtualTime()
        self.evidence = Evidence(name=f"virtual {seed}", lease_ttl_s=_LEASE_S)
        self.root = root
        self.disk_full = False
        self.agent: NodeAgent | None = None
        self.tokens_max = STEP_TOKENS
        self.ordered_s: dict[str, float] = {}
        """Until when each kind of order is in force."""
        self._requests = count()
        self._lift: list[tuple[float, Callable[[], None]]] = []
        names = [f"slot{number}" for number in range(self.rng.choice((1, 1, 2, 3)))]
        self.slots = [
            VirtualSlot(
                name,
                PageDirectory.create(root / "pages" / name),
                ScrapedServer() if self.rng.random() < 0.15 else None,
            )
            for name in names
        ]

    def config(self) -> AgentConfig:
        policy = {
            "cooldown_s": _COOLDOWN_S,
            "proof": {"share_ratio": 0.0},
            "step_tokens_max": self.tokens_max,
            "kv_budget_tokens": KV_TOKENS,
            "profile": {"prefill_base_s": 0.01, "decode_base_s": 0.01},
        }
        return AgentConfig.model_validate(
            {
                "mode": "harvest",
                "page_root": self.root / "pages",
                "state_dir": self.root / "state",
                "lease_ttl_s": _LEASE_S,
                "slots": [
                    {
                        "name": slot.name,
                        "policy": policy,
                        **({"metrics_url": "http://h/metrics"} if slot.scraped else {}),
                    }
                    for slot in self.slots
                ],
            }
        )

    def start(self) -> None:
        self.evidence.starts.append(self.time.now_s)
        self.evidence.caps.append(
            Caps(
                since_s=self.time.now_s,
                step_tokens=self.tokens_max,
                kv_tokens=KV_TOKENS,
                ttl_s=_TTL_S,
            )
        )
        self.agent = NodeAgent(self.config(), clock=self.time, version="1")

    def kill(self) -> None:
        """SIGKILL: nothing is written any more."""
        self.agent = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def run(
        self, faults: list[tuple[float, str]], runner: asyncio.Runner, *, lasts_s: float
    ) -> None:
        begin_s, ticks = self.time.now_s, 0
        self.start()
        while self.time.now_s < begin_s + lasts_s:
            ticks += 1
            self.time.now_s = round(self.time.now_s + TICK_S, 6)
            for due in [each for each in self._lift if each[0] <= self.time.now_s]:
                self._lift.remove(due)
                due[1]()
            while faults and begin_s + faults[0][0] <= self.time.now_s:
                FAULTS[faults.pop(0)[1]](self)
            for slot in self.slots:
                self._engines(slot)
                if slot.probe is not None and ticks % 20 == 0:
                    self._scrape(slot, runner)
            if self.agent is not None and ticks % 2 == 0:
                self.agent.beat()
                for slot in self.slots:
                    self._hold_lease(slot)
            for slot in self.slots:
                self._note_grant(slot)
        if self.agent is not None:
            self.agent.close()
            self.agent = None

    def later(self, after_s: float, action: Callable[[], None]) -> float:
        """Have the fault lifted then; returns the time."""
        at_s = self.time.now_s + after_s
        self._lift.append((at_s, action))
        return at_s

    def dark(
        self, slot: VirtualSlot, cause: str, *, until_s: float, since_s: float | None = None
    ) -> None:
        """From now on, unless `since_s` says otherwise."""
        since_s = self.time.now_s if since_s is None else since_s
        self.evidence.dark.append(
            Dark(slot=slot.name, cause=cause, since_s=since_s, until_s=until_s)
        )

    def _engines(self, slot: VirtualSlot) -> None:
        now_ns = round(self.time.now_s * 1e9)
        if not slot.silent:
            slot.steps += not slot.hung_s
            slot.samples = min(1000, slot.samples + 10)
            pulse = Pulse(
                in_flight=2 if slot.hung_s else 0,
                steps_total=slot.steps,
                model_samples=slot.samples,
                kv_usage_ratio=slot.kv_usage_ratio,
                middleware=True,
            )
            slot.pulse_page.keep()
            slot.pulse_page.write(pulse, now_ns=now_ns, ttl_ns=round(_PULSE_S * 1e9))
            until_s = self.time.now_s + _PULSE_S
            good = GoodData(slot=slot.name, at_s=self.time.now_s, until_s=until_s)
            self.evidence.good.append(good)
        if not slot.guest_silent:
            slot.guest_steps += 1
            guest = Guest(steps_finished=slot.guest_steps, kv_tokens_total=KV_TOKENS)
            slot.guest_page.keep()
            slot.guest_page.write(guest, now_ns=now_ns, ttl_ns=round(_PULSE_S * 1e9))

    def _scrape(self, slot: VirtualSlot, runner: asyncio.Runner) -> None:
        assert slot.probe is not None
        assert slot.scraped is not None
        if self.agent is None:
            return
        runner.run(slot.probe.ask(slot.scraped))  # type: ignore[arg-type]  # a stand-in
        if slot.scraped.mood == "good":
            until_s = self.time.now_s + TICK_S
            good = GoodData(slot=SCRAPE, at_s=self.time.now_s, until_s=until_s)
            self.evidence.good.append(good)
        reading = slot.pages.pulse_reader(SCRAPED_PULSE).read_left()
        if reading.record is not None and reading.stamp_ns != slot.scraped_ns:
            slot.scraped_ns = reading.stamp_ns
            self.evidence.scraped.append(reading.stamp_ns * 1e-9)

    def _hold_lease(self, slot: VirtualSlot) -> None:
        """Takes, renews and gives back; a lost request never arrives, a lost reply is asked for
        again."""
        agent, now_s = self.agent, self.time.now_s
        assert agent is not None
        draw = self.rng.random()
        if slot.lose == "request" or draw > 0.3:
            return
        if slot.lease is None:
            slot.request = slot.request or f"r{next(self._requests)}"
            request = LeaseRequest(
                request_id=slot.request,
                slot=SlotId(slot.name),
                tenant=TenantId("t"),
                job=JobId("j"),
                duration_s=_LEASE_S,
            )
            answer = agent.take(request)
            if isinstance(answer, LeaseGranted):
                self._called(slot, answer.epoch, now_s, now_s + answer.duration_s)
                if slot.lose != "reply":
                    slot.lease = answer
            elif "answered before" in answer.reason:
                slot.request = ""
            return
        if draw < 0.01:
            agent.release(slot.lease.lease)
            self._called(slot, slot.lease.epoch, now_s, now_s, released=True)
            if slot.lose != "reply":
                slot.lease, slot.request = None, ""
            return
        renewal = LeaseRenewal(epoch=slot.lease.epoch, duration_s=_LEASE_S)
        renewed = agent.renew(slot.lease.lease, renewal)
        if isinstance(renewed, LeaseGranted):
            self._called(slot, renewed.epoch, now_s, now_s + renewed.duration_s)
        elif slot.lose != "reply":
            slot.lease, slot.request = None, ""

    def _called(
        self,
        slot: VirtualSlot,
        epoch: int,
        at_s: float,
        until_s: float,
        *,
        released: bool = False,
    ) -> None:
        call = LeaseCall(
            slot=slot.name,
            request_id=slot.request,
            epoch=epoch,
            at_s=at_s,
            until_s=until_s,
            released=released,
        )
        self.evidence.calls.append(call)

    def _note_grant(self, slot: VirtualSlot) -> None:
        try:
            page = (slot.pages.path / PageName.GRANT).read_bytes()
        except OSError:
            return
        seen = grant_on(page, slot.name, seen_s=self.time.now_s)
        if seen is not None and seen.stamp_s != slot.granted_s:
            slot.granted_s = seen.stamp_s
            self.evidence.grants.append(seen)


Fault = Callable[[VirtualNode], None]
FAULTS: dict[str, Fault] = {}


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def _drawn(node: VirtualNode) -> VirtualSlot:
    return node.rng.choice(node.slots)


def _production_back(slot: VirtualSlot) -> None:
    slot.silent, slot.hung_s = False, 0.0


@_fault
def production_stopped(node: VirtualNode) -> None:
    """SIGSTOP: its page stays and expires."""
    slot = _drawn(node)
    slot.silent = True
    node.later(node.rng.uniform(0.2, 7.0), lambda: _production_back(slot))


@_fault
def production_hung(node: VirtualNode) -> None:
    """Its middleware has requests and its engine steps no more, while the page goes on."""
    slot, lasts_s = _drawn(node), node.rng.uniform(1.0, 6.0)
    if slot.silent or slot.hung_s:
        return
    slot.hung_s = struck_s = node.time.now_s
    starts = len(node.evidence.starts)
    until_s = node.later(lasts_s, lambda: _production_back(slot))

    def judge() -> None:
        # A restarted agent has not seen its last step.
        if slot.hung_s == struck_s and len(node.evidence.starts) == starts and not slot.silent:
            node.dark(slot, "hung", since_s=struck_s + _HUNG_S + 2 * _BEAT_S, until_s=until_s)

    node.later(lasts_s - TICK_S, judge)


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
    node.later(node.rng.uniform(0.1, 3.0), lambda: _production_back(slot))


@_fault
def scrape_spoilt(node: VirtualNode) -> None:
    moods = ("nan", "truncated", "huge", "empty", "negative", "half_open", "error")
    for slot in node.slots:
        if (server := slot.scraped) is not None:
            server.mood = node.rng.choice(moods)
            node.later(node.rng.uniform(1.0, 5.0), lambda server=server: _answers(server))  # type: ignore[misc]


@_fault
def scrape_reset(node: VirtualNode) -> None:
    for slot in node.slots:
        if slot.scraped is not None:
            slot.scraped.tokens = 0


def _answers(server: ScrapedServer) -> None:
    server.mood = "good"


@_fault
def guest_stopped(node: VirtualNode) -> None:
    slot = _drawn(node)
    slot.guest_silent = True
    node.later(node.rng.uniform(0.2, 9.0), lambda: setattr(slot, "guest_silent", False))


@_fault
def kv_full(node: VirtualNode) -> None:
    slot = _drawn(node)
    slot.kv_usage_ratio = 0.97
    node.later(node.rng.uniform(0.2, 4.0), lambda: setattr(slot, "kv_usage_ratio", 0.0))


@_fault
def calls_lose_requests(node: VirtualNode) -> None:
    _lose(node, "request")


@_fault
def calls_lose_replies(node: VirtualNode) -> None:
    _lose(node, "reply")


def _lose(node: VirtualNode, what: str) -> None:
    slot = _drawn(node)
    slot.lose = what
    node.later(node.rng.uniform(1.0, 12.0), lambda: setattr(slot, "lose", ""))


@_fault
def agent_killed(node: VirtualNode) -> None:
    if node.agent is not None:
        node.kill()
        node.later(node.rng.uniform(0.0, 6.0), node.start)


@_fault
def agent_stopped(node: VirtualNode) -> None:
    """SIGSTOP between two of its system calls: half of the time between sample and grant."""
    agent = node.agent
    if agent is None:
        return
    slot = node.rng.choice(agent.slots)
    observe, leap_s = slot.policy.observe, node.rng.uniform(0.3, 20.0)

    def stopped(*given: Any, **named: Any) -> Any:
        effects = observe(*given, **named)
        vars(slot.policy).pop("observe", None)
        node.time.now_s = round(node.time.now_s + leap_s, 6)
        return effects

    if node.rng.random() < 0.5:
        slot.policy.observe = stopped  # type: ignore[method-assign]
    else:
        node.time.now_s = round(node.time.now_s + leap_s, 6)


@_fault
def machine_suspended(node: VirtualNode) -> None:
    """All clocks leap for all processes."""
    node.time.now_s = round(node.time.now_s + node.rng.choice((1.0, 30.0, 3600.0)), 6)


@_fault
def wall_clock_jumped(node: VirtualNode) -> None:
    node.time.wall_s += node.rng.choice((-86_400.0, -3600.0, 3600.0, 400 * 86_400.0))


@_fault
def disk_full(node: VirtualNode) -> None:
    node.disk_full = True
    node.evidence.recording = False
    node.later(node.rng.uniform(0.3, 4.0), lambda: setattr(node, "disk_full", False))


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

    node.later(until_s - node.time.now_s, lift_last)
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
    node.evidence.caps.append(
        Caps(
            since_s=node.time.now_s + TICK_S / 2,
            step_tokens=node.tokens_max,
            kv_tokens=KV_TOKENS,
            ttl_s=_TTL_S,
        )
    )


@_fault
def hostile_calls(node: VirtualNode) -> None:
    """Other tenants, guessed ids, absurd durations: nothing is granted while the lease is held."""
    agent = node.agent
    if agent is None:
        return
    for slot in node.slots:
        held = agent.leases.live(SlotId(slot.name))
        if slot.lease is None or held is None or held.ends_s <= node.time.now_s:
            continue
        guess = LeaseId(f"{slot.name}.{slot.lease.epoch}.{node.rng.randbytes(16).hex()}")
        renewal = LeaseRenewal(epoch=slot.lease.epoch, duration_s=1e300)
        agent.release(guess)
        answers = [agent.renew(guess, renewal)]
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


def run_scenario(seed: int, root: Path, *, lasts_s: float = LASTS_S) -> tuple[Evidence, list[str]]:
    """The evidence, and the faults that struck while a grant was open or had been."""
    node = VirtualNode(seed, root)
    rng = random.Random(f"faults {seed}")
    names = sorted(FAULTS)
    drawn = [names[seed % len(names)], *rng.choices(names, k=rng.randrange(1, 5))]
    faults = sorted((rng.uniform(_EARLIEST_S, lasts_s - 3.0), name) for name in drawn)
    with ExitStack() as stack:
        stack.enter_context(node.time.governing())
        stack.enter_context(_refusing(node))
        runner = stack.enter_context(asyncio.Runner())
        node.run(list(faults), runner, lasts_s=lasts_s)
    evidence = node.evidence
    for slot in node.slots:
        slot.pulse_page.close()
        slot.guest_page.close()
        journal = root / "state" / f"{slot.name}.journal"
        evidence.decisions[slot.name] = decisions_of(journal)
        try:
            difference = replay_journal(journal).difference
        except RoseMuxError as error:
            evidence.replay_faults.append(str(error))
        else:
            if difference is not None:
                evidence.replay_faults.append(f"{slot.name}: line {difference.line} differs")
    evidence.audit = audit_of(root / "state" / "audit.jsonl")
    return evidence, drawn


@contextmanager
def _refusing(node: VirtualNode) -> Iterator[None]:
    """Journal, state and audit are refused while the disk is full."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if node.disk_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*given, **named)

        return call

    with (
        patch.object(JournalWriter, "decided", refusing(JournalWriter.decided)),
        patch.object(JournalWriter, "opened", refusing(JournalWriter.opened)),
        patch.object(AuditFile, "append", refusing(AuditFile.append)),
        patch.object(whole_file, "replace", refusing(whole_file.replace)),
    ):
        yield


def run_in(root: Path, seed: int, *, lasts_s: float = LASTS_S) -> tuple[Evidence, list[str]]:
    """`run_scenario` in a folder that is removed behind it, without its log."""
    folder = root / f"v{seed}"
    logging.disable(logging.CRITICAL)
    try:
        return run_scenario(seed, folder, lasts_s=lasts_s)
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)


def was_open(evidence: Evidence) -> bool:
    return any(seen.grant.mode is not GrantMode.CLOSED for seen in evidence.grants)
