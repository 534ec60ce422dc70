"""One node in virtual time: the agent's own `NodeAgent`, with its pages, files and scrapes.

Production and guest of each slot write every 50 ms, the agent beats every 100 ms, a lease holder
calls. Only the clock, the scraped server and the disk's refusals are simulated.
"""

import asyncio
import gc
import os
import random
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
    TurnServed,
    grant_on,
)
from benchmarks.agent.metrics_page import metrics_page
from benchmarks.testbed.page_beats import shared_group
from coserve.vllm.middleware import EpochMiddleware
from harvester.agent.engine_probes import MetricsProbe
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.page import Guest, PageDirectory, PageName, Pulse
from harvester.contracts.wire.leases import (
    EPOCH_HEADER,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
)
from harvester.policy.sample import SCRAPED_PULSE

TICK_S = 0.05
LASTS_S = 12.0
STEP_TOKENS, KV_TOKENS = 512, 4096
BEAT_S, TTL_S, _LEASE_S = 0.1, 0.5, 10.0
_PULSE_S = 0.3
_COOLDOWN_S = 0.3
_REPEATED_S = 8.0
_TURNS = "/v1/completions"


@dataclass
class VirtualTime:
    now_s: float = 1000.0
    wall_s: float = 0.0
    """Wall clock's offset, which jumps."""

    @contextmanager
    def governing(self) -> Iterator[None]:
        """The one module that reads a clock reads this one."""
        origin = datetime(2026, 1, 1, tzinfo=UTC)
        wall = SimpleNamespace(
            now=lambda _: origin + timedelta(seconds=self.now_s + self.wall_s),
        )
        clock = SimpleNamespace(
            monotonic=lambda: self.now_s,
            monotonic_ns=lambda: round(self.now_s * 1e9),
            time=lambda: wall.now(UTC).timestamp(),
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
        return SimpleNamespace(content=content, status=200)

    async def __aexit__(self, *_: object) -> None:
        return


async def _serve(_: Any, __: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """The engine behind the middleware: it serves at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def _keeps(sent: list[Any]) -> Callable[[Any], Awaitable[None]]:
    async def send(message: Any) -> None:
        sent.append(message)

    return send


def _reads(body: bytes) -> Callable[[int], Any]:
    left = bytearray(body)

    async def read(most: int) -> bytes:
        part = bytes(left[:most])
        del left[:most]
        return part

    return read


@dataclass
class VirtualHolder:
    """A gateway's view of one slot: what it holds by the answers that have reached it."""

    lease: LeaseGranted | None = None
    until_s: float = 0.0
    """Counted from the call, as gateways do."""
    request: str = ""


@dataclass
class VirtualSlot:
    """Production, guest and lease holders of one slot, and the network before its agent."""

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
    holders: list[VirtualHolder] = field(default_factory=lambda: [VirtualHolder()])
    lose: str = ""
    """`request` or `reply`: what the next calls lose."""
    late_s: float = 0.0
    """Longest delay of each call and of each answer: they overtake each other."""
    twice: bool = False
    """Whether a proxy repeats calls, up to 8 s later."""
    turn_late_s: float = 0.0
    """Longest delay of a turn in the proxy before the engine."""
    epochs: list[int] = field(default_factory=list)
    """Epochs that holders were given, for turns of gateways that go on with them."""
    guest_steps: int = 0
    blinded: int = 0
    """How often its policy began to observe anew: after failed beats, or in a configuration that it
    left or came back to."""
    scraped_ns: int = 0
    """Stamps of the last pulse from a scrape, and of the last grant."""
    granted_s: float = 0.0
    probe: MetricsProbe | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.memory_group = shared_group(self.pages.path.with_suffix(".group"))
        self.pulse_page = self.pages.own_pulse("prod", 0)
        self.guest_page = self.pages.guest_page()
        if self.scraped is not None:
            self.probe = MetricsProbe("http://h/metrics", pages=self.pages.path)
        guest = {"ROSEMUX_PAGE_DIR": str(self.pages.path), "ROSEMUX_ROLE": "guest"}
        with patch.dict(os.environ, guest | {"ROSEMUX_ENGINE": "guest"}):
            self.middleware = EpochMiddleware(_serve)

    @property
    def lease(self) -> LeaseGranted | None:
        return next((each.lease for each in self.holders if each.lease is not None), None)


class VirtualNode:
    def __init__(self, seed: int, root: Path) -> None:
        self.rng = random.Random(seed)
        self.time = VirtualTime()
        self.evidence = Evidence(name=f"virtual {seed}", lease_ttl_s=_LEASE_S)
        self.root = root
        self.moved: list[Path] = []
        """Directories of state that were moved away, in order."""
        self.disk_full = False
        self.agent: NodeAgent | None = None
        self.tokens_max = STEP_TOKENS
        self.gone: set[str] = set()
        """Slots that the configuration has not at the moment."""
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
                "slots_file": self.root / "absent",  # so that there may be no slot at all
                "slots": [
                    {
                        "name": slot.name,
                        "policy": policy,
                        "memory_group": slot.memory_group,
                        **({"metrics_url": "http://h/metrics"} if slot.scraped else {}),
                    }
                    for slot in self.slots
                    if slot.name not in self.gone
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
                ttl_s=TTL_S,
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
        self,
        faults: list[tuple[float, Callable[["VirtualNode"], None]]],
        runner: asyncio.Runner,
        *,
        lasts_s: float,
    ) -> None:
        """`faults` are in the order of their times, in s from the start."""
        begin_s, ticks = self.time.now_s, 0
        self.start()
        while self.time.now_s < begin_s + lasts_s:
            ticks += 1
            self.time.now_s = round(self.time.now_s + TICK_S, 6)
            for due in [each for each in self._lift if each[0] <= self.time.now_s]:
                self._lift.remove(due)
                due[1]()
            while faults and begin_s + faults[0][0] <= self.time.now_s:
                faults.pop(0)[1](self)
            for slot in self.slots:
                self._engines(slot)
                if slot.probe is not None and ticks % 20 == 0:
                    self._scrape(slot, runner)
            if self.agent is not None and ticks % 2 == 0:
                self.agent.beat()
                for slot in self.slots:
                    for holder in slot.holders:
                        self._hold_lease(slot, holder)
                    if slot.epochs and self.rng.random() < 0.2:
                        self._send_turn(slot, runner)
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

    def _hold_lease(self, slot: VirtualSlot, holder: VirtualHolder) -> None:
        """Takes, renews and gives back; a lost request never arrives, a lost reply is asked for
        again."""
        draw, called_s, held = self.rng.random(), self.time.now_s, holder.lease
        if held is not None and called_s >= holder.until_s:
            held = holder.lease = None
            holder.request = ""
        if draw > 0.3:
            return
        request_id = holder.request = holder.request or f"r{next(self._requests)}"
        if held is None:
            request = LeaseRequest(
                request_id=request_id,
                slot=SlotId(slot.name),
                tenant=TenantId("t"),
                job=JobId("j"),
                duration_s=_LEASE_S,
            )

            def taken(answer: LeaseGranted | LeaseRefused) -> None:
                if isinstance(answer, LeaseRefused):
                    if "answered before" in answer.reason and holder.request == request_id:
                        holder.request = ""
                elif holder.lease is None and holder.request == request_id:
                    holder.lease, holder.until_s = answer, called_s + answer.duration_s
                    slot.epochs.append(answer.epoch)

            self._send(slot, request_id, lambda agent: agent.take(request), taken)
            return
        lease, renewal = held.lease, LeaseRenewal(epoch=held.epoch, duration_s=_LEASE_S)

        def ended(answer: LeaseGranted | LeaseEnded) -> None:
            if holder.lease is None or holder.lease.lease != lease:
                return
            if isinstance(answer, LeaseGranted):
                holder.until_s = max(holder.until_s, called_s + answer.duration_s)
            else:
                holder.lease, holder.request = None, ""

        if draw < 0.01:
            self._send(slot, request_id, lambda agent: agent.release(lease), ended, held.epoch)
        else:
            self._send(slot, request_id, lambda agent: agent.renew(lease, renewal), ended)

    def _send(
        self,
        slot: VirtualSlot,
        request_id: str,
        ask: Callable[[NodeAgent], Any],
        heard: Callable[[Any], None],
        releases: int | None = None,
    ) -> None:
        """A call to the agent through the network as it is. `releases`: epoch of the lease that the
        call gives back."""
        if slot.lose == "request":
            return

        def arrive(*, repeated: bool) -> None:
            if self.agent is None:
                return
            now_s, answer = self.time.now_s, ask(self.agent)
            if isinstance(answer, LeaseGranted):
                self._called(slot, request_id, answer.epoch, now_s, now_s + answer.duration_s)
            elif releases is not None:
                self._called(slot, request_id, releases, now_s, now_s, released=True)
            if slot.lose != "reply" and not repeated:
                self._deliver(slot.late_s, lambda: heard(answer))

        self._deliver(slot.late_s, lambda: arrive(repeated=False))
        if slot.twice:
            self._deliver(_REPEATED_S, lambda: arrive(repeated=True))

    def _deliver(self, late_s: float, action: Callable[[], None]) -> None:
        if late_s:
            self.later(self.rng.uniform(0.0, late_s), action)
        else:
            action()

    def _send_turn(self, slot: VirtualSlot, runner: asyncio.Runner) -> None:
        """A turn of a gateway, which may be late itself, through the guest's own middleware."""
        epoch = self.rng.choice(slot.epochs[-3:])
        header = (EPOCH_HEADER.lower().encode(), str(epoch).encode())
        scope = {"type": "http", "method": "POST", "path": _TURNS, "headers": [header]}

        def arrive() -> None:
            async def exchange() -> int:
                sent: list[Any] = []
                await slot.middleware(scope, _nothing, _keeps(sent))
                return int(sent[0]["status"])

            if runner.run(exchange()) == 200:
                turn = TurnServed(slot=slot.name, epoch=epoch, at_s=self.time.now_s)
                self.evidence.turns.append(turn)

        self._deliver(slot.turn_late_s, arrive)

    def _called(
        self,
        slot: VirtualSlot,
        request_id: str,
        epoch: int,
        at_s: float,
        until_s: float,
        *,
        released: bool = False,
    ) -> None:
        call = LeaseCall(
            slot=slot.name,
            request_id=request_id,
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
