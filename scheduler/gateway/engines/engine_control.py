"""The control of one stock vLLM engine: its health, its identity, its weights.

Measures nothing and decides nothing: each failure is an exception that names the party at fault.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError, message_of, reason_of
from harvester.contracts.ids import SlotId
from harvester.contracts.wire.engines import (
    IDENTITY,
    WEIGHTS_FEATURE,
    EngineDescription,
    WorkerMethod,
)
from harvester.platform.peer import Peer
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.gateway.engines.engine_connections import EngineConnections
from scheduler.gateway.engines.engine_faults import (
    ADVICE,
    EngineChanged,
    EngineLost,
    EngineUnreachable,
)
from scheduler.gateway.engines.identity import (
    Change,
    HeldWeights,
    IdentityClient,
    WorkerReplies,
    change_between,
    change_shown_by,
)

MESSAGE_CHARS = 500
STAGE_SILENCE_S = 30.0
"""Longest wait for one look at a preparation; an engine that is silent for longer may hang."""
_STAGE_POLL_S, _STAGE_POLL_MAX_S, _STAGE_POLL_GROWTH = 0.02, 1.0, 1.05
"""Waits between two looks at a preparation grow to a twentieth of its time: workers answer between
steps."""
_UNKNOWN_VERSION = (
    " and this gateway has no record of a version: publish the next one, give its state_file back, "
    "or restart the engine"
)
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


class EngineControl:
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
        self.process = frozenset[str]()
        """Names of the process that was described; no other engine's process has one of them."""
        self.identity = ""
        """Identity of the engine that the version in force was applied to; "" before that, or if
        none."""
        self._stamped = False
        """Whether every reply carries the identity."""

    async def describe(self, guest_of: SlotId | None) -> EngineDescription:
        """`guest_of`: the slot whose guest it must be. Raises EngineLost, also for another engine,
        which may be production."""
        try:
            report, stamped = await self._identity_client.report()
            self.process = await self._process_of(report.identity, stamped=stamped)
            fault = ""
            if guest_of is not None:
                self._may_be_paused = True
                fault = await self._identity_client.guest_fault(guest_of, report, stamped=stamped)
        except _BROKEN as error:
            raise EngineLost(f"cannot read the engine's identity: {reason_of(error)}") from error
        if fault:
            raise EngineLost(fault)
        return report.description

    async def _process_of(self, identity: str, *, stamped: bool) -> frozenset[str]:
        if stamped or not identity:
            return frozenset(filter(None, (identity.rpartition(".")[0],)))
        # A script starts many engines in the hundredth of a second that their start times show.
        return frozenset(f"{identity} at {each}" for each in await self.connections.addresses())

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
            return change_shown_by(error)
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
                    # A connection that breaks once in minutes does not mean a dead engine.
                    with suppress(aiohttp.ClientError, ConnectionError):
                        async with asyncio.timeout(STAGE_SILENCE_S):
                            workers = await self._identity_client.of_workers(call, _STAGE)
                        states = {worker.state for worker in workers}
                        if "running" not in states or "failed" in states:
                            faults = (each.message for each in workers if each.state == "failed")
                            fault = next(faults, "")[:MESSAGE_CHARS]
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
            fault, change = f"{what}: {reason_of(error)}", change_shown_by(error)
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
        self._may_be_paused = False

    async def _end_pause(self) -> None:
        """Ends the pause of an update that was left before it wrote anything. Where the engine or
        its proxy refuses the call, none has begun."""
        async with self.peer.post("/resume", headers={"Connection": "close"}) as response:
            if response.status >= 500:
                raise EngineLost(f"/resume: {response.status} {await _message(response)}")
        self._may_be_paused = False

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
            return change_shown_by(error)
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


async def _message(response: aiohttp.ClientResponse) -> str:
    # Only for the message: a part of the body will do.
    return message_of(await response.content.read(4 * MESSAGE_CHARS))[:MESSAGE_CHARS]
