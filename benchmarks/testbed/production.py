"""The open-loop client in front of the production engine.

Sends every request when it is due, regardless of the others, and reports the latencies of its
user. Latencies count from the due time, so a late client or a full machine cannot hide. Draws
prompts, judges nothing; shares its core with others, so it never parses a stream's JSON.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import aiohttp

from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.trace import Arrival
from harvester.contracts.clock import Clock

_EVENT = b"data: {"
_ERROR = b'{"error"'
_DONE = b"data: [DONE]"
_CARRIED_BYTES = max(len(_EVENT), len(_ERROR), len(_DONE)) - 1
_IDLE_CONNECTION_S = 2.0
"""Below the 5 s after which vLLM's HTTP server closes an idle connection: a request sent into a
closing connection would fail, and a POST is not repeated."""


@dataclass(slots=True)
class StreamWatch:
    """Times of one streamed reply, from raw bytes as they come.

    One latency per read that brings tokens: several events in one read reached the user together.
    """

    due_s: float
    sent_s: float | None = None
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    done: bool = False
    error: str = ""
    _last_s: float = 0.0
    _carried: bytes = b""

    def read(self, chunk: bytes, *, now: float) -> None:
        """`chunk` need not begin or end where an event does."""
        seen = self._carried + chunk
        if _ERROR in seen and not self.error:
            self.error = seen[seen.index(_ERROR) :][:300].decode(errors="replace")
        if _EVENT in seen and not self.error:
            if self.ttft_s is None:
                self.ttft_s = now - self.due_s
            else:
                self.itl_s.append(now - self._last_s)
            self._last_s = now
        self.done = self.done or _DONE in seen
        newest = max(seen.rfind(_EVENT), seen.rfind(_ERROR))
        # Nothing that was counted may be seen again at the head of the next read.
        kept = max(len(seen) - _CARRIED_BYTES, newest + 1)
        self._carried = seen[kept:]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Token ids drawn anew for every request, so that no block finds another's prefix cached."""

    seed: int
    first_id: int
    last_id: int

    def of(self, arrival: Arrival, *, arm: str, block: int) -> list[int]:
        rng = Random(f"{self.seed}:{arm}:{block}:{arrival.index}")
        return rng.choices(range(self.first_id, self.last_id + 1), k=arrival.input_tokens)


@asynccontextmanager
async def production_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session that queues nothing: what waits, waits in the engine, where it is measured."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        yield session


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    if seconds <= 0:
        await asyncio.sleep(0)
        return event.is_set()
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionClient:
    """Replays arrivals against one engine's `/v1/completions`."""

    session: aiohttp.ClientSession
    url: str
    model: str
    prompts: RandomPrompts
    clock: Clock
    record: Callable[[ProductionRequest], None]
    """Called once per request, as it ends."""
    timeout_s: float = 60.0
    """Time limit from the due time, in s; a request without its last token by then has failed."""
    open_max: int = 1000
    """Requests in flight; one that is due beyond them has failed."""

    async def replay(
        self,
        arrivals: Iterable[Arrival],
        *,
        arm: str,
        block: int,
        start_s: float,
        stopped: asyncio.Event | None = None,
    ) -> None:
        """Sends all arrivals; returns when every request has ended. Cancelled, it drops open ones.

        `start_s` is the clock's time of the block's start; arrivals are in order of their times and
        may go on for ever. Once `stopped` is set nothing more is sent; what is in flight ends.
        """
        stop = stopped or asyncio.Event()
        flying: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            for arrival in arrivals:
                due_s = start_s + arrival.t_s
                body = self._body(arrival, arm, block)
                if await _set_within(stop, due_s - self.clock.now()):
                    break
                watch = StreamWatch(due_s=due_s)
                if len(flying) >= self.open_max:
                    watch.error = f"the client already had {self.open_max} requests in flight"
                    self._report(watch, arrival, arm, block)
                    continue
                task = tasks.create_task(self._request(watch, body, arrival, arm, block))
                flying.add(task)
                task.add_done_callback(flying.discard)

    async def _request(
        self, watch: StreamWatch, body: bytes, arrival: Arrival, arm: str, block: int
    ) -> None:
        left_s = watch.due_s + self.timeout_s - self.clock.now()
        try:
            async with asyncio.timeout(left_s):
                await self._stream(watch, body)
        except TimeoutError:
            watch.error = watch.error or f"no last token within {self.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            watch.error = watch.error or f"{type(error).__name__}: {error}"
        if not watch.error and not (watch.done and watch.ttft_s is not None):
            watch.error = "the stream ended before its last event"
        self._report(watch, arrival, arm, block)

    async def _stream(self, watch: StreamWatch, body: bytes) -> None:
        watch.sent_s = self.clock.now()
        async with self.session.post(
            f"{self.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                body = await response.content.read(300)
                watch.error = f"{response.status}: {body.decode(errors='replace')}"
                return
            async for chunk in response.content.iter_any():
                watch.read(chunk, now=self.clock.now())

    def _body(self, arrival: Arrival, arm: str, block: int) -> bytes:
        request = {
            "model": self.model,
            "prompt": self.prompts.of(arrival, arm=arm, block=block),
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        return json.dumps(request, separators=(",", ":")).encode()

    def _report(self, watch: StreamWatch, arrival: Arrival, arm: str, block: int) -> None:
        self.record(
            ProductionRequest(
                arm=arm,
                block=block,
                due_s=watch.due_s,
                input_tokens=arrival.input_tokens,
                output_tokens=arrival.output_tokens,
                ttft_s=watch.ttft_s,
                itl_s=tuple(watch.itl_s),
                failed=bool(watch.error),
                error=watch.error,
                sent_s=watch.sent_s,
                trace_index=arrival.index,
            )
        )
