"""Probes the gateway while turns are open, cuts them where it is silent, and learns its engines."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp
import msgspec

from harvester.contracts.errors import UNDECODABLE
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import EngineId, WeightVersion
from harvester.contracts.wire.gateway_status import GatewayEngine, GatewayFleet, GatewayJob
from harvester.contracts.wire.rollouts import OnInterrupt
from harvester.platform.http_kit import body_of
from scheduler.client.gateway_connection import GatewayConnection
from scheduler.model import EngineKind

_log = logging.getLogger(__name__)
_STATUS_BYTES = 16 << 20
_LEARN_S = 5.0
"""The gateway's engines change rarely, and only a gateway that answers can name them."""
_DECODER = msgspec.json.Decoder(GatewayFleet)


class GatewaySilence:
    """The gateway is silent once it has answered no probe for `limit_s`, until its next sign of
    life. Reads no clock."""

    def __init__(self, limit_s: float, *, now: float) -> None:
        self._limit_s = limit_s
        self.answered_at_s = now
        self.silent = False

    def begin(self, *, now: float) -> None:
        """Probing begins; the pause before it counts as no silence."""
        self.answered_at_s = now

    def hear(self, *, now: float) -> None:
        self.answered_at_s, self.silent = now, False

    def miss(self, *, began_s: float, now: float) -> None:
        """A probe that began at `began_s` had no answer. A probe that took far longer than its own
        timeout shows that this process stood still, not the gateway."""
        if now - began_s > 2 * self._limit_s:
            self.answered_at_s = now
        elif now - self.answered_at_s >= self._limit_s:
            self.silent = True


class GatewayWatch:
    """`engines`, `store` and `version` come from the gateway's last status; `engines` is empty
    where the job's turns may not run on dedicated engines, and as given before the first status."""

    def __init__(
        self,
        gateway: GatewayConnection,
        *,
        silence_s: float,
        warn_s: float,
        engines: Mapping[str, str],
    ) -> None:
        """`warn_s`: where it is less than `silence_s`, a longer wait for an answer is logged."""
        self._gateway, self._clock = gateway, gateway.clock
        self._silence_s, self._warn_s = silence_s, warn_s
        self.warnings = EventLimit.of_lines()
        self._silence = GatewaySilence(silence_s, now=self._clock.now())
        self._open = 0
        self._task: asyncio.Task[None] | None = None
        self._cuts: set[asyncio.Timeout] = set()
        self.engines = {
            EngineId(name): GatewayEngine(kind=EngineKind.DEDICATED, url=url)
            for name, url in engines.items()
        }
        self.learned = False
        """Whether the gateway has named the job's engines, and the weights that they hold."""
        self.fault = ""
        """Why it has not, where it answers."""
        self._warned = False
        """Whether this silence is logged already."""
        self._unanswered = ""
        """Why the last probe had no answer."""
        self.store = ""
        self.version = WeightVersion(0)
        self.on_interrupt = OnInterrupt.CONTINUE
        """The job's, for requests without one of their own."""

    @property
    def silence(self) -> str:
        """The words for a gateway that is silent."""
        return "the gateway is silent" + f" ({self._unanswered})" * bool(self._unanswered)

    @property
    def silent(self) -> bool:
        return self._silence.silent

    @property
    def unanswered_s(self) -> float:
        return self._clock.now() - self._silence.answered_at_s

    def hear(self) -> None:
        self._warned = False
        self._silence.hear(now=self._clock.now())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around every turn: probes run while any is open, and until a silence has ended."""
        self._open += 1
        if self._task is None:
            self._silence.begin(now=self._clock.now())
            self._task = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            self._open -= 1
            if not self._open and not self.silent:
                self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @contextmanager
    def cutting(self, cut: asyncio.Timeout) -> Iterator[None]:
        """`cut` ends at once when the gateway falls silent."""
        self._cuts.add(cut)
        try:
            yield
        finally:
            self._cuts.discard(cut)

    async def _watch(self) -> None:
        learned_s = -_LEARN_S
        while True:
            began_s = self._clock.now()
            try:
                due = began_s - learned_s >= _LEARN_S
                if await self._probe("/v1/status" if due else "/healthz"):
                    learned_s = began_s if due else learned_s
                    self.hear()
                    if not self._open:
                        self._task = None
                        return
                    await asyncio.sleep(self._silence_s / 4)
                    continue
                self._unanswered = "it answers 503"
            except (aiohttp.ClientError, TimeoutError, *UNDECODABLE) as error:
                self._unanswered = str(error) or "no answer in time"
            self._silence.miss(began_s=began_s, now=self._clock.now())
            if self.silent:
                while self._cuts:
                    self._cuts.pop().reschedule(0.0)
            await asyncio.sleep(self._silence_s / 8)

    async def _probe(self, path: str) -> bool:
        peer, headers = self._gateway.peer(), self._gateway.headers
        timeout = aiohttp.ClientTimeout(total=self._silence_s)
        warning = asyncio.ensure_future(self._warn())
        try:
            async with peer.get(path, headers=headers, timeout=timeout) as reply:
                content = await body_of(reply, most_bytes=_STATUS_BYTES)
        finally:
            warning.cancel()
        if path == "/v1/status" and reply.status == 200:
            self._learn(_DECODER.decode(content))
        elif path == "/v1/status" and reply.status != 503:
            fault = f"its {path} answers {reply.status}: {content[:200].decode(errors='replace')}"
            if fault != self.fault:
                _log.warning("the gateway names no engine to fall back on, %s", fault)
            self.fault = fault
        # A 503 means that the gateway ends; any other reply shows that it runs.
        return reply.status != 503

    async def _warn(self) -> None:
        await asyncio.sleep(self._warn_s)
        # An answer that came while this process stood still is read first.
        await asyncio.sleep(self._warn_s / 8)
        if not self._warned and self.warnings.admits(now=self._clock.now()):
            line = "the gateway %s has not answered for %.3g s; turns wait for it"
            _log.warning(line, self._gateway.peer().url, self.unanswered_s)
        self._warned = True

    def _learn(self, status: GatewayFleet) -> None:
        self.learned, self.fault = True, ""
        job = status.jobs.get(self._gateway.job, GatewayJob())
        mine = job.may_use_dedicated and status.active_job in (None, self._gateway.job)
        self.store, self.version = job.store, job.version
        self.on_interrupt = job.on_interrupt
        self.engines = {
            name: engine
            for name, engine in sorted(status.engines.items())
            if mine and engine.kind == EngineKind.DEDICATED
        }
