"""The client of one node agent's lease routes. Every call may be repeated without harm."""

import logging
from contextlib import suppress
from typing import TypeVar

import aiohttp
import msgspec
from msgspec.structs import replace

from harvester.contracts.errors import UNDECODABLE, Exhausted, PeerProtocolError, reason_of
from harvester.contracts.ids import Epoch, LeaseId, NodeId, SlotId, checked_name
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import (
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotOffer,
    SlotOffers,
)
from harvester.contracts.wire.stops import Stop, StopReply, StopRequest
from harvester.platform.http_kit import body_of
from harvester.platform.peer import Peer
from harvester.platform.tls import NO_CREDENTIALS, Credentials

MAX_REPLY_BYTES = 1 << 20
_TRIES = 2

_log = logging.getLogger(__name__)


class _RawOffers(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    slots: tuple[msgspec.Raw, ...]
    restart_needed: tuple[str, ...] = ()
    stops: tuple[msgspec.Raw, ...] = ()


T = TypeVar("T")
_OFFERS = msgspec.json.Decoder(_RawOffers)
_OFFER = msgspec.json.Decoder(SlotOffer)
_TAKEN: msgspec.json.Decoder[LeaseGranted | LeaseRefused] = msgspec.json.Decoder(
    LeaseGranted | LeaseRefused
)
_RENEWED: msgspec.json.Decoder[LeaseGranted | LeaseEnded] = msgspec.json.Decoder(
    LeaseGranted | LeaseEnded
)
_ENDED = msgspec.json.Decoder(LeaseEnded)
_STOP = msgspec.json.Decoder(Stop)
_ORDERED = msgspec.json.Decoder(StopReply)


class AgentClient:
    """Each call tries twice: a lost request or a lost reply costs one repetition.

    Raises Exhausted if the agent does not answer, PeerProtocolError if it answers nonsense.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        timeout_s: float,
        credentials: Credentials = NO_CREDENTIALS,
        prefix: str = "",
    ) -> None:
        """Agents do not know each other: `prefix` distinguishes this agent's slots from another
        agent's of equal name. Raises ConfigError for credentials that cannot be used."""
        self._peer = Peer(session, url, credentials)
        self._prefix = prefix
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._faults: list[str] = []

    async def offers(self) -> SlotOffers:
        """The agent's offers and stops; entries that cannot be decoded are left out."""
        reply = await self._call("GET", "/v1/slots", None, _OFFERS)
        slots, stops, faults = [], [], []
        for raw in reply.stops:
            # A later agent's kind of order is for its slots' own reports.
            with suppress(*UNDECODABLE):
                stops.append(_STOP.decode(raw))
        for raw in reply.slots:
            try:
                offer = _OFFER.decode(raw)
                slots.append(replace(offer, slot=self._known(offer.slot)))
            except (*UNDECODABLE, PeerProtocolError) as error:
                faults.append(f"{error}: {bytes(raw)[:200].decode(errors='replace')}")
        if faults != self._faults:
            self._faults = faults
            for fault in faults:
                _log.warning("agent %s offers a slot that is left out: %s", self._peer.url, fault)
        return SlotOffers(
            node=reply.node,
            slots=tuple(slots),
            restart_needed=reply.restart_needed,
            stops=tuple(stops),
        )

    async def take(self, request: LeaseRequest) -> LeaseGranted | LeaseRefused:
        request = replace(request, slot=SlotId(request.slot.removeprefix(self._prefix)))
        reply = await self._call("POST", "/v1/leases", request, _TAKEN)
        return replace(reply, slot=self._known(reply.slot))

    async def renew(
        self, lease: LeaseId, *, epoch: Epoch, duration_s: float, allotment: Allotment | None = None
    ) -> LeaseGranted | LeaseEnded:
        path = f"/v1/leases/{checked_name(lease, what='lease')}/renew"
        renewal = LeaseRenewal(epoch=epoch, duration_s=duration_s, allotment=allotment)
        reply = await self._call("POST", path, renewal, _RENEWED)
        if isinstance(reply, LeaseEnded):
            return reply
        return replace(reply, slot=self._known(reply.slot))

    async def release(self, lease: LeaseId) -> LeaseEnded:
        path = f"/v1/leases/{checked_name(lease, what='lease')}"
        return await self._call("DELETE", path, None, _ENDED)

    async def order(self, request: StopRequest) -> StopReply:
        return await self._call("POST", "/v1/stops", request, _ORDERED)

    def _known(self, slot: SlotId) -> SlotId:
        """The slot's name at the gateway. Raises PeerProtocolError for an invalid name."""
        return SlotId(checked_name(f"{self._prefix}{slot}", what="slot"))

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, decoder: msgspec.json.Decoder[T]
    ) -> T:
        fault = ""
        data = None if body is None else msgspec.json.encode(body)
        for _ in range(_TRIES):
            try:
                async with self._peer.request(
                    method,
                    path,
                    data=data,
                    headers={"Content-Type": "application/json"},
                    timeout=self._timeout,
                ) as response:
                    raw = await body_of(response, most_bytes=MAX_REPLY_BYTES)
                    status = response.status
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                fault = f"{method} {path}: {reason_of(error)}"
                continue
            try:
                return decoder.decode(raw)
            except UNDECODABLE as error:
                excerpt = raw[:200].decode(errors="replace")
                message = (
                    f"agent {self._peer.url} {method} {path}: HTTP {status}, {error}: {excerpt}"
                )
                raise PeerProtocolError(message) from error
        raise Exhausted(f"agent {self._peer.url} does not answer: {fault}")
