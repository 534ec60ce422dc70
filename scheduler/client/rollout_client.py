"""A job's client: turns through the gateway, or on dedicated engines while it is silent.

Retries passing faults, under one request id, on a bounded schedule. A token that was received once
is part of its turn, whatever fails afterwards.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Self, TypedDict, TypeVar, Unpack
from uuid import uuid4

import aiohttp
import msgspec
from pydantic import ValidationError

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import UNDECODABLE, ConfigError, PeerProtocolError, Stale
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import JobId, WeightVersion, checked_name
from harvester.contracts.wire.leases import JOB_HEADER, SESSION_HEADER
from harvester.contracts.wire.rollouts import (
    GENERATE_ROUTE,
    AnnouncedVersion,
    Choice,
    FinishReason,
    OnInterrupt,
    SamplingParams,
    VersionPin,
    VersionSwitched,
)
from harvester.platform.backoff import Backoff, Interrupted, RetryLimits, retry_after_s
from harvester.platform.http_kit import (
    PASSING,
    RETRY_AFTER_MAX_S,
    HttpRefusal,
    body_of,
    posted,
    refusal_of,
)
from harvester.platform.peer import Peer
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.client.dedicated_turns import DedicatedTurns
from scheduler.client.gateway_turn import GatewayTurn
from scheduler.client.gateway_watch import GatewayWatch
from scheduler.gateway.abort_routes import Aborted, AbortRequests, FinishSession
from scheduler.gateway.engines.stream import EngineChunk, EventStream
from scheduler.gateway.policy.attempt import output_fields
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.requests import checked_trajectory, decode_generate

T = TypeVar("T")
Sampling = SamplingParams | Mapping[str, Any]


class TurnOptions(TypedDict, total=False):
    trajectory: str
    """Turns of a trajectory prefer the engine that holds their prefix; default: the turn's id."""
    weight_version: int | VersionPin | None
    """Exactly this version, or a pin; None takes any that is served. A pin's `wait_s` bounds the
    call's wait for it: at the gateway, and where that has not answered for so long (but at least
    `silence_s`) and no dedicated engine takes the turn."""
    request_id: str
    """A new one by default."""
    priority: int
    cache_salt: str | None
    on_interrupt: OnInterrupt | str | None
    """`return_partial` ends the turn where it would go on elsewhere; None: the job's setting."""
    equal_numerics: bool | str
    """All tokens by engines of one numerics label: the first engine's, or this one."""


_log = logging.getLogger(__name__)

RETRIES = RetryLimits(give_up_s=inf, attempts_max=60, wait_max_s=1.0, progress_bytes=1)
"""About a minute of pauses: longer than an engine's version switch or restart. Each received token
restarts the count. Tries that the gateway holds for its `queue_s` add 60 of those; `give_up_s`
bounds the time without a token."""
_REPLY_MAX_BYTES = 64 << 20
_ERROR_MAX_BYTES = 4096
_HUNG_S = 60.0
_SWITCH_S = 450.0
"""Every dedicated engine loads the version meanwhile: by default within 420 s."""


_ABORT_S = 5.0
"""Longest wait for the gateway's tokens of a turn that is aborted."""
_PIN_S = 60.0
"""Patience with a pin that names none: the gateway's own default."""


class _PinUnmet(Interrupted):
    """The gateway has held the turn for its patience; repeated while that lasts."""


class AsyncRolloutClient:
    """Turns of one job. Use as `async with AsyncRolloutClient(url, job) as client`, in one event
    loop.

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
        if not gateway.startswith(("http://", "https://")):
            raise ConfigError(f"gateway {gateway!r}: give a URL as http://127.0.0.1:8300")
        self._url = gateway.rstrip("/")
        self._job = JobId(checked_name(job, what="job"))
        given = {"token_file": token_file, "ca_file": ca_file}
        pair = {"cert_file": cert_file, "key_file": key_file}
        try:
            self._credentials = Credentials.model_validate(given | pair)
        except ValidationError as error:
            raise ConfigError(str(error.errors()[0]["msg"])) from error
        self._peer: Peer | None = None
        self._credentials.headers_for(self._url)
        for files in (self._credentials, engines):
            files.check()
        self._headers = {"Content-Type": "application/json", JOB_HEADER: self._job}
        self._fallback = fallback
        self._silence_s = silence_s
        self._retries = retries
        self._clock = clock or MonotonicClock()
        self._http: aiohttp.ClientSession | None = None
        self._ledger = TurnLedger(self._job)
        self._cuts: dict[str, tuple[asyncio.Timeout, GatewayTurn | None]] = {}
        """Each open turn's, with the turn where the gateway alone has its tokens."""
        self._ending: set[asyncio.Task[None]] = set()
        self._announcing: dict[asyncio.Timeout, int] = {}
        """The version of each open call of `announce`."""
        self._warnings = EventLimit.of_lines()
        self._watch = GatewayWatch(
            self._gateway,
            self._job,
            self._headers,
            self._clock,
            silence_s=silence_s if fallback else max(silence_s, _HUNG_S),
            warn_s=silence_s,
            warnings=self._warnings,
            engines=dedicated or {},
        )
        self._dedicated = DedicatedTurns(self._session, self._watch, self._clock, engines)

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
        if self._http is not None:
            await self._http.close()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Choice:
        """One turn: sampled ids, their log-probabilities, and the spans that say which engine and
        version made them.

        An `abort` keeps the tokens so far; another turn goes on from them. Raises PeerProtocolError
        for a request that is wrong, Exhausted where the retries end before the first token.
        """
        turn = self._opened(token_ids, sampling, options)
        await self._serve(turn, lambda: None)
        return turn.choice()

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Choice, None]:
        """Like `generate`: yields new tokens as they come, each choice with the spans that it
        touches; the last has a finish reason and all spans. Leaving it early ends the turn."""
        turn = self._opened(token_ids, sampling, options)
        more, sent = asyncio.Event(), 0
        serving = asyncio.ensure_future(self._serve(turn, more.set, stream=True))
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
        for name in [request_id] if request_id else tuple(self._cuts):
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
            async with self._gateway().post(
                "/inference/v1/abort_requests",
                data=msgspec.json.encode(AbortRequests(request_ids=(request_id,))),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=_ABORT_S),
            ) as reply:
                ended = _decoded(await body_of(reply, most_bytes=_ERROR_MAX_BYTES), Aborted).aborted
        with suppress(RuntimeError):  # The call has returned.
            cut.reschedule(until_s if ended else 0.0)

    async def announce(
        self, version: int, store: str, *, state_hash: str = "", cut_open_turns: bool = False
    ) -> VersionSwitched:
        """A version was published to `store`; returns when every dedicated engine serves it, or at
        once, with `active` false, where they serve another job. `state_hash`: its publisher's, so
        that no other run's version is taken for it. Raises Stale once a later version is announced:
        sent again after that, this one would be taken for another run's.
        """
        published = AnnouncedVersion(
            version=WeightVersion(version),
            store=store,
            state_hash=state_hash,
            cut_open_turns=cut_open_turns,
        )
        path = f"/v1/jobs/{self._job}/versions"
        later = f"version {version} was overtaken by the announcement of a later one"
        if max(self._announcing.values(), default=0) > version:
            raise Stale(later)
        for each in [each for each, other in self._announcing.items() if other < version]:
            del self._announcing[each]  # A call that ends already cannot be ended again.
            each.reschedule(0.0)
        cut = asyncio.timeout(None)
        try:
            async with cut:
                self._announcing[cut] = version
                # A number below the job's, or of another run, is refused for good.
                return await self._call(path, published, VersionSwitched, passing=PASSING - {409})
        except TimeoutError as error:
            raise Stale(later) from error
        finally:
            self._announcing.pop(cut, None)

    async def activate(self) -> VersionSwitched:
        """The engines serve this job, with its newest version, on return."""
        return await self._call(f"/v1/jobs/{self._job}/activate", None, VersionSwitched)

    async def end_trajectory(self, trajectory: str) -> int:
        """The trajectory takes no more turns: its prefix need not be kept. Returns the number of
        its turns that were open, which end."""
        ended = FinishSession(session_id=trajectory)
        return (await self._call(f"/jobs/{self._job}/finish_session", ended, Aborted)).aborted

    async def _call(
        self,
        path: str,
        asked: msgspec.Struct | None,
        of: type[T],
        *,
        passing: Collection[int] = PASSING,
    ) -> T:
        url, body = self._url + path, b"" if asked is None else msgspec.json.encode(asked)
        backoff = Backoff(self._retries, self._clock, random=Random(body))
        content = await posted(
            self._session(),
            url,
            body,
            backoff,
            headers=self._headers | self._credentials.headers(),
            tls=self._credentials.tls() if self._credentials.has_tls_files else True,
            timeout_s=_SWITCH_S,
            passing=passing,
        )
        return _decoded(content, of)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The gateway decides what waits.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._http

    def _gateway(self) -> Peer:
        if self._peer is None:
            self._peer = Peer(self._session(), self._url, self._credentials)
        return self._peer

    def _opened(self, token_ids: Sequence[int], sampling: Sampling, options: TurnOptions) -> Turn:
        if unknown := sorted(options.keys() - TurnOptions.__annotations__.keys()):
            # A misspelt pin would be no pin.
            raise TypeError(f"no such option: {', '.join(unknown)}")
        pin = options.get("weight_version")
        name = options.get("request_id") or uuid4().hex
        trajectory = checked_trajectory(options.get("trajectory"), request_id=name)
        body = {
            "request_id": name,
            "token_ids": tuple(token_ids),
            "sampling_params": sampling,
            "weight_version": {"exact": pin} if isinstance(pin, int) else pin or {},
            "priority": options.get("priority", 0),
            "cache_salt": options.get("cache_salt"),
            "on_interrupt": options.get("on_interrupt"),
            "equal_numerics": options.get("equal_numerics", False),
        }
        # The gateway's own check: a field that it would refuse is named here.
        request = decode_generate(msgspec.json.encode(body))
        if request.sampling_params.n != 1:
            raise PeerProtocolError("sampling_params.n: one turn per call; call once per sample")
        if request.sampling_params.scores_prompt:
            raise PeerProtocolError("prompt_logprobs: post to /inference/v1/generate for them")
        turn = self._ledger.open(request, trajectory=trajectory)
        if turn is None:
            raise ConfigError(f"request_id {name!r} is open in this client; use a new id")
        return turn

    async def _serve(
        self, turn: Turn, on_tokens: Callable[[], None], *, stream: bool = False
    ) -> None:
        name = turn.request.request_id
        streams, cut = stream or self._fallback, asyncio.timeout(None)
        at_gateway = GatewayTurn(turn, stream=streams)
        self._cuts[name] = cut, None if streams else at_gateway
        try:
            with self._watch.watching(), suppress(TimeoutError):
                async with cut:
                    await self._persist(turn, at_gateway, on_tokens)
        finally:
            self._cuts.pop(name, None)
            # Ended by `abort`, or by its caller.
            self._ledger.close(turn)

    async def _persist(
        self, turn: Turn, at_gateway: GatewayTurn, on_tokens: Callable[[], None]
    ) -> None:
        backoff = Backoff(self._retries, self._clock, random=Random(turn.request.request_id))
        pin_s, why = turn.request.weight_version.wait_s, ""
        since_s, received = self._clock.now(), 0
        while not turn.ended:
            if not self._watch.silent:
                self._dedicated.forget()
            direct = self._fallback and (self._watch.silent or not at_gateway.movable)
            if turn.token_ids and (direct or not at_gateway.whole):
                fields = output_fields(turn.request.sampling_params)
                if turn.request.on_interrupt is OnInterrupt.RETURN_PARTIAL:
                    turn.fault = f"interrupted: {why}"
                elif fields and not direct:
                    turn.immovable = fields
                    turn.fault = f"its sampling counts output ({', '.join(fields)}); {why}"
                if turn.fault:
                    turn.end(FinishReason.ABORT)
                    return
            try:
                if direct:
                    await self._dedicated.attempt(turn, on_tokens)
                else:
                    await self._at_gateway(turn, at_gateway, on_tokens)
                continue
            except Interrupted as broken:
                why, asked_s = str(broken), broken.retry_after_s
                if len(turn.token_ids) > received:
                    since_s, received = self._clock.now(), len(turn.token_ids)
                waited_s = self._clock.now() - since_s
                unmet = isinstance(broken, _PinUnmet)
                unanswered_s = self._watch.unanswered_s
                asked_all = direct or not self._fallback
                silent = asked_all and unanswered_s >= self._silence_s
                if not unmet and silent and pin_s is not None:
                    # It is unknown whether the pin is met, and no engine has the turn.
                    unmet, waited_s = True, min(waited_s, unanswered_s)
                unmet &= waited_s >= (_PIN_S if pin_s is None else pin_s)
            backoff.received(len(turn.token_ids))
            wait_s = None if unmet else backoff.wait_s(retry_after_s=asked_s)
            if wait_s is None:
                error = backoff.exhausted(f"turn {turn.request.request_id}: {why}")
                if not turn.token_ids:
                    raise error
                turn.fault = str(error)
                turn.end(FinishReason.ABORT, lost=True)
                return
            if self._warnings.admits(now=self._clock.now()):
                more = f" ({self._warnings.taken()} more such tries)" * bool(self._warnings.omitted)
                _log.warning("turn %s is tried again: %s%s", turn.request.request_id, why, more)
            await asyncio.sleep(wait_s)

    async def _at_gateway(
        self, turn: Turn, at_gateway: GatewayTurn, on_tokens: Callable[[], None]
    ) -> None:
        request = at_gateway.request()
        try:
            async with asyncio.timeout(None) as cut:
                with self._watch.cutting(cut):
                    async with self._gateway().post(
                        GENERATE_ROUTE,
                        data=msgspec.json.encode(request),
                        headers={**self._headers, SESSION_HEADER: turn.trajectory},
                        timeout=aiohttp.ClientTimeout(total=None),
                    ) as reply:
                        await self._read(reply, turn, at_gateway, on_tokens)
        except TimeoutError as error:
            raise Interrupted(self._watch.silence) from error
        except HttpRefusal as error:
            if not turn.token_ids:
                raise
            turn.fail(str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Interrupted(f"the gateway: {type(error).__name__} {error}") from error

    async def _read(
        self,
        reply: aiohttp.ClientResponse,
        turn: Turn,
        at_gateway: GatewayTurn,
        on_tokens: Callable[[], None],
    ) -> None:
        if reply.status != 200:
            problem = refusal_of(reply, await body_of(reply, most_bytes=_ERROR_MAX_BYTES))
            if reply.status not in PASSING:
                raise problem
            asked_s = retry_after_s(reply.headers.get("Retry-After"), most_s=RETRY_AFTER_MAX_S)
            if reply.status in (409, 429):
                # The gateway's own word, which no proxy in front of it says.
                self._watch.hear()
            kind = _PinUnmet if reply.status == 409 else Interrupted
            raise kind(str(problem), retry_after_s=asked_s)
        self._watch.hear()
        if reply.content_type == "application/json":
            whole = await body_of(reply, most_bytes=_REPLY_MAX_BYTES)
            at_gateway.fold(_decoded(whole, EngineChunk), on_tokens)
            return
        events = EventStream()
        while not turn.ended:
            data = await reply.content.readany()
            if not data:
                raise Interrupted("the gateway's stream ended early")
            self._watch.hear()
            for chunk in events.feed(data):
                at_gateway.fold(chunk, on_tokens)


def _decoded(body: bytes, of: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=of)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"the gateway's reply is not a {of.__name__}: {error}") from error
