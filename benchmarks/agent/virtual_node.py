"""One node in virtual time: the agent's own `NodeAgent`, with its pages, files and scrapes.

Production and guest of each slot write every 50 ms, the agent beats every 100 ms, a lease holder
calls. Only the clock, the scraped server and the disk's refusals are simulated.
"""

import asyncio
import gc
import random
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.agent.evidence import SCRAPE, Caps, Dark, Evidence, GoodData, grant_on
from benchmarks.agent.virtual_gateways import LEASE_S, VirtualGateways
from benchmarks.agent.virtual_slot import ScrapedServer, VirtualSlot
from benchmarks.agent.virtual_time import VirtualTime
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.page import Guest, PageDirectory, PageName, Pulse
from harvester.policy.sample import SCRAPED_PULSE

TICK_S = 0.05
LASTS_S = 12.0
STEP_TOKENS, KV_TOKENS = 512, 4096
_TTL_S = 0.5
BEAT_S = 0.1
_PULSE_S = 0.3
_COOLDOWN_S = 0.3


class VirtualNode:
    def __init__(self, seed: int, root: Path) -> None:
        self.rng = random.Random(seed)
        self.time = VirtualTime()
        self.evidence = Evidence(name=f"virtual {seed}", lease_ttl_s=LEASE_S)
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
        self._gateways = VirtualGateways(
            lambda: self.agent, self.evidence, rng=self.rng, time=self.time
        )
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
                "lease_ttl_s": LEASE_S,
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
        self.note_caps()
        self.agent = NodeAgent(self.config(), clock=self.time, version="1")

    def note_caps(self) -> None:
        """The caps of grants from now on."""
        caps = Caps(
            since_s=self.time.now_s, step_tokens=self.tokens_max, kv_tokens=KV_TOKENS, ttl_s=_TTL_S
        )
        self.evidence.caps.append(caps)

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
            self.time.tick(TICK_S)
            while faults and begin_s + faults[0][0] <= self.time.now_s:
                faults.pop(0)[1](self)
            for slot in self.slots:
                self._engines(slot)
                if slot.probe is not None and ticks % 20 == 0:
                    self._scrape(slot, runner)
            if self.agent is not None and ticks % 2 == 0:
                self.agent.beat()
                for slot in self.slots:
                    self._gateways.beat(slot, runner)
            for slot in self.slots:
                self._note_grant(slot)
        if self.agent is not None:
            self.agent.close()
            self.agent = None

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

    def _note_grant(self, slot: VirtualSlot) -> None:
        try:
            page = (slot.pages.path / PageName.GRANT).read_bytes()
        except OSError:
            return
        seen = grant_on(page, slot.name, seen_s=self.time.now_s)
        if seen is not None and seen.stamp_s != slot.granted_s:
            slot.granted_s = seen.stamp_s
            self.evidence.grants.append(seen)
