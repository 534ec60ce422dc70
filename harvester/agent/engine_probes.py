"""HTTP questions of the agent to engines: production's metrics, and the guest's description."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import UNDECODABLE, ConfigError, reason_of
from harvester.contracts.page import PageDirectory, Pulse, engine_of
from harvester.contracts.wire.engines import ENGINE_ROUTE, EngineDescription, EngineReport
from harvester.platform.http_kit import body_of
from harvester.platform.peer import Peer
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from harvester.policy.sample import SCRAPED_PULSE

ACCEPT = "text/plain;version=0.0.4"
"""Plain text: newer client libraries write an engine's `vllm:` as `vllm_` in OpenMetrics."""
MAX_SCRAPE_BYTES = 1 << 20
"""The whole page of vLLM 0.32 has 60 KiB, and 46 KiB more for each further engine core
(data-parallel rank): 22 fit. The narrow one has five series of each."""
_MAX_READ_BYTES = 64 << 10
"""Lines of it that are parsed: five series of each core."""

_SCRAPE_S = 1.0
_DESCRIPTION_S = 2.0
_DESCRIPTION_BYTES_MAX = 64 << 10
_TTL_NS = 3_000_000_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    running: float
    waiting: float
    kv_usage_ratio: float
    prompt_tokens_total: float
    generation_tokens_total: float


_SERIES = {
    "vllm": {
        "num_requests_running": "running",
        "num_requests_waiting": "waiting",
        "kv_cache_usage_perc": "kv_usage_ratio",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generation_tokens_total",
    },
    "sglang": {
        "num_running_reqs": "running",
        "num_queue_reqs": "waiting",
        "token_usage": "kv_usage_ratio",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generation_tokens_total",
    },
}
"""Names by engine, behind its own and a colon; SGLang has them with --enable-metrics."""
_NAMES = [(engine, name) for engine, names in _SERIES.items() for name in names]
_NEEDED = re.compile(
    rf"^(?:{'|'.join(f'{engine}[:_]{name}' for engine, name in _NAMES)})[ {{].*$", re.MULTILINE
)


def narrowed(url: str) -> str:
    """URL that selects only the series that `read_metrics` needs."""
    page = urlsplit(url)
    query = parse_qsl(page.query, keep_blank_values=True)
    query += [("name[]", f"{engine}:{name}") for engine, name in _NAMES]
    return urlunsplit(page._replace(path=f"{page.path.rstrip('/')}/", query=urlencode(query)))


def read_metrics(text: str) -> EngineMetrics | None:
    """Sums over engines of one kind, and the largest KV use; None if one is missing or bad."""
    lines = "\n".join(_NEEDED.findall(text))
    if len(lines) > _MAX_READ_BYTES:
        return None
    found: dict[str, float] = {}
    engine = "sglang" if lines.startswith("sglang") else "vllm"
    try:
        families = text_string_to_metric_families(lines + "\n")
        for name, _, value, *_ in (sample for family in families for sample in family.samples):
            field = _SERIES[engine].get(name.removeprefix(engine)[1:])
            # Each by itself: the maximum of NaN and 0 is 0. A pulse's integers have 64 bits.
            if field is None or not 0 <= value < 1e15:
                return None
            before = found.get(field, 0.0)
            found[field] = max(before, value) if field == "kv_usage_ratio" else before + value
    except ValueError:
        return None
    return EngineMetrics(**found) if len(found) == len(_SERIES[engine]) else None


class MetricsProbe:
    """Consent level `metrics`: writes what production's Prometheus page says as a pulse.

    This pulse has no step-time model, so the slot stays in learning: it is watched and its idleness
    estimated, never opened. A series that is missing or not a number makes the scrape unknown: no
    pulse is written and the last one expires. Rendering the whole page takes vLLM as long as some
    of its steps, in the process that answers requests. The probe therefore asks for the few series
    that it needs, which vLLM understands below `/metrics/`; elsewhere it reads the whole page.
    """

    def __init__(self, url: str, *, pages: Path) -> None:
        """`url`: address of the whole metrics page."""
        self._url = url
        self._narrow: str | None = narrowed(url)
        """URL of the needed metrics only; None once the whole page gave metrics that it lacked."""
        self._page = PageDirectory(pages).own_pulse(engine_of(SCRAPED_PULSE), 0)
        self._busy_s = 0.0
        self._failing = False

    async def run(self) -> None:
        """Probes until the task is cancelled; then the pulse goes, as no scrape follows."""
        try:
            await _repeat(self.ask, period_s=_SCRAPE_S)
        finally:
            self._page.close(unlink=True)

    async def ask(self, session: aiohttp.ClientSession) -> None:
        """Scrapes once and writes a pulse if the metrics are known."""
        metrics = await self.scrape(session)
        if metrics is not None:
            self._write(metrics)

    async def scrape(self, session: aiohttp.ClientSession) -> EngineMetrics | None:
        """Read the metrics; None if a series is missing or bad. Logs when this changes."""
        try:
            metrics = await self._read(session)
            problem = "a series is missing or not a number" if metrics is None else ""
        except (aiohttp.ClientError, TimeoutError) as error:
            metrics, problem = None, reason_of(error)
        if bool(problem) != self._failing:
            self._failing = bool(problem)
            _log.warning("scrape of %s: %s", self._url, problem or "works again")
        return metrics

    async def _read(self, session: aiohttp.ClientSession) -> EngineMetrics | None:
        """Raises ClientError or TimeoutError."""
        if self._narrow is not None:
            with suppress(aiohttp.ClientResponseError):
                metrics = await _scraped(session, self._narrow)
                if metrics is not None:
                    return metrics
        metrics = await _scraped(session, self._url)
        if metrics is not None and self._narrow is not None:
            _log.info("%s has no usable samples; reading all of %s", self._narrow, self._url)
            self._narrow = None
        return metrics

    def _write(self, metrics: EngineMetrics) -> None:
        in_flight = int(metrics.running + metrics.waiting)
        self._busy_s += _SCRAPE_S if in_flight else 0.0
        pulse = Pulse(
            in_flight=in_flight,
            waiting=int(metrics.waiting),
            running=int(metrics.running),
            busy_s_total=self._busy_s,
            prompt_tokens_total=int(metrics.prompt_tokens_total),
            generation_tokens_total=int(metrics.generation_tokens_total),
            # Tokens stand for steps: they advance when steps do.
            steps_total=int(metrics.prompt_tokens_total + metrics.generation_tokens_total),
            kv_usage_ratio=min(1.0, metrics.kv_usage_ratio),
        )
        self._page.keep()
        self._page.write(pulse, now_ns=monotonic_ns(), ttl_ns=_TTL_NS)


async def _scraped(session: aiohttp.ClientSession, url: str) -> EngineMetrics | None:
    headers = {"Accept": ACCEPT}
    async with session.get(url, headers=headers, allow_redirects=False) as reply:
        if reply.status != 200:
            # A redirect would lead the agent to any service that it reaches.
            reason = reply.reason or ""
            raise aiohttp.ClientResponseError(
                reply.request_info, (), status=reply.status, message=reason
            )
        body = await body_of(reply, most_bytes=MAX_SCRAPE_BYTES + 1)
    if len(body) > MAX_SCRAPE_BYTES:
        return None
    # In a thread: the beats of all slots go on meanwhile.
    return await asyncio.to_thread(lambda: read_metrics(body.decode(errors="replace")))


class GuestDescription:
    """The guest engine's own description, for the slot's offer. An engine that does not answer is
    unknown again: the engine that comes back may be another one."""

    def __init__(
        self,
        engine_url: Callable[[], str],
        offered_url: Callable[[], str] = str,
        guests: Credentials | None = None,
    ) -> None:
        """The URLs as configured now, "" where there is none. A guest in another pod does not
        answer at `engine_url`: its engine proxy at `offered_url` does, with the files of
        `guests`."""
        self._engine_url, self._offered_url, self._guests = engine_url, offered_url, guests
        self._fault = ""
        self.latest = EngineDescription()

    async def run(self) -> None:
        """Probes until the task is cancelled."""
        await _repeat(self.ask, period_s=_DESCRIPTION_S)

    async def ask(self, session: aiohttp.ClientSession) -> None:
        found = await _described(session, self._engine_url(), NO_CREDENTIALS)
        if found is None and self._guests is not None:
            try:
                found = await _described(session, self._offered_url(), self._guests)
            except ConfigError as error:
                if str(error) != self._fault:
                    self._fault = str(error)
                    _log.warning("no description of guests in other pods: %s", error)
        self.latest = EngineDescription() if found is None else found


async def _described(
    session: aiohttp.ClientSession, url: str, credentials: Credentials
) -> EngineDescription | None:
    """The answer of the engine at this URL; None without one. Raises ConfigError as `Peer`."""
    if not url:
        return None
    try:
        async with Peer(session, url, credentials).get(ENGINE_ROUTE) as reply:
            raw = await body_of(reply, most_bytes=_DESCRIPTION_BYTES_MAX)
        return msgspec.json.decode(raw, type=EngineReport).description
    except (aiohttp.ClientError, TimeoutError, *UNDECODABLE):
        return None


async def _repeat(
    ask: Callable[[aiohttp.ClientSession], Awaitable[None]], *, period_s: float
) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=period_s)) as session:
        while True:
            try:
                await ask(session)
            except Exception:
                _log.exception("a probe of an engine failed; it is repeated")
            await asyncio.sleep(period_s)
