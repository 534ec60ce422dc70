"""One slot of a node in virtual time: its engines' pages, their metrics, and who calls them."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import aiohttp

from benchmarks.agent.metrics_page import metrics_page
from benchmarks.testbed.page_beats import shared_group
from coserve.vllm.middleware import EpochMiddleware
from harvester.agent.engine_probes import MetricsProbe
from harvester.contracts.page import PageDirectory
from harvester.contracts.wire.leases import LeaseGranted


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


async def _serve(_: Any, __: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """The engine behind the middleware: it serves at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
