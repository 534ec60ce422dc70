"""A job's client: turns through the gateway, or on dedicated engines while it is silent."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import Self, Unpack

import aiohttp
import msgspec
from pydantic import ValidationError

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, PeerProtocolError, Stale
from harvester.contracts.wire.rollouts import Choice, VersionSwitched
from harvester.platform.backoff import RetryLimits
from harvester.platform.blocking_peer import base_url
from harvester.platform.http_kit import PASSING, body_of
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.client.dedicated_turns import DedicatedTurns
from scheduler.client.gateway_connection import GatewayConnection, decoded
from scheduler.client.gateway_turn import GatewayTurn
from scheduler.client.gateway_watch import GatewayWatch
from scheduler.client.turn_attempts import ERROR_MAX_BYTES, TurnAttempts
from scheduler.client.turn_request import (
    Sampling,
    TurnOptions,
    announcement_of,
    request_of,
    trajectory_of,
)
from scheduler.gateway.abort_routes import Aborted, AbortRequests, FinishSession
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger

RETRIES = RetryLimits(give_up_s=inf, attempts_max=60, wait_max_s=1.0, progress_bytes=1)
"""About a minute of pauses: longer than an engine's version switch or restart. Each received token
restarts the count. Tries that the gateway holds for its `queue_s` add 60 of those; `give_up_s`
bounds the time without a token."""
_HUNG_S = 60.0
_ABORT_S = 5.0
"""Longest wait for the gateway's tokens of a turn that is aborted."""


class _Announcements:
    """Open announcements of a job's versions: a later version ends the calls of earlier ones."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, int] = {}

    @asynccontextmanager
    async def announcing(self, version: int) -> AsyncIterator[None]:
        """Around the call of one version. Raises Stale once a later version is announced: sent
        again after that, this one would be taken for another run's."""
        later = f"version {version} was overtaken by the announcement of a later one"
        if max(self._open.values(), default=0) > version:
            raise Stale(later)
        for each in [each for each, other in self._open.items() if other < version]:
            del self._open[each]  # A call that ends already cannot be ended again.
            each.reschedule(0.0)
        cut = asyncio.timeout(None)
        try:
            async with cut:
                self._open[cut] = version
                yield
        except TimeoutError as error:
            raise Stale(later) from error
        finally:
            self._open.pop(cut, None)


class AsyncRolloutClient:
    """Turns of one job. Use as `async with AsyncRolloutClient(url, job) as client`, in one event
    loop, or await `close` at the end: the log has a client that was dropped without it.

    `token_file`, `ca_file`, `cert_file`, `key_file`: the tenant's bearer token, certificates to
    trust besides the system's, and a client certificate; read again when they change. `fallback`:
    serve turns on the job's dedicated engines, as the gateway last listed them, while the gateway
    has not answered for `silence_s`; replies are then streamed, so that no received token is lost.
    Without it turns wait for the gateway: the log warns after `silence_s` without an answer of its
    `/healthz`, and turns are sent again after a minute. `engines`: the same files for those
    engines, where they are behind engine proxies; a token for data is enough. `dedicated`: URLs of
    engines by name that hold the job's weights and no others, to fall back on while the gateway has
    never answered.
    """

    def __init__(
        self,
        gateway: str,
        job: str,
        *,
        token_file: Path | str | None = None,
        ca_file: Path | str | None = None,
        cert_file: Path | str | None = None,
        key_file: Path | str | None = None,
        engines: Credentials = NO_CREDENTIALS,
        dedicated: Mapping[str, str] | None = None,
        fallback: bool = True,
        silence_s: float = 2.0,
        retries: RetryLimits = RETRIES,
        clock: Clock | None = None,
    ) -> None:
        given = {"token_file": token_file, "ca_file": ca_file}
        pair = {"cert_file": cert_file, "key_file": key_file}
        try:
            credentials = Credentials.model_validate(given | pair)
        except ValidationError as error:
            raise ConfigError(str(error.errors()[0]["msg"])) from error
        self._gateway = GatewayConnection(
            gateway, job, credentials, retries=retries, clock=clock or MonotonicClock()
        )
        for name, value, kind in (
            ("engines", engines, Credentials),
            ("dedicated", dedicated or {}, Mapping),
            ("fallback", fallback, bool),
            ("silence_s", silence_s, int | float),
            ("retries", retries, RetryLimits),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"{name}: {value!r} is of another type than the signature's")
        if not 0 < silence_s < inf:
            raise ConfigError(f"silence_s: give seconds above 0, not {silence_s!r}")
        for name, url in (dedicated or {}).items():
            base_url(url, name=f"dedicated: {name}", example="http://127.0.0.1:8000")
        engines.check()
        self._fallback = fallback
        self._ledger = TurnLedger(self._gateway.job)
        self._announcements = _Announcements()
        self._cuts: dict[str, tuple[asyncio.Timeout, GatewayTurn | None]] = {}
        """Timeouts of open turns, each with its turn if the gateway alone has the tokens."""
        self._ending: set[asyncio.Task[None]] = set()
        self._watch = GatewayWatch(
            self._gateway,
            silence_s=silence_s if fallback else max(silence_s, _HUNG_S),
            warn_s=silence_s,
            engines=dedicated or {},
        )
        self._dedicated = DedicatedTurns(self._gateway, self._watch, engines)
        direct = self._dedicated if fallback else None
        self._attempts = TurnAttempts(self._gateway, self._watch, direct, silence_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for ending in self._ending:
            ending.cancel()
        self._watch.close()
        self._dedicated.forget()
        # Connections to engines close in the event loop's next turn.
        await asyncio.sleep(0)
        await self._gateway.close()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Choice:
        """One turn: sampled ids, their log-probabilities, and the spans that say which engine and
        version made them.

        `token_ids` and numbers may be NumPy's or PyTorch's. An `abort` keeps the tokens so far;
        another turn goes on from them. Raises ConfigError with the field and its value for a
        request that is wrong, Stale where no engine serves its older version any more,
        PeerProtocolError for one that is refused for another reason, Exhausted where the retries
        end before the first token.
        """
        turn, body = self._opened(token_ids, sampling, options, stream=self._fallback)
        await self._serve(turn, body, lambda: None)
        return turn.choice()

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Choice, None]:
        """Like `generate`: yields new tokens as they come, each choice with the spans that it
        touches; the last has a finish reason and all spans. Leaving it early ends the turn."""
        turn, body = self._opened(token_ids, sampling, options, stream=True)
        more, sent = asyncio.Event(), 0
        serving = asyncio.ensure_future(self._serve(turn, body, more.set))
        serving.add_done_callback(lambda _: more.set())
        try:
            while not serving.done():
                await more.wait()
                more.clear()
                if not turn.ended and len(turn.token_ids) > sent:
                    choice = turn.choice(start=sent)
                    sent += len(choice.token_ids)
                    yield choice
            await serving
            yield msgspec.structs.replace(turn.choice(start=sent), spans=turn.choice().spans)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def abort(self, request_id: str | None = None) -> None:
        """Ends one turn, or all: each call returns what it has, with the finish reason `abort`.
        Tokens of a reply that is not streamed are with the gateway, which ends the turn."""
        for name in tuple(self._cuts) if request_id is None else [request_id]:
            cut, whole = self._cuts.pop(name, (None, None))
            if whole is not None and cut is not None:
                ending = asyncio.ensure_future(self._end_at_gateway(whole.request_id, cut))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            elif cut is not None:
                cut.reschedule(0.0)

    async def _end_at_gateway(self, request_id: str, cut: asyncio.Timeout) -> None:
        """Cuts the call off if it has no reply in time, or the gateway no turn."""
        until_s, ended = asyncio.get_running_loop().time() + _ABORT_S, 0
        with suppress(aiohttp.ClientError, OSError, PeerProtocolError, ConfigError):
            async with self._gateway.peer().post(
                "/inference/v1/abort_requests",
                data=msgspec.json.encode(AbortRequests(request_ids=(request_id,))),
                headers=self._gateway.headers,
                timeout=aiohttp.ClientTimeout(total=_ABORT_S),
            ) as reply:
                ended = decoded(await body_of(reply, most_bytes=ERROR_MAX_BYTES), Aborted).aborted
        with suppress(RuntimeError):  # The call has returned.
            cut.reschedule(until_s if ended else 0.0)

    async def announce(
        self, version: int, store: str, *, state_hash: str = "", cut_open_turns: bool = False
    ) -> VersionSwitched:
        """A version was published to `store`; returns when every dedicated engine serves it, or at
        once, with `active` false, where they serve another job. `state_hash`: its publisher's, so
        that no other run's version is taken for it.

        Where engines cannot load it, as from a store that is not there, the call is repeated for
        450 s; the log has the gateway's reason at once, and so has the Exhausted in the end. Raises
        Stale once a later version is announced: sent again after that, this one would be taken for
        another run's.
        """
        published = announcement_of(
            version=version, store=store, state_hash=state_hash, cut_open_turns=cut_open_turns
        )
        path = f"/v1/jobs/{self._gateway.job}/versions"
        async with self._announcements.announcing(published.version):
            # A number below the job's, or of another run, is refused for good.
            return await self._gateway.call(
                path, published, VersionSwitched, passing=PASSING - {409}
            )

    async def activate(self) -> VersionSwitched:
        """The engines serve this job, with its newest version, on return."""
        return await self._gateway.call(
            f"/v1/jobs/{self._gateway.job}/activate", None, VersionSwitched
        )

    async def end_trajectory(self, trajectory: str) -> int:
        """The trajectory takes no more turns: its prefix need not be kept. Returns the number of
        its turns that were open, which end."""
        ended = FinishSession(trajectory_of(trajectory))
        path = f"/jobs/{self._gateway.job}/finish_session"
        return (await self._gateway.call(path, ended, Aborted)).aborted

    def _opened(
        self, token_ids: Sequence[int], sampling: Sampling, options: TurnOptions, *, stream: bool
    ) -> tuple[Turn, bytes]:
        request, trajectory, body = request_of(token_ids, sampling, options, stream=stream)
        turn = self._ledger.open(request, trajectory=trajectory)
        if turn is None:
            raise ConfigError(
                f"request_id {request.request_id!r} is open in this client; use a new id"
            )
        return turn, body

    async def _serve(self, turn: Turn, body: bytes, on_tokens: Callable[[], None]) -> None:
        name, cut = turn.request.request_id, asyncio.timeout(None)
        at_gateway = GatewayTurn(turn, body)
        self._cuts[name] = cut, None if turn.request.stream else at_gateway
        try:
            with self._watch.watching(), suppress(TimeoutError):
                async with cut:
                    await self._attempts.serve(turn, at_gateway, on_tokens)
        finally:
            self._cuts.pop(name, None)
            # Ended by `abort`, or by its caller.
            self._ledger.close(turn)
