"""The requests to one stock vLLM engine: generate as a stream, and the scores of a prompt."""

import asyncio
import errno
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, closing
from itertools import chain
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError, message_of
from harvester.contracts.ids import Epoch
from harvester.contracts.wire.engines import ENGINE_HEADER
from harvester.contracts.wire.leases import EPOCH_HEADER
from harvester.contracts.wire.rollouts import GENERATE_ROUTE, PromptScores
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.gateway.engines.engine_connections import ConnectionFailed, StreamedReply
from scheduler.gateway.engines.engine_control import MESSAGE_CHARS, EngineControl
from scheduler.gateway.engines.engine_faults import (
    EngineBusy,
    EngineChanged,
    EngineLost,
    EngineUnreachable,
    RequestRefused,
    refusal,
    too_large,
)
from scheduler.gateway.engines.generate_body import generate_body
from scheduler.gateway.engines.identity import change_between, change_shown_by
from scheduler.gateway.engines.stream import MAX_EVENT_BYTES, EngineChoice, EngineChunk, EventStream
from scheduler.gateway.loop_share import AT_ONCE, LoopShare
from scheduler.gateway.policy.attempt import Attempt

_ENCODER = msgspec.json.Encoder()
_ID_PREFIX = "generate-tokens-"
"""vLLM's, before the id of a request. Whole replies of some releases have an id without it, which
is no request's."""
_DRAIN_S = 1.0
"""Longest wait for the rest of a finished stream, in s: its connection can then be used again."""


_MOST_LARGE = 8
_LARGE_BYTES = 1 << 18


class LargeReplies:
    """Bounds the memory of parts of replies that engines send over many reads: at most
    `_MOST_LARGE` are beyond `_LARGE_BYTES` at a time. The others wait, and so do their engines,
    whose connections are read no further. One for all engines."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_MOST_LARGE)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        """Gives the call for the reader of one reply: to be awaited with the bytes held so far
        before each further read."""
        is_large = False

        async def hold(held_bytes: int) -> None:
            nonlocal is_large
            if held_bytes > _LARGE_BYTES and not is_large:
                await self._room.acquire()
                is_large = True
            elif is_large and held_bytes <= _LARGE_BYTES:
                self._room.release()
                is_large = False

        try:
            yield hold
        finally:
            await hold(0)


class _Scored(msgspec.Struct):
    request_id: str = ""
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    prompt_token_id_logprobs: str | None = None


_ROWS = msgspec.json.Decoder(list[msgspec.Raw] | None)
_SCORE_BYTES = 128
"""Most bytes of one of a prompt's scores, in the mean; the routed experts may come beside them."""


class EngineClient(EngineControl):
    """An engine as turns use it: its requests go to the weights that its control has loaded."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        connect_s: float,
        credentials: Credentials = NO_CREDENTIALS,
        large: LargeReplies | None = None,
    ) -> None:
        """`large`: shared by all engines of a process; None: its own. Raises ConfigError for
        credentials that cannot be used."""
        super().__init__(session, url, connect_s=connect_s, credentials=credentials)
        self._large = large or LargeReplies()
        self._names_requests = False
        """Whether a reply had its request's id: then each one must. Where a proxy in between gives
        requests ids of its own, none has."""

    def forget(self) -> None:
        super().forget()
        self._names_requests = False

    async def generate(
        self,
        attempt: Attempt,
        *,
        request_id: str,
        epoch: Epoch | None,
        priority: int = 0,
        ended: Sequence[str] = (),
        wait_s: Callable[[], float] = lambda: 0.0,
    ) -> AsyncGenerator[EngineChoice, None]:
        """Choices as they come. Leaving the iterator closes the connection: the engine aborts.

        `ended`: trajectories whose prefixes the engine need not keep. `wait_s`: longest delay of
        choices that are collected into one, in s; the reply's end is never delayed. A cancelled
        iterator first gives what the engine has sent. The last choice has a finish reason or is
        the stream's end.

        Raises RequestRefused, RequestFailed, Stale (lease epoch), EngineBusy, EngineUnreachable,
        EngineChanged (before the first token of an engine that is not the one that was given the
        version) or another EngineLost.
        """
        body = self._body(attempt, request_id, priority, ended)
        async with self._replying(body, epoch) as reply, self._large.reading() as hold:
            stream = EventStream(most_tokens=attempt.tokens_left)
            cut: asyncio.CancelledError | None = None
            finished = False

            def unread() -> Iterator[EngineChunk]:
                if cut is not None:
                    yield from stream.feed(reply.unread())

            while not (finished or stream.done):
                await hold(stream.held_bytes)
                try:
                    data = await reply.read(wait_s())
                except asyncio.CancelledError as error:
                    cut, data = error, reply.unread()
                if not data and cut is None:
                    raise EngineLost("the stream ended early")
                share = LoopShare()
                try:
                    for at, chunk in enumerate(chain(stream.feed(data), unread()), start=1):
                        if fault := chunk.fault:
                            raise refusal(chunk.fault_status, fault)
                        self._check_request(chunk.request_id, body["request_id"])
                        for choice in chunk.choices:
                            yield choice
                            finished |= choice.finish_reason is not None
                        if finished:
                            # Bytes behind it change nothing.
                            break
                        if at % AT_ONCE:
                            continue
                        try:
                            await share.rest()
                        except asyncio.CancelledError as error:
                            # The chunks that have come are given first, as at a read.
                            cut = error
                finally:
                    # Whatever the last bytes were, the caller has ended the attempt.
                    try:
                        if cut is not None:
                            raise cut
                    finally:
                        # The error refers to this frame: both would wait for the garbage collector.
                        cut = None
            await reply.drain(_DRAIN_S)

    async def score(
        self, attempt: Attempt, *, request_id: str, epoch: Epoch | None, priority: int = 0
    ) -> PromptScores:
        """The prompt's log-probabilities, which vLLM does not stream: by a call that samples one
        token and drops it. Raises as generate."""
        body = self._body(attempt, f"{request_id}.prompt", priority)
        requested = attempt.sampling_params
        scores = requested.scores_of(len(attempt.token_ids))
        body["stream"] = False
        body["sampling_params"] = {
            "max_tokens": 1,
            "prompt_logprobs": requested.prompt_logprobs,
            "prompt_logprob_token_ids": requested.prompt_logprob_token_ids,
            "prompt_logprob_start": requested.prompt_logprob_start,
            "extra_args": body["sampling_params"]["extra_args"],
        }
        async with self._replying(body, epoch) as reply, self._large.reading() as hold:
            most_bytes = MAX_EVENT_BYTES + scores * _SCORE_BYTES
            raw = await reply.read_most(most_bytes + 1, hold)
            if len(raw) > most_bytes:
                raise too_large("a prompt's scores", most_bytes)
            try:
                scored = msgspec.json.decode(raw, type=_Scored)
                values = bytes(scored.prompt_logprobs)
                rows = _ROWS.decode(values or b"null")
            except UNDECODABLE as error:
                raise PeerProtocolError(f"unreadable scores: {error}") from error
            self._check_request(scored.request_id, body["request_id"])
            prompt = len(attempt.token_ids)
            if rows is not None and len(rows) != prompt:
                raise PeerProtocolError(f"scores of {len(rows)} tokens, the prompt has {prompt}")
        if values in (b"", b"null") and scored.prompt_token_id_logprobs is None:
            raise RequestRefused("prompt_logprobs: the engine's vLLM returns none for this request")
        return PromptScores(
            prompt_logprobs=scored.prompt_logprobs if values else None,
            prompt_token_id_logprobs=scored.prompt_token_id_logprobs,
        )

    def _body(
        self, attempt: Attempt, request_id: str, priority: int, ended: Sequence[str] = ()
    ) -> dict[str, Any]:
        return generate_body(
            attempt, request_id, priority, self._model, ended, state_hash=self.state_hash
        )

    @asynccontextmanager
    async def _replying(
        self, body: dict[str, Any], epoch: Epoch | None
    ) -> AsyncIterator[StreamedReply]:
        """Sends the request and yields the reply of the engine that was given the version. Raises
        as generate."""
        headers = {}
        if epoch is not None:
            headers[EPOCH_HEADER] = str(epoch)
        if self._stamped:
            headers[ENGINE_HEADER] = self.identity
        try:
            reply = await self.connections.post(GENERATE_ROUTE, _ENCODER.encode(body), headers)
            with closing(reply):
                await self._check_identity(reply)
                if reply.status != 200:
                    # Only for the message: a part of the body will do.
                    message = message_of(await reply.read())
                    retry_after = reply.headers.get("retry-after", "")
                    raise refusal(reply.status, message[:MESSAGE_CHARS], retry_after)
                yield reply
        except ConnectionFailed as error:
            if error.errno == errno.EMFILE:
                raise EngineBusy("the gateway has no descriptor left (ulimit -n)") from error
            raise EngineUnreachable(str(error.strerror), change_shown_by(error)) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineLost(f"{type(error).__name__}: {error}") from error
        except PeerProtocolError as error:
            raise EngineLost(str(error)) from error

    def _check_request(self, reported: str, request_id: str) -> None:
        """Raises EngineLost for the reply to another request, as a proxy gives that sends one
        twice: its tokens and log-probabilities would agree with each other."""
        if reported == _ID_PREFIX + request_id:
            self._names_requests = True
        elif self._names_requests and reported.startswith(_ID_PREFIX):
            raise EngineLost(f"protocol: a reply to request {reported[:MESSAGE_CHARS]!r}")

    async def _check_identity(self, reply: StreamedReply) -> None:
        """A stock engine's start time is read after its reply has begun: if it is unchanged since
        the version was applied, the reply came from that process."""
        given = self.identity
        if not given:
            return
        if self._stamped:
            without_header = "" if reply.status == 200 else given
            answering = reply.headers.get(ENGINE_HEADER.lower(), without_header)
        else:
            answering = await self._identity_client.start_time() if reply.status == 200 else given
        if answering != given:
            change = change_between(given, answering)
            raise EngineChanged(f"{answering or 'an unknown engine'} answers, not {given}", change)
