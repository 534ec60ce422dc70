"""The client of one stock vLLM engine: generate as a stream, switch versions, health.

Measures nothing and decides nothing: each failure is an exception that names the party at fault.
"""

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from itertools import chain
from typing import Any, NamedTuple

import aiohttp
import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError, message_of, reason_of
from harvester.contracts.ids import Epoch, SlotId
from harvester.contracts.wire.engines import (
    ENGINE_HEADER,
    IDENTITY,
    WEIGHTS_FEATURE,
    EngineDescription,
    WorkerMethod,
)
from harvester.contracts.wire.leases import EPOCH_HEADER
from harvester.contracts.wire.rollouts import GENERATE_ROUTE, PromptScores
from harvester.platform.peer import Peer
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.gateway.engines.engine_connections import (
    ConnectionFailed,
    EngineConnections,
    StreamedReply,
)
from scheduler.gateway.engines.engine_faults import (
    ADVICE,
    EngineBusy,
    EngineChanged,
    EngineLost,
    EngineUnreachable,
    RequestRefused,
    refusal,
)
from scheduler.gateway.engines.generate_body import generate_body
from scheduler.gateway.engines.identity import (
    Change,
    HeldWeights,
    IdentityClient,
    WorkerReplies,
    change_between,
)
from scheduler.gateway.engines.stream import MAX_EVENT_BYTES, EngineChoice, EngineChunk, EventStream
from scheduler.gateway.loop_share import AT_ONCE, LoopShare
from scheduler.gateway.policy.attempt import Attempt

_ENCODER = msgspec.json.Encoder()
_MESSAGE_CHARS = 500
STAGE_SILENCE_S = 30.0
"""Longest wait for one look at a preparation; an engine that is silent for longer may hang."""
_STAGE_POLL_S, _STAGE_POLL_MAX_S, _STAGE_POLL_GROWTH = 0.02, 1.0, 1.05
"""Waits between two looks at a preparation grow to a twentieth of its time: workers answer between
steps."""
_UNKNOWN_VERSION = (
    " and this gateway has no record of a version: publish the next one, give its state_file back, "
    "or restart the engine"
)
_DRAIN_S = 1.0
"""Longest wait for the rest of a finished stream, in s: its connection can then be used again."""
_BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError, PeerProtocolError)
_IDENTITY = " ".join(IDENTITY)
_INCONCLUSIVE_STATUSES = frozenset({401, 403, 408, 429, 504})
"""Statuses of a health check that do not show whether the engine lives."""


class _StageState(msgspec.Struct, frozen=True):
    state: str
    message: str = ""


class StageReply(NamedTuple):
    """The outcome of an engine's preparation of a version."""

    ready: bool
    fault: str = ""
    """Why the workers cannot prepare the version; empty if they can, or report nothing."""


_STAGE = msgspec.json.Decoder(WorkerReplies[_StageState])


class _Scored(msgspec.Struct):
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    prompt_token_id_logprobs: str | None = None


_SCORE_BYTES = 128
"""Most bytes of one of a prompt's scores, in the mean; the routed experts may come beside them."""


class EngineClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        connect_s: float,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """Raises ConfigError for credentials that cannot be used."""
        self.peer = Peer(session, url, credentials)
        self.connections = EngineConnections(url, connect_s=connect_s, credentials=credentials)
        self._transfer_ready = False
        self._may_be_paused = False
        """Whether an update may have been left before its end: one from here that failed, or one of
        a guest, under an earlier lease. Only then: an engine may be paused because it sleeps."""
        self._model: str | None = None
        """Model name of requests: the adapter of the served version; None without one."""
        self._identity_client = IdentityClient(self.peer, timeout_s=connect_s)
        self.health_fault = ""
        """Why the last health check failed; "" if it did not."""
        self.state_hash = ""
        """Hash of the weights that all workers reported after the last update; "" if unknown."""
        self.identity = ""
        """Identity of the engine that the version in force was applied to; "" before that, or if
        none."""
        self._stamped = False
        """Whether every reply carries the identity."""

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
        async with self._replying(body, epoch) as reply:
            stream = EventStream(most_tokens=attempt.tokens_left)
            cut: asyncio.CancelledError | None = None
            finished = False

            def unread() -> Iterator[EngineChunk]:
                if cut is not None:
                    yield from stream.feed(reply.unread())

            while not (finished or stream.done):
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
        async with self._replying(body, epoch) as reply:
            raw = await reply.read_most(MAX_EVENT_BYTES + scores * _SCORE_BYTES)
            try:
                scored = msgspec.json.decode(raw, type=_Scored)
            except UNDECODABLE as error:
                raise PeerProtocolError(f"unreadable scores: {error}") from error
        values = bytes(scored.prompt_logprobs)
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
                    raise refusal(reply.status, message[:_MESSAGE_CHARS], retry_after)
                yield reply
        except ConnectionFailed as error:
            if error.errno == errno.EMFILE:
                raise EngineBusy("the gateway has no descriptor left (ulimit -n)") from error
            raise EngineUnreachable(str(error.strerror), _left_by(error)) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineLost(f"{type(error).__name__}: {error}") from error
        except PeerProtocolError as error:
            raise EngineLost(str(error)) from error

    async def describe(self, guest_of: SlotId | None) -> EngineDescription:
        """`guest_of`: the slot whose guest it must be. Raises EngineLost, also for another engine,
        which may be production."""
        try:
            report, stamped = await self._identity_client.report()
            fault = ""
            if guest_of is not None:
                self._may_be_paused = True
                fault = await self._identity_client.guest_fault(guest_of, report, stamped=stamped)
        except _BROKEN as error:
            raise EngineLost(f"cannot read the engine's identity: {reason_of(error)}") from error
        if fault:
            raise EngineLost(fault)
        return report.description

    async def changed(self, *, frugal: bool = False) -> Change:
        """Whether the engine differs from the engine to which the version was applied.

        `frugal` skips engines that reveal it only in their whole metrics.
        """
        given = self.identity
        if not given or (frugal and not self._stamped):
            return Change.NONE
        try:
            report, _ = await self._identity_client.report()
        except _BROKEN as error:
            return _left_by(error)
        return change_between(given, report.identity) if self.identity == given else Change.NONE

    async def stage(
        self,
        target: HeldWeights,
        *,
        timeout_s: float,
        adapter: str | None = None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> StageReply:
        """Have the engine prepare a version while it samples, and look until it is ready or
        reports a fault, for as long as `goes_on`.

        An engine that cannot, or not in time, prepares it within the switch.
        """
        given: dict[str, Any] = {"store": target.store, "version": target.version}
        given |= {} if adapter is None else {"adapter": adapter}
        call = {"method": WorkerMethod.STAGE, "kwargs": given}
        wait_s = _STAGE_POLL_S
        try:
            async with asyncio.timeout(timeout_s):
                while goes_on():
                    # A connection that breaks once in minutes is no engine's end.
                    with suppress(aiohttp.ClientError, ConnectionError):
                        async with asyncio.timeout(STAGE_SILENCE_S):
                            workers = await self._identity_client.of_workers(call, _STAGE)
                        states = {worker.state for worker in workers}
                        if "running" not in states or "failed" in states:
                            faults = (each.message for each in workers if each.state == "failed")
                            fault = next(faults, "")[:_MESSAGE_CHARS]
                            return StageReply(states == {"ready"}, fault)
                    await asyncio.sleep(wait_s)
                    wait_s = min(wait_s * _STAGE_POLL_GROWTH, _STAGE_POLL_MAX_S)
        except _BROKEN:
            pass
        return StageReply(ready=False)

    async def switch(
        self, target: HeldWeights, *, timeout_s: float, adapter: str | None = None
    ) -> EngineDescription:
        """Bring the engine to a version; on return it samples with nothing older.

        Version 0 is the weights that it started with: nothing is loaded. A version of another state
        hash than a given one is refused by the engine before it is loaded. `adapter`: the store
        holds LoRA adapters; requests after this ask for the version by that name. KV made with the
        old weights is dropped and that of kept requests is computed again.
        Raises EngineLost; the engine may then be paused, which the next switch ends.
        """
        model = adapter if target.version else None
        try:
            async with asyncio.timeout(timeout_s):
                if target.version:
                    await self._load(target, adapter)
                description = await self._confirm(target, adapter=model)
                if self._may_be_paused and not target.version:
                    await self._end_pause()
            self._model = model
            return description
        except (*_BROKEN, EngineLost) as error:
            self.forget()
            what = f"switch to {target.store} {target.version}" if target.version else "version 0"
            fault, change = f"{what}: {reason_of(error)}", _left_by(error)
            lost = EngineUnreachable(fault, change) if change is Change.PROCESS else None
            raise lost or EngineLost(fault) from error

    async def _load(self, target: HeldWeights, adapter: str | None) -> None:
        optional = {"state_hash": target.state_hash or None, "adapter": adapter}
        given = {name: value for name, value in optional.items() if value is not None}
        self._may_be_paused = True
        await self._post("/pause", params={"mode": "keep"})
        if not self._transfer_ready:
            await self._post("/init_weight_transfer_engine", {"init_info": {}})
            self._transfer_ready = True
        await self._begin_update()
        update = {"update_info": {"store": target.store, "version": target.version, **given}}
        await self._post("/update_weights", update)
        await self._post("/finish_weight_update", {"weight_version": str(target.version)})
        await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        await self._post("/resume")

    async def _end_pause(self) -> None:
        """Ends the pause of an update that was left before it wrote anything. Where the engine or
        its proxy refuses the call, none has begun."""
        async with self.peer.post("/resume", headers={"Connection": "close"}) as response:
            if response.status >= 500:
                raise EngineLost(f"/resume: {response.status} {await _message(response)}")

    async def adopt(self) -> tuple[EngineDescription, HeldWeights]:
        """Take the engine as it is, with the weights that it holds; nothing is loaded.

        Raises EngineLost. Any later change of the weights ends a stream.
        """
        try:
            description, held = await self._identified(updated=True)
        except _BROKEN as error:
            raise EngineLost(f"cannot read the engine's weights: {reason_of(error)}") from error
        if len({(worker.store, worker.version) for worker in held}) != 1:
            raise EngineLost("the engine's workers report different weights")
        if not self._stamped:
            raise EngineLost(
                f"the engine's replies do not show an update: start it with {_IDENTITY}"
            )
        self.state_hash = held[0].state_hash
        return description, held[0]

    async def _confirm(self, target: HeldWeights, *, adapter: str | None) -> EngineDescription:
        """Checks that every worker holds `target`; from here on the engine must stay the same
        one."""
        description, held = await self._identified(updated=bool(target.version))
        workers = [each.of(adapter) for each in held]
        for worker in workers:
            if (worker.store, worker.version) != (target.store, target.version):
                named = f"{worker.store} {worker.version}" if worker.store else "its first weights"
                remedy = "" if target.version else _UNKNOWN_VERSION
                raise EngineLost(f"a worker holds {named}{remedy}")
        if not held:
            raise EngineLost("no worker reports its weights")
        hashes = {worker.state_hash for worker in workers}
        self.state_hash = hashes.pop() if len(hashes) == 1 else ""
        return description

    async def _identified(
        self, *, updated: bool
    ) -> tuple[EngineDescription, tuple[HeldWeights, ...]]:
        """The engine's description and its workers' weights, both of one identity. `updated`: it
        may have been given weights."""
        before, stamped = await self._identity_client.report()
        if updated and not before.identity:
            raise EngineLost(f"the engine has no identity: start it with {_IDENTITY}")
        # A stock engine without an update may have no such call.
        answers = updated or WEIGHTS_FEATURE in before.description.features
        held = await self._identity_client.held() if answers else (HeldWeights(),)
        if any(worker.in_doubt for worker in held):
            raise EngineLost(
                "its weights are in doubt, after an update that failed or a sleep that kept none: "
                "publish a version, or restart the engine"
            )
        after, _ = await self._identity_client.report()
        if before.identity != after.identity:
            raise EngineChanged(f"engine {after.identity} answers, no more {before.identity}")
        self.identity, self._stamped = after.identity, stamped
        return after.description, held

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

    async def _begin_update(self) -> None:
        try:
            # vLLM 0.24 refuses an empty body.
            await self._post("/start_weight_update", {})
        except EngineLost:
            # A switch that was cut off (its lease ended) left its session open. vLLM has no call
            # that closes one, and going on in it is the same, as every update is a whole one.
            # If starting failed for another reason, the update that follows reports it.
            return

    def close(self) -> None:
        """No connection is kept from here on."""
        self.connections.close()

    def forget(self) -> None:
        """The engine may be another process when it is back."""
        self._transfer_ready = False
        self.identity, self._stamped = "", False

    async def became(self) -> Change:
        """The engine's change since the version was applied to it. Only a refused connection, its
        own report of failure or another identity shows that it died: silence and broken connections
        do not."""
        try:
            status, _ = await self._identity_client.get("/health")
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self.health_fault = f"/health: {reason_of(error)}"
            return _left_by(error)
        self.health_fault = (
            "" if status == 200 else f"/health: HTTP {status}{ADVICE.get(status, '')}"
        )
        if status == 200:
            return await self.changed()
        return Change.UNKNOWN if status in _INCONCLUSIVE_STATUSES else Change.PROCESS

    async def vllm_version(self) -> str:
        """The vLLM version that the engine reports; empty without one."""
        try:
            _, raw = await self._identity_client.get("/version")
            return str(msgspec.json.decode(raw)["version"])[:64]
        except (aiohttp.ClientError, TimeoutError, *UNDECODABLE, KeyError, TypeError):
            return ""

    async def _post(
        self, path: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None
    ) -> None:
        # vLLM's server drops the connection after an error, and a POST is never sent twice: each of
        # these rare calls has a connection of its own.
        async with self.peer.post(
            path, json=body, params=params, headers={"Connection": "close"}
        ) as response:
            if response.status != 200:
                raise EngineLost(f"{path}: {response.status} {await _message(response)}")


def _left_by(error: Exception) -> Change:
    """Change that a failed call shows of the engine's process."""
    refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
    return Change.PROCESS if refused else Change.UNKNOWN


async def _message(response: aiohttp.ClientResponse) -> str:
    # Only for the message: a part of the body will do.
    return message_of(await response.content.read(4 * _MESSAGE_CHARS))[:_MESSAGE_CHARS]
