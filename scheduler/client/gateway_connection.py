"""A job's connection to its gateway: one session, and calls that are repeated."""

import logging
import sys
from collections.abc import Collection
from dataclasses import replace
from random import Random
from socket import socket
from typing import TypeVar

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import (
    UNDECODABLE,
    ConfigError,
    PeerProtocolError,
    RoseMuxError,
    Stale,
)
from harvester.contracts.ids import JobId, checked_name
from harvester.contracts.wire.leases import JOB_HEADER
from harvester.platform.backoff import Backoff, RetryLimits
from harvester.platform.blocking_peer import base_url
from harvester.platform.http_kit import PASSING, HttpRefusal, posted, raise_descriptor_limit
from harvester.platform.keep_alive import keep_alive
from harvester.platform.peer import Peer
from harvester.platform.tls import Credentials

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SWITCH_S = 450.0
"""Every dedicated engine loads the version meanwhile: by default within 420 s. A call is also not
repeated for longer."""
_MOST_DESCRIPTORS = 65_536
"""Trainers start processes, which inherit the limit, and some go through all it allows."""
WRONG_CALL = frozenset({400, 401, 403, 404, 413})
"""Statuses by which the gateway says that the caller has to change the call."""


class GatewayConnection:
    """Opens its session at the first call, in the event loop of that call."""

    def __init__(
        self, url: str, job: str, credentials: Credentials, *, retries: RetryLimits, clock: Clock
    ) -> None:
        """Raises ConfigError for what can never be called."""
        url = base_url(url, name="gateway", example="http://127.0.0.1:8300")
        credentials.check(url)
        self.job = JobId(checked_name(job, what="job", error=ConfigError))
        self.headers = {"Content-Type": "application/json", JOB_HEADER: self.job}
        self.retries, self.clock = retries, clock
        self._url, self._credentials = url, credentials
        self._session: aiohttp.ClientSession | None = None
        self._peer: Peer | None = None

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A step may have more turns open at once than shells allow files.
            raise_descriptor_limit(_MOST_DESCRIPTORS)
            connector = aiohttp.TCPConnector(
                limit=0,  # The gateway decides what waits.
                socket_factory=lambda address: keep_alive(socket(*address[:3])),
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def peer(self) -> Peer:
        if self._peer is None:
            self._peer = Peer(self.session(), self._url, self._credentials)
        return self._peer

    async def call(
        self,
        path: str,
        message: msgspec.Struct | None,
        of: type[T],
        *,
        passing: Collection[int] = PASSING,
    ) -> T:
        """The reply to a POST of the message. Raises as `posted`, ConfigError for what the caller
        has to change, and PeerProtocolError for a reply that is no `of`. Each new reason for which
        it is repeated is logged."""
        body = b"" if message is None else msgspec.json.encode(message)
        limits = replace(self.retries, give_up_s=min(self.retries.give_up_s, _SWITCH_S))
        known: set[str] = set()

        def log(why: str) -> None:
            if why not in known:
                _log.warning("%s is tried again for at most %.0f s: %s", path, _SWITCH_S, why)
            known.add(why)

        try:
            content = await posted(
                self.peer(),
                path,
                body,
                Backoff(limits, self.clock, random=Random(body)),
                headers=self.headers,
                timeout_s=_SWITCH_S,
                passing=passing,
                on_repeat=log,
            )
        except HttpRefusal as error:
            raise owned(error) from error
        return decoded(content, of)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def __del__(self) -> None:
        session = getattr(self, "_session", None)  # None too where __init__ raised.
        if session is not None and not session.closed and not sys.is_finalizing():
            # Before aiohttp's lines, which name neither the client nor the remedy.
            _log.warning(
                "a client of job %s was dropped and not closed: use `async with "
                "AsyncRolloutClient(...)`, or await its close()",
                self.job,
            )


def owned(refusal: HttpRefusal, *, wrong: Collection[int] = WRONG_CALL) -> RoseMuxError:
    """The refusal as the error of the side that has to change something: the caller, or else the
    gateway. Stale for a version that is gone."""
    if refusal.status == 410:
        return Stale(str(refusal))
    return ConfigError(str(refusal)) if refusal.status in wrong else refusal


def decoded(body: bytes, of: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=of)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"the gateway's reply is not a {of.__name__}: {error}") from error
