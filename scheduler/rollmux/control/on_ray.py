"""The phase control on Ray: a detached, named actor with the same service, and its transport.

Messages cross as JSON bytes of the wire's own records. Ray restarts the actor when its process or
node dies; with a state file that the new node sees too, it knows its holders then.
"""

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError
from scheduler.rollmux.cluster.runtime_events import Call
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.planning import compile_for, make_service
from scheduler.rollmux.control.socket_server import exposition
from scheduler.rollmux.control.wire import (
    ControlUnreachable,
    JobStatus,
    Reply,
    call_name,
    decoded_reply,
    encoded_call,
)
from scheduler.rollmux.permits.events import Enter

_LOG = logging.getLogger(__name__)
ACTOR = "rosemux-phases"
NAMESPACE = "rosemux"
_ANSWER_S = 10.0
_CALLS_AT_ONCE = 1000


class ControlActor:
    """Becomes a Ray actor in `start_control`; its methods run in the actor's event loop."""

    def __init__(self, settings: ControlSettings) -> None:
        clock = MonotonicClock()
        compile_for(settings.cluster)
        self._service = make_service(settings, clock)
        self._api = AsyncPhaseApi(self._service, clock)
        self._ticking: asyncio.Task[None] | None = None

    async def call(self, name: str, body: bytes) -> tuple[bytes, str]:
        """The reply, or the fault of the call. Raises Exhausted: ask again."""
        if self._ticking is None:
            self._ticking = asyncio.ensure_future(self._live())
        if self._ticking.done():
            # An error of the service; its state is on disk, and Ray restarts a process that died.
            os._exit(1)
        try:
            return await self._api.call(name, body), ""
        except PeerProtocolError as error:
            return b"", str(error)

    async def jobs(self) -> bytes:
        """Status of every job, as the wire's records."""
        return msgspec.json.encode(self._service.statuses())

    async def metrics(self) -> bytes:
        """Metrics in Prometheus's text format."""
        return self._service.metrics()

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(exposition(self._service))
            except ConfigError as error:
                # Jobs need the control more than operators need its figures.
                _LOG.warning("metrics cannot be served: %s", error)
            await self._api.tick()


def start_control(settings: ControlSettings, *, name: str = ACTOR) -> "RayTransport":
    """The control of this Ray cluster, started now if absent; Ray must be initialised.

    Relative paths are of this process's directory, on the machine of the actor.
    """
    import ray

    state, journal = (path and path.absolute() for path in (settings.state, settings.journal))
    handle = (
        ray.remote(ControlActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=_CALLS_AT_ONCE,
        )
        .remote(replace(settings, state=state, journal=journal))
    )
    return RayTransport(handle, name)


def connect(*, name: str = ACTOR) -> "RayTransport":
    """Connects from any task or actor of the cluster.

    Raises ControlUnreachable if no control was started.
    """
    return RayTransport(_actor(name), name)


def _actor(name: str) -> Any:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ControlUnreachable(f"no phase control {name!r} on this Ray cluster") from error


class RayTransport:
    """A transport to one actor; an actor started later under the same name is another one."""

    def __init__(self, handle: Any, name: str = ACTOR) -> None:
        self.handle = handle
        self._name = name

    def jobs(self) -> tuple[JobStatus, ...]:
        """Status of every job. Raises as `call` does."""
        return msgspec.json.decode(self._request("jobs"), type=tuple[JobStatus, ...])

    def metrics(self) -> bytes:
        """Metrics in Prometheus's text format, for a collector that runs on Ray itself."""
        text: bytes = self._request("metrics")
        return text

    def call(self, message: Call) -> Reply:
        """Raises ConfigError, ControlUnreachable, Exhausted, or PeerProtocolError if refused."""
        sent = encoded_call(message)
        timeout_s = _ANSWER_S + (message.wait_s if isinstance(message, Enter) else 0.0)
        name = call_name(message)
        body, fault = self._request("call", name, sent, timeout_s=timeout_s)
        if fault:
            raise PeerProtocolError(f"{name}: {fault}")
        return decoded_reply(body)

    def _request(self, method: str, *arguments: object, timeout_s: float = _ANSWER_S) -> Any:
        import ray

        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.ActorDiedError as error:
            self.handle = _actor(self._name)
            raise Exhausted(f"{method}: the phase control has died: {error}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            # Ray does not distinguish a restarting actor from an unreachable one.
            raise Exhausted(f"{method}: the phase control does not answer: {error}") from error
