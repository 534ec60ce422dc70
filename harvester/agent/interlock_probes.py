"""Probes of alerts and accelerators for the interlocks, every few seconds beside the beat.

A probe keeps its last reading. Any answer but a whole, well-formed one within the time limit is a
reading with a fault; a probe that hangs leaves its reading to grow old.
"""

import asyncio
import math
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Generic, Literal, TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from harvester.contracts.accelerator import Accelerator
from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, reason_of
from harvester.interlock_config import AcceleratorsConfig, AlertsConfig
from harvester.platform.http_kit import body_of
from harvester.platform.peer import Peer
from harvester.policy.interlocks import AcceleratorsReading, AlertMatcher, AlertsReading

R = TypeVar("R", bound=AlertsReading | AcceleratorsReading)
T = TypeVar("T")

BODY_BYTES_MAX = 4 << 20
"""Prometheus answers 1 KiB for a rule and for each of its alerts."""
_PAGE_BYTES_MAX = 1 << 20
_LINES_BYTES_MAX = 256 << 10
"""Lines of dcgm-exporter's page that are parsed: three of 300 bytes for each GPU."""
_MISSED_EVALUATIONS, _EVALUATION_S = 3, 30.0
"""A rule that was not evaluated for so many of its intervals, and for so long, says nothing."""
NOT_ASKED_YET = "not asked yet"
_DCGM = {
    "DCGM_FI_DEV_POWER_USAGE": "power_watts",
    "DCGM_FI_DEV_GPU_TEMP": "temperature_celsius",
    "DCGM_FI_DEV_XID_ERRORS": "xid",
}
_DCGM_LINES = re.compile(rf"^(?:{'|'.join(_DCGM)})\{{.*$", re.MULTILINE)


class _Alert(msgspec.Struct):
    labels: dict[str, str]
    state: Literal["firing", "pending", "inactive"] = "inactive"


class _Rule(msgspec.Struct, rename="camel"):
    name: str
    type: str
    health: str = "unknown"
    last_evaluation: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    labels: dict[str, str] = {}
    alerts: list[_Alert] = []


class _Group(msgspec.Struct):
    rules: list[_Rule]
    interval: float = 0.0


class _Groups(msgspec.Struct):
    groups: list[_Group]


class _Rules(msgspec.Struct):
    status: Literal["success"]
    data: _Groups


class _AlertStatus(msgspec.Struct):
    state: str


class _Raised(msgspec.Struct):
    labels: dict[str, str]
    status: _AlertStatus


def read_rules(body: bytes, date: str = "") -> AlertsReading:
    """Prometheus's /api/v1/rules; `date`: when it answered, by its own clock. Raises as msgspec
    does, and ValueError for a date that is none."""
    groups = msgspec.json.decode(body, type=_Rules).data.groups
    rules = [rule for group in groups for rule in group.rules if rule.type == "alerting"]
    sick = {rule.name for rule in rules if rule.health != "ok"}
    if date:
        # Where evaluation stands still, its last result goes on with the health of then.
        answered = parsedate_to_datetime(date).replace(tzinfo=UTC)  # HTTP has no other zone.
        sick |= {
            rule.name for group in groups for rule in group.rules if _late(rule, group, answered)
        }
    return AlertsReading(
        firing=tuple(
            {**alert.labels, "alertname": rule.name}
            for rule in rules
            for alert in rule.alerts
            if alert.state == "firing"
        ),
        rules=frozenset(rule.name for rule in rules) - sick,
    )


def _late(rule: _Rule, group: _Group, answered: datetime) -> bool:
    if rule.last_evaluation is None or not group.interval:
        return False
    patience_s = max(_MISSED_EVALUATIONS * group.interval, _EVALUATION_S)
    return (answered - rule.last_evaluation).total_seconds() > patience_s


def read_raised(body: bytes, _date: str = "") -> AlertsReading:
    """Alertmanager's /api/v2/alerts. Raises as msgspec does."""
    raised = msgspec.json.decode(body, type=list[_Raised])
    return AlertsReading(
        firing=tuple(each.labels for each in raised if each.status.state == "active")
    )


def read_dcgm(body: bytes, _date: str = "") -> AcceleratorsReading:
    """dcgm-exporter's page. Raises ValueError for lines that are no samples."""
    lines = "\n".join(_DCGM_LINES.findall(body.decode(errors="replace")))
    if len(lines) > _LINES_BYTES_MAX:
        raise ValueError("too many GPUs")
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            gpu, field = found.setdefault(sample.labels.get("UUID", ""), {}), _DCGM[sample.name]
            # Slices of a MIG GPU repeat its values: the largest counts, but one NaN makes it NaN.
            gpu[field] = max(gpu.get(field, sample.value), sample.value)
            if math.isnan(sample.value):
                gpu[field] = math.nan
    found.pop("", None)
    return AcceleratorsReading(
        accelerators=tuple(Accelerator(uuid=uuid, **values) for uuid, values in found.items())
    )


class Probe(Generic[R]):
    """Asks a source again and again. `name` is what a fault begins with, and `kind` its reading."""

    def __init__(
        self,
        name: str,
        kind: type[R],
        read: Callable[[aiohttp.ClientSession], Awaitable[R]],
        *,
        period_s: float,
        clock: Clock,
    ) -> None:
        self._name = name
        self._kind = kind
        self._read = read
        self._period_s = period_s
        self._clock = clock
        self.reading = kind(fault=NOT_ASKED_YET, taken_at_s=clock.now())

    async def run(self) -> None:
        """Probes until the task is cancelled."""
        async with aiohttp.ClientSession() as session:
            while True:
                await self.ask(session)
                await asyncio.sleep(self._period_s)

    async def ask(self, session: aiohttp.ClientSession) -> None:
        """Take one reading. Raises nothing."""
        try:
            reading = await self._read(session)
        except Exception as error:  # A parser's too: without a probe its order would stay for good.
            reading = self._kind(fault=f"{self._name}: {reason_of(error)}")
        self.reading = msgspec.structs.replace(reading, taken_at_s=self._clock.now())


def alerts_probe(config: AlertsConfig, *, clock: Clock) -> Probe[AlertsReading]:
    path = "/api/v1/rules?type=alert"
    decode: Callable[[bytes, str], AlertsReading] = read_rules
    if config.server == "alertmanager":
        chosen = {"active": "true", "silenced": "false", "inhibited": "false"}
        path, decode = f"/api/v2/alerts?{urlencode(chosen)}", read_raised
    chosen_alerts = (*config.matchers, AlertMatcher(name=config.watchdog))

    def read(body: bytes, date: str) -> AlertsReading:
        # Thousands of alerts may fire; the beat looks at one of each that is asked for.
        found = decode(body, date)
        first = (next(filter(each.matches, found.firing), None) for each in chosen_alerts)
        return msgspec.structs.replace(found, firing=tuple(filter(None, first)))

    async def ask(session: aiohttp.ClientSession) -> AlertsReading:
        peer = Peer(session, config.url, config)
        return await _fetched(peer, path, read, config.timeout_s, BODY_BYTES_MAX)

    return Probe(config.url, AlertsReading, ask, period_s=config.period_s, clock=clock)


def dcgm_probe(config: AcceleratorsConfig, *, clock: Clock) -> Probe[AcceleratorsReading]:
    page = urlsplit(config.url)
    url, path = f"{page.scheme}://{page.netloc}", page.path or "/metrics"

    async def ask(session: aiohttp.ClientSession) -> AcceleratorsReading:
        peer = Peer(session, url, config)
        return await _fetched(peer, path, read_dcgm, config.timeout_s, _PAGE_BYTES_MAX)

    return Probe(url, AcceleratorsReading, ask, period_s=config.period_s, clock=clock)


def nvml_probe(
    read: Callable[[], tuple[Accelerator, ...]], *, period_s: float, clock: Clock
) -> Probe[AcceleratorsReading]:
    """Reads in a thread. No reading begins while another hangs, so the last result grows old."""

    async def ask(_session: aiohttp.ClientSession) -> AcceleratorsReading:
        return AcceleratorsReading(accelerators=await _in_daemon(read))

    return Probe("nvml", AcceleratorsReading, ask, period_s=period_s, clock=clock)


async def _fetched(
    peer: Peer, path: str, read: Callable[[bytes, str], R], timeout_s: float, most_bytes: int
) -> R:
    """The reading of a whole body. Raises as `read` does, and Exhausted for any status but 200 and
    for a body over the limit."""
    async with peer.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as reply:
        if reply.status != 200:
            raise Exhausted(f"HTTP {reply.status}")
        body = await body_of(reply, most_bytes=most_bytes + 1)
        date = reply.headers.get("Date", "")
    if len(body) > most_bytes:
        raise Exhausted(f"more than {most_bytes} bytes")
    # In a thread: the beats of all slots go on meanwhile.
    return await asyncio.to_thread(read, body, date)


async def _in_daemon(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, in a daemon thread: a process that ends does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, fault = None, None
        try:
            result = work()
        except Exception as error:
            fault = error
        with suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=run, name="rosemux-nvml", daemon=True).start()
    return await done
