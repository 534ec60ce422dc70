"""The attempts of one turn until it ends: at the gateway, or on dedicated engines in its silence.

Retries passing faults, under one request id, on a bounded schedule. A token that was received once
is part of its turn, whatever fails afterwards.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import aiohttp

from harvester.contracts.wire.leases import SESSION_HEADER
from harvester.contracts.wire.rollouts import GENERATE_ROUTE, FinishReason, OnInterrupt
from harvester.platform.backoff import Backoff, Interrupted, retry_after_s
from harvester.platform.http_kit import PASSING, RETRY_AFTER_MAX_S, HttpRefusal, body_of, refusal_of
from scheduler.client.dedicated_turns import DedicatedTurns
from scheduler.client.gateway_connection import WRONG_CALL, GatewayConnection, decoded, owned
from scheduler.client.gateway_turn import GatewayTurn
from scheduler.client.gateway_watch import GatewayWatch
from scheduler.gateway.engines.stream import EngineChunk, EventStream
from scheduler.gateway.policy.attempt import output_fields
from scheduler.gateway.policy.turn import SHUTTING_DOWN, Turn

_log = logging.getLogger(__name__)
_REPLY_MAX_BYTES = 64 << 20
ERROR_MAX_BYTES = 4096
_PIN_S = 60.0
"""Patience with a pin that names none: the gateway's own default."""


class _PinUnmet(Interrupted):
    """The gateway has held the turn for its patience; repeated while that lasts."""


@dataclass(frozen=True, slots=True)
class TurnAttempts:
    _gateway: GatewayConnection
    _watch: GatewayWatch
    _dedicated: DedicatedTurns | None
    """The fallback; without it turns wait for the gateway, however long."""
    _silence_s: float

    async def serve(
        self, turn: Turn, at_gateway: GatewayTurn, on_tokens: Callable[[], None]
    ) -> None:
        """Returns when the turn has ended. Raises Exhausted where the retries end before its first
        token, ConfigError where its request is wrong, PeerProtocolError for another refusal."""
        backoff = Backoff(
            self._gateway.retries, self._gateway.clock, random=Random(turn.request.request_id)
        )
        since_s, received, why = self._gateway.clock.now(), 0, ""
        while not turn.ended:
            direct = self._direct(at_gateway)
            if turn.token_ids and self._ended_in_place(turn, at_gateway, why, direct=direct):
                return
            try:
                if direct is not None:
                    await direct.attempt(turn, on_tokens)
                else:
                    await self._at_gateway(turn, at_gateway, on_tokens)
                continue
            except Interrupted as broken:
                why, requested_s = str(broken), broken.retry_after_s
                if len(turn.token_ids) > received:
                    since_s, received = self._gateway.clock.now(), len(turn.token_ids)
                tried_all = direct is not None or self._dedicated is None
                unmet = self._pin_is_over(turn, broken, since_s, tried_all=tried_all)
            backoff.received(len(turn.token_ids))
            wait_s = None if unmet else backoff.wait_s(retry_after_s=requested_s)
            if wait_s is None:
                error = backoff.exhausted(f"turn {turn.request.request_id}: {why}")
                if not turn.token_ids:
                    raise error
                turn.fault = str(error)
                turn.end(FinishReason.ABORT, lost=True)
                return
            if (limit := self._watch.warnings).admits(now=self._gateway.clock.now()):
                more = f" ({limit.taken()} more such tries)" * bool(limit.omitted)
                _log.warning("turn %s is tried again: %s%s", turn.request.request_id, why, more)
            await asyncio.sleep(wait_s)

    def _ended_in_place(
        self, turn: Turn, at_gateway: GatewayTurn, why: str, *, direct: DedicatedTurns | None
    ) -> bool:
        """Ends a turn whose tokens must not, or cannot, go on elsewhere; whether it did."""
        fields = output_fields(turn.request.sampling_params)
        leaves = direct is not None or not at_gateway.whole or why == SHUTTING_DOWN
        own = turn.request.on_interrupt or self._watch.on_interrupt
        if leaves and own is OnInterrupt.RETURN_PARTIAL:
            turn.fault = f"interrupted: {why}"
        elif fields and direct is None and not at_gateway.whole:
            turn.immovable = fields
            turn.fault = f"its sampling counts output ({', '.join(fields)}); {why}"
        return bool(turn.fault) and turn.end(FinishReason.ABORT)

    def _direct(self, at_gateway: GatewayTurn) -> DedicatedTurns | None:
        """The dedicated engines, if the gateway cannot have the turn."""
        if self._dedicated is None:
            return None
        if not self._watch.silent:
            self._dedicated.forget()
        return self._dedicated if self._watch.silent or not at_gateway.movable else None

    def _pin_is_over(
        self, turn: Turn, broken: Interrupted, since_s: float, *, tried_all: bool
    ) -> bool:
        """Whether the turn's pin stayed unmet for its patience, counted from `since_s`."""
        pin_s, waited_s = turn.request.weight_version.wait_s, self._gateway.clock.now() - since_s
        if not isinstance(broken, _PinUnmet):
            unanswered_s = self._watch.unanswered_s
            if pin_s is None or not tried_all or unanswered_s < self._silence_s:
                return False
            # It is unknown whether the pin is met, and no engine has the turn.
            waited_s = min(waited_s, unanswered_s)
        return waited_s >= (_PIN_S if pin_s is None else pin_s)

    async def _at_gateway(
        self, turn: Turn, at_gateway: GatewayTurn, on_tokens: Callable[[], None]
    ) -> None:
        at_gateway.request()
        try:
            async with asyncio.timeout(None) as cut:
                with self._watch.cutting(cut):
                    async with self._gateway.peer().post(
                        GENERATE_ROUTE,
                        data=at_gateway.body,
                        headers={**self._gateway.headers, SESSION_HEADER: turn.trajectory},
                        timeout=aiohttp.ClientTimeout(total=None),
                    ) as reply:
                        await self._read(reply, turn, at_gateway, on_tokens)
        except TimeoutError as error:
            raise Interrupted(self._watch.silence) from error
        except HttpRefusal as error:
            if not turn.token_ids:
                # 409: its id is another request's.
                raise owned(error, wrong={*WRONG_CALL, 409}) from error
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
            problem = refusal_of(reply, await body_of(reply, most_bytes=ERROR_MAX_BYTES))
            taken = reply.status == 409 and "Retry-After" not in reply.headers
            if taken or reply.status not in PASSING:
                raise problem
            requested_s = retry_after_s(reply.headers.get("Retry-After"), most_s=RETRY_AFTER_MAX_S)
            if reply.status in (409, 429):
                # The gateway's own word, which no proxy in front of it says.
                self._watch.hear()
            kind = _PinUnmet if reply.status == 409 else Interrupted
            raise kind(str(problem), retry_after_s=requested_s)
        self._watch.hear()
        if reply.content_type == "application/json":
            whole = await body_of(reply, most_bytes=_REPLY_MAX_BYTES)
            at_gateway.fold(decoded(whole, EngineChunk), on_tokens)
            if not turn.ended:
                raise Interrupted("the gateway's reply does not end the turn")
            return
        events = EventStream()
        while not turn.ended:
            data = await reply.content.readany()
            if not data:
                raise Interrupted("the gateway's stream ended early")
            self._watch.hear()
            for chunk in events.feed(data):
                at_gateway.fold(chunk, on_tokens)
