"""Identity of an engine by its own report: its process, its abilities, its workers' weights.

An engine with coserve's IdentityMiddleware reports it in a route of its own and with every reply.
Stock vLLM has neither: its start time, from its metrics, identifies its process, and it reports
only its model's name and context.
"""

import errno
import re
from enum import IntEnum
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.ids import SlotId
from harvester.contracts.wire.engines import (
    ENGINE_ROUTE,
    EngineDescription,
    EngineReport,
    WorkerMethod,
)
from harvester.platform.http_kit import body_of
from harvester.platform.peer import Peer

_MOST_BYTES = 8 << 20
_MOST_IDENTITY_CHARS = 200
_COUNTED = re.compile(r"[^.\s]+\.\d+")
_STARTED = b"process_start_time_seconds "
_FENCED = "/v1/completions/derender"
"""A route at which every guest refuses a request without its lease's epoch, and at which no engine
steps; an engine proxy passes it on."""

T = TypeVar("T")


class Change(IntEnum):
    """An engine as it is now, compared with the engine to which the version was applied."""

    NONE = 0
    PROCESS = 1
    """The engine's process has died; another one answers, or no process."""
    WEIGHTS = 2
    """The same process, with weights that another caller has set."""
    UNKNOWN = 3
    """No answer: the engine may have died, hang, or be cut off."""


def change_between(given: str, reported: str) -> Change:
    if given == reported:
        return Change.NONE
    counted = _COUNTED.fullmatch(given) and _COUNTED.fullmatch(reported)
    same = counted and given.rpartition(".")[0] == reported.rpartition(".")[0]
    return Change.WEIGHTS if same else Change.PROCESS


def change_shown_by(error: Exception) -> Change:
    """Change that a failed call shows of the engine's process."""
    refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
    return Change.PROCESS if refused else Change.UNKNOWN


class _StockModel(msgspec.Struct, frozen=True):
    id: str = ""
    max_model_len: int | None = None


class _StockModels(msgspec.Struct, frozen=True):
    data: tuple[_StockModel, ...] = ()


class HeldWeights(msgspec.Struct, frozen=True):
    """Weights that one worker reports; empty before its first update."""

    store: str = ""
    version: int = 0
    state_hash: str = ""
    adapters: dict[str, "HeldWeights"] = {}
    in_doubt: bool = False
    """Known neither as a version nor as the weights that it started with."""

    def of(self, adapter: str | None) -> "HeldWeights":
        return self if adapter is None else self.adapters.get(adapter, HeldWeights())


class WorkerReplies(msgspec.Struct, Generic[T], frozen=True):
    """Reply of `/collective_rpc`: one for each worker."""

    results: tuple[T, ...]


_REPORT = msgspec.json.Decoder(EngineReport)
_MODELS = msgspec.json.Decoder(_StockModels)
_HELD = msgspec.json.Decoder(WorkerReplies[HeldWeights])


class IdentityClient:
    """Raises PeerProtocolError for an invalid answer, and aiohttp's errors."""

    def __init__(self, peer: Peer, *, timeout_s: float) -> None:
        self._peer = peer
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def report(self) -> tuple[EngineReport, bool]:
        """The report, and whether every reply carries the identity. A stock engine may have none:
        ""."""
        status, raw = await self.get(ENGINE_ROUTE)
        if status == 200:
            return _checked(_decoded(raw, _REPORT, ENGINE_ROUTE)), True
        if status != 404:
            raise PeerProtocolError(f"{ENGINE_ROUTE}: HTTP {status}")
        description = await self._stock_description()
        return EngineReport(identity=await self.start_time(), description=description), False

    async def guest_fault(self, slot: SlotId, report: EngineReport, *, stamped: bool) -> str:
        """Why the engine that reported is not the slot's guest; "" if it is. A guest that names no
        slot proves by its refusal that it is a guest; the lease's epoch tells its slot."""
        at = "at this URL: check engine_url"
        if not stamped:
            return f"no RoseMux guest {at}"
        if report.slot:
            # Where two agents name a slot alike, the gateway knows it as AGENT.SLOT.
            same = slot == report.slot or slot.endswith(f".{report.slot}")
            return "" if same else f"the guest of slot {report.slot[:64]!r} {at}"
        async with self._peer.post(_FENCED, json={}, timeout=self._timeout) as response:
            if response.status == 503:
                return "its guest has no grant, or cannot answer: HTTP 503"
            return "" if response.status == 409 else f"an engine that is no guest {at}"

    async def start_time(self) -> str:
        """Start time of a stock engine's process, from its metrics; "" without it."""
        # vLLM writes its whole page in the process that answers requests: the one series first.
        for path in ("/metrics/?name[]=process_start_time_seconds", "/metrics"):
            status, raw = await self.get(path)
            for line in raw.splitlines() if status == 200 else ():
                if line.startswith(_STARTED):
                    return f"started {line[len(_STARTED) :].decode(errors='replace')[:40]}"
        return ""

    async def held(self) -> tuple[HeldWeights, ...]:
        """Weights held by each worker."""
        return await self.of_workers({"method": WorkerMethod.WEIGHTS}, _HELD)

    async def of_workers(
        self, call: dict[str, Any], decoder: msgspec.json.Decoder[WorkerReplies[T]]
    ) -> tuple[T, ...]:
        """Every worker's reply. The caller bounds the wait: workers answer between steps."""
        route = "/collective_rpc"
        async with self._peer.post(route, json=call) as response:
            raw = await body_of(response, most_bytes=_MOST_BYTES)
            if response.status != 200:
                raise PeerProtocolError(f"{route}: HTTP {response.status}")
        return _decoded(raw, decoder, route).results

    async def _stock_description(self) -> EngineDescription:
        status, raw = await self.get("/v1/models")
        models = _decoded(raw, _MODELS, "/v1/models").data if status == 200 else ()
        if not models:
            return EngineDescription()
        # The first entry is the model itself, the others are adapters.
        return EngineDescription(
            model=models[0].id[:200], context_tokens=models[0].max_model_len or 0
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self._peer.get(path, timeout=self._timeout) as response:
            return response.status, await body_of(response, most_bytes=_MOST_BYTES)


def _checked(report: EngineReport) -> EngineReport:
    """Checks the identity, which goes into a header of every request."""
    given = report.identity
    if len(given) > _MOST_IDENTITY_CHARS or not (given.isascii() and given.isprintable()):
        raise PeerProtocolError(
            f"{ENGINE_ROUTE}: identity {given[:40]!r}: use at most {_MOST_IDENTITY_CHARS} "
            "printable ASCII characters"
        )
    return report


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[T], route: str) -> T:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"{route}: {error}") from error
