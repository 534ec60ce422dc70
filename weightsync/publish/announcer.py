"""Announces the newest version to gateways on a separate thread: no publish waits or fails.

A newer version takes the place of one that is still being announced.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from random import Random

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted
from harvester.contracts.ids import WeightVersion, checked_name, is_name
from harvester.contracts.wire.rollouts import AnnouncedVersion, AnnounceState, VersionSwitched
from harvester.platform.backoff import Backoff, RetryLimits
from harvester.platform.blocking_peer import base_url
from harvester.platform.http_kit import PASSING, HttpRefusal, posted
from harvester.platform.loop_thread import LoopThread
from harvester.platform.peer import Peer
from harvester.platform.tls import Credentials

_LOG = logging.getLogger(__name__)
_SWITCH_S = 450.0
"""A gateway answers when every dedicated engine serves it: by default within 420 s."""
_EXAMPLE = "http://127.0.0.1:8300/v1/jobs/JOB"
_NO_ANSWER = "no answer yet"
_ONCE = RetryLimits(attempts_max=1)
_LIMITS = RetryLimits(give_up_s=inf, attempts_max=inf, first_wait_s=0.1, wait_max_s=10.0)


class Announcer:
    def __init__(
        self, jobs: Sequence[str], *, store: str, credentials: Credentials, clock: Clock
    ) -> None:
        """`jobs`: URLs of the job at each gateway, `http://127.0.0.1:8300/v1/jobs/job-a`. `store`:
        its name under the engines' ROSEMUX_WEIGHT_ROOT. Raises ConfigError."""
        self._jobs = tuple(base_url(url, name="announce:", example=_EXAMPLE) for url in jobs)
        for url in self._jobs:
            before, _, job = url.rpartition("/")
            if not before.endswith("/v1/jobs") or not is_name(job):
                raise ConfigError(f"announce: {url!r} is no job's URL; give one as {_EXAMPLE}")
        self._store = checked_name(store, what="store", error=ConfigError)
        credentials.check(*self._jobs)
        self._credentials = credentials
        self._clock = clock
        self._loop = LoopThread("weight-announce")
        self._task: asyncio.Task[None] | None = None
        self._state = AnnounceState.PENDING
        self._newest: WeightVersion | None = None
        self.faults: dict[str, str] = {}
        """Why gateways do not have the newest version, by the job's URL at each."""
        self._announced = threading.Event()
        self._announced.set()
        self._lock = threading.Lock()
        """Held to compare a version with the newest one and to say that it is announced."""

    def announce(self, version: WeightVersion, state_hash: str) -> None:
        with self._lock:
            self._newest = version
            self._announced.clear()
        self.faults = dict.fromkeys(self._jobs, _NO_ANSWER)
        self._loop.call(self._begin, version, state_hash)

    def wait(self, timeout_s: float) -> AnnounceState:
        """The newest version's state once every gateway has it or refuses it, or after this
        time."""
        return self._state if self._announced.wait(timeout_s) else AnnounceState.PENDING

    def close(self, timeout_s: float) -> None:
        if not self.wait(timeout_s) and self._newest is not None:
            why = "; ".join(f"{url}: {fault}" for url, fault in self.faults.copy().items())
            _LOG.warning("the newest version is not announced: %s", why)
        self._loop.close()

    def _begin(self, version: WeightVersion, state_hash: str) -> None:
        if self._task is not None:
            self._task.cancel()
            self.faults = dict.fromkeys(self._jobs, _NO_ANSWER)
        self._task = asyncio.ensure_future(self._tell_all(version, state_hash))

    async def _tell_all(self, version: WeightVersion, state_hash: str) -> None:
        published = AnnouncedVersion(version=version, store=self._store, state_hash=state_hash)
        body = msgspec.json.encode(published)
        async with aiohttp.ClientSession() as session:
            peers = [Peer(session, url, self._credentials) for url in self._jobs]
            states = await asyncio.gather(*(self._tell(peer, body) for peer in peers))
        worst = (AnnounceState.PENDING, AnnounceState.NOT_ACTIVE, AnnounceState.SERVED)
        with self._lock:
            if version == self._newest:
                self._state = min(states, key=worst.index)
                self._announced.set()

    async def _tell(self, peer: Peer, body: bytes) -> AnnounceState:
        url = peer.url
        backoff = Backoff(_LIMITS, self._clock, random=Random(body))
        warned = False
        while True:
            try:
                reply = await posted(
                    peer,
                    "/versions",
                    body,
                    Backoff(_ONCE, self._clock),
                    headers={"Content-Type": "application/json"},
                    timeout_s=_SWITCH_S,
                    # A number below the job's, or of another run, is refused for good.
                    passing=PASSING - {409},
                )
            except HttpRefusal as error:
                self.faults[url] = str(error)
                _LOG.error("a version cannot be announced to %s: %s", url, error)
                return AnnounceState.PENDING
            except Exhausted as error:
                self.faults[url] = str(error)
                if not warned:
                    _LOG.warning("a version is announced again until %s accepts it: %s", url, error)
                warned = True
            else:
                del self.faults[url]
                with suppress(*UNDECODABLE):  # The gateway has accepted the version anyway.
                    if not msgspec.json.decode(reply, type=VersionSwitched).active:
                        return AnnounceState.NOT_ACTIVE
                return AnnounceState.SERVED
            await asyncio.sleep(backoff.wait_s() or _LIMITS.wait_max_s)
