"""Turns on the job's dedicated engines, without the gateway: only while it is silent.

An engine serves with the weights that it holds, and no longer: any change of them ends its streams.
Loads nothing, leases nothing; guests are out of reach without a lease.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import xxhash

from harvester.contracts.errors import ConfigError, Stale
from harvester.contracts.ids import EngineId, WeightVersion
from harvester.contracts.wire.engines import CONTINUATION_FEATURE
from harvester.platform.backoff import Interrupted
from harvester.platform.tls import Credentials
from scheduler.client.gateway_connection import GatewayConnection
from scheduler.client.gateway_watch import GatewayWatch
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_faults import (
    EngineBusy,
    EngineLost,
    RequestFailed,
    RequestRefused,
)
from scheduler.gateway.engines.engine_output import accepted, check_finish
from scheduler.gateway.fleet_member import numerics_of
from scheduler.gateway.policy.attempt import Attempt
from scheduler.gateway.policy.turn import FINISHED, Turn

_CONNECT_S = 2.0
_STALL_S = 30.0
"""No token for this long: another engine may have it. Longer than any prefill should take."""
_AVOID_S = 1.0


@dataclass(frozen=True, slots=True)
class _Adopted:
    client: EngineClient
    version: WeightVersion
    resumes: bool
    numerics: str
    vocabulary_tokens: float


@dataclass(slots=True)
class DedicatedTurns:
    _gateway: GatewayConnection
    _watch: GatewayWatch
    _credentials: Credentials
    _adopted: dict[EngineId, _Adopted] = field(default_factory=dict)
    _avoid_until_s: dict[EngineId, float] = field(default_factory=dict)
    _last_fault: str = ""
    """Latest fault for which an engine is avoided."""

    def forget(self) -> None:
        """The gateway answers, and may change the engines' weights."""
        for engine in tuple(self._adopted):
            self._drop(engine)

    def _drop(self, engine: EngineId) -> None:
        if (adopted := self._adopted.pop(engine, None)) is not None:
            adopted.client.close()

    async def attempt(self, turn: Turn, on_tokens: Callable[[], None]) -> None:
        """Serves the turn, to its end or until its engine is lost. Raises Interrupted."""
        engine, adopted = await self._engine_for(turn)
        attempt = turn.begin(
            engine=engine,
            version=adopted.version,
            numerics=adopted.numerics,
            resumes=adopted.resumes,
        )
        wait_s = _AVOID_S
        try:
            await self._stream(turn, attempt, adopted, on_tokens)
        except RequestRefused as error:
            if not turn.token_ids:
                turn.refuse()
                raise ConfigError(f"{engine}: {error}") from error
            turn.fail(str(error))
        except (EngineLost, EngineBusy, RequestFailed, Stale, TimeoutError) as error:
            wait_s = max(wait_s, getattr(error, "retry_after_s", 0.0))
            self._drop(engine)
            self._avoid_until_s[engine] = self._gateway.clock.now() + wait_s
            turn.lose(attempt)
            self._last_fault = f"{engine}: {error or 'no token'}"
            if not turn.ended:
                raise Interrupted(self._last_fault) from error

    async def _engine_for(self, turn: Turn) -> tuple[EngineId, _Adopted]:
        """The trajectory's hash chooses the first engine; the others follow in a fixed order."""
        engines = list(self._watch.engines)
        first = xxhash.xxh3_64_intdigest(turn.trajectory.encode()) % max(1, len(engines))
        why = self._last_fault
        if not engines:
            why = self._watch.fault or "the gateway has named no dedicated engine of the job"
        for engine in engines[first:] + engines[:first]:
            if self._avoid_until_s.get(engine, -math.inf) > self._gateway.clock.now():
                continue
            try:
                adopted = self._adopted.get(engine) or await self._adopt(engine)
            except (ConfigError, EngineLost, TimeoutError) as error:
                self._avoid_until_s[engine] = self._gateway.clock.now() + _AVOID_S
                why = self._last_fault = f"{engine}: {error}"
                continue
            pin = turn.request.weight_version.resolved(self._watch.version)
            if turn.needed_numerics not in ("", adopted.numerics):
                why = f"{engine} has the numerics {adopted.numerics!r}"
            elif not pin.admits(adopted.version):
                why = f"{engine} serves version {adopted.version}"
            elif turn.counts_output and turn.token_ids and not adopted.resumes:
                why = f"{engine} does not go on from output, which the turn's sampling counts"
            else:
                return engine, adopted
        raise Interrupted(f"{self._watch.silence}, and no engine takes the turn: {why}")

    async def _adopt(self, engine: EngineId) -> _Adopted:
        # The gateway may answer meanwhile, and name other engines.
        if (listed := self._watch.engines.get(engine)) is None:
            raise EngineLost("the gateway lists the engine no more")
        client = EngineClient(
            self._gateway.session(),
            listed.url,
            connect_s=_CONNECT_S,
            credentials=self._credentials,
        )
        async with asyncio.timeout(_STALL_S):
            description, held = await client.adopt()
            if description.fault:
                raise EngineLost(description.fault)
            numerics = listed.numerics or numerics_of(
                engine, await client.vllm_version(), description
            )
        changed = self._watch.learned and (self._watch.version or held.version)
        if changed and held.store != self._watch.store:
            # Also refuses first weights once the job has published: the engine was restarted, or
            # the job trains an adapter, which the client does not request.
            found = f"weights of {held.store}" if held.store else "its first weights"
            raise EngineLost(f"the engine holds {found}, not of {self._watch.store}")
        if (adopted := self._adopted.get(engine)) is not None:
            # Another turn adopted the engine meanwhile; each client keeps its own connections.
            return adopted
        resumes = CONTINUATION_FEATURE in description.features
        version = WeightVersion(held.version)
        adopted = self._adopted[engine] = _Adopted(
            client, version, resumes, numerics, description.vocabulary or math.inf
        )
        return adopted

    async def _stream(
        self, turn: Turn, attempt: Attempt, adopted: _Adopted, on_tokens: Callable[[], None]
    ) -> None:
        loop, name = asyncio.get_running_loop(), f"{turn.request.request_id}.direct"
        priority, before = turn.request.priority, len(turn.token_ids)
        async with asyncio.timeout(_STALL_S) as stall:
            choices = adopted.client.generate(
                attempt, request_id=name, epoch=None, priority=priority
            )
            async with aclosing(choices):
                async for choice in choices:
                    if choice.token_ids and not stall.expired():
                        stall.reschedule(loop.time() + _STALL_S)
                    check_finish(choice, tokens_before=len(turn.token_ids) - before)
                    if accepted(turn, attempt, choice, adopted.vocabulary_tokens):
                        on_tokens()
                    if choice.finish_reason == "length" and turn.remaining_tokens > 0:
                        raise RequestRefused("the engine's context is full")
                    if choice.finish_reason in FINISHED:
                        turn.finish(
                            attempt, choice.finish_reason, choice.stop_reason, choice.routed_experts
                        )
                        await anext(choices, None)
                        return
        raise EngineLost("the engine aborted the turn")
