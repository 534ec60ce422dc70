"""A job's connection to its gateway: one session, and calls that are repeated."""

from collections.abc import Collection
from random import Random
from typing import TypeVar

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import UNDECODABLE, ConfigError, PeerProtocolError
from harvester.contracts.ids import JobId, checked_name
from harvester.contracts.wire.leases import JOB_HEADER
from harvester.platform.backoff import Backoff, RetryLimits
from harvester.platform.http_kit import PASSING, posted
from harvester.platform.peer import Peer
from harvester.platform.tls import Credentials

T = TypeVar("T")
_SWITCH_S = 450.0
"""Every dedicated engine loads the version meanwhile: by default within 420 s."""


class GatewayConnection:
    """Opens its session at the first call, in the event loop of that call."""

    def __init__(
        self, url: str, job: str, credentials: Credentials, *, retries: RetryLimits, clock: Clock
    ) -> None:
        """Raises ConfigError for what can never be called."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"gateway {url!r}: give a URL as http://127.0.0.1:8300")
        credentials.check(url)
        self.job = JobId(checked_name(job, what="job"))
        self.headers = {"Content-Type": "application/json", JOB_HEADER: self.job}
        self.retries, self.clock = retries, clock
        self._url, self._credentials = url, credentials
        self._session: aiohttp.ClientSession | None = None
        self._peer: Peer | None = None

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The gateway decides what waits.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
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
        """The reply to a POST of the message. Raises as `posted`, and PeerProtocolError for a reply
        that is no `of`."""
        body = b"" if message is None else msgspec.json.encode(message)
        backoff = Backoff(self.retries, self.clock, random=Random(body))
        content = await posted(
            self.peer(),
            path,
            body,
            backoff,
            headers=self.headers,
            timeout_s=_SWITCH_S,
            passing=passing,
        )
        return decoded(content, of)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def decoded(body: bytes, of: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=of)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"the gateway's reply is not a {of.__name__}: {error}") from error
