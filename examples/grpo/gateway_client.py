"""The job's side of the gateway's data route: one generation, one version announcement.

Retries what may pass by itself (409, 503, broken connections) on a bounded schedule under the same
request id. Knows nothing of tasks and trajectories.
"""

import asyncio
from math import inf
from random import Random
from typing import TypeVar

import aiohttp
import msgspec

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, TrajectoryId
from harvester.contracts.wire.leases import JOB_HEADER, SESSION_HEADER
from harvester.contracts.wire.rollouts import (
    Choice,
    GenerateReply,
    GenerateRequest,
    PublishedVersion,
    VersionSwitched,
)
from harvester.platform.backoff import Backoff, RetryLimits, retry_after_s
from harvester.platform.http_kit import body_of

_T = TypeVar("_T")
_PASSING = frozenset({409, 429, 500, 502, 503, 504})
_REPLY_MAX_BYTES = 1 << 20
_GENERATE_TIMEOUT_S = 120.0
_SWITCH_TIMEOUT_S = 120.0
_RETRIES = RetryLimits(give_up_s=inf, attempts_max=60, wait_max_s=1.0)
"""About a minute of pauses: longer than an engine's version switch or restart."""
_RETRY_AFTER_MAX_S = 0.5
"""The gateway asks for whole seconds; a place is often free sooner."""


class GatewayClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        url: str,
        job: JobId,
        retries: RetryLimits = _RETRIES,
    ) -> None:
        """`session` must not cap its connections: the gateway decides what waits."""
        self._session = session
        self._url = url.rstrip("/")
        self._job = job
        self._retries = retries

    async def generate(self, request: GenerateRequest, trajectory: TrajectoryId) -> Choice:
        """One sample. Raises Exhausted after the last retry, PeerProtocolError on nonsense."""
        body = await self._post(
            "/inference/v1/generate",
            msgspec.json.encode(request),
            timeout_s=_GENERATE_TIMEOUT_S,
            headers={SESSION_HEADER: trajectory, JOB_HEADER: self._job},
            random=Random(request.request_id),
        )
        reply = _decoded(body, GenerateReply)
        if reply.request_id != request.request_id or len(reply.choices) != 1:
            raise PeerProtocolError(
                f"the gateway answered {request.request_id!r} with {reply.request_id!r} "
                f"and {len(reply.choices)} choices"
            )
        return reply.choices[0]

    async def announce(self, published: PublishedVersion) -> VersionSwitched:
        """Returns when every dedicated engine serves the version."""
        body = await self._post(
            f"/v1/jobs/{self._job}/versions",
            msgspec.json.encode(published),
            timeout_s=_SWITCH_TIMEOUT_S,
            headers={},
            random=Random(published.version),
        )
        return _decoded(body, VersionSwitched)

    async def _post(
        self, path: str, body: bytes, *, timeout_s: float, headers: dict[str, str], random: Random
    ) -> bytes:
        backoff = Backoff(self._retries, MonotonicClock(), random=random)
        while True:
            asked_s = 0.0
            try:
                async with self._session.post(
                    self._url + path,
                    data=body,
                    headers={"Content-Type": "application/json", **headers},
                    timeout=aiohttp.ClientTimeout(total=timeout_s),
                ) as response:
                    content = await body_of(response, most_bytes=_REPLY_MAX_BYTES)
                    if response.status == 200:
                        return content
                    problem = f"{response.status}: {content[:300].decode(errors='replace')}"
                    if response.status not in _PASSING:
                        raise PeerProtocolError(f"POST {path} was refused with {problem}")
                    asked_s = retry_after_s(
                        response.headers.get("Retry-After"), most_s=_RETRY_AFTER_MAX_S
                    )
            except TimeoutError as error:
                raise Exhausted(f"POST {path} had no answer within {timeout_s:.0f} s") from error
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            wait_s = backoff.wait_s(retry_after_s=asked_s)
            if wait_s is None:
                raise backoff.exhausted(f"POST {path}: {problem}")
            await asyncio.sleep(wait_s)


def _decoded(body: bytes, of: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=of)
    except msgspec.DecodeError as error:
        raise PeerProtocolError(f"the gateway's reply is not a {of.__name__}: {error}") from error
