"""Engine processes as the benchmark holds them: started, asked, ended."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from benchmarks.gpu_slot.ended_process import ended
from benchmarks.gpu_slot.engines.orders import (
    REPLIES,
    Broken,
    EngineSetting,
    EnginesReady,
    Reply,
    Roll,
    Rolled,
    Serve,
    ServedLoad,
)
from benchmarks.gpu_slot.engines.request_load import Request
from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog
from harvester.contracts.errors import ConfigError
from harvester.platform.parent import end_with

_LINE_BYTES_MAX = 1 << 28
_START_S = 90.0
_LATE_S = 40.0


@dataclass(slots=True)
class EngineChild:
    process: asyncio.subprocess.Process
    ready: EnginesReady
    _replies: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    _orders: int = 0

    async def serve(self, load: Sequence[Request], *, seconds: float) -> ProductionLog:
        """Raises ConfigError where the engine fails."""
        self._orders += 1
        reply = await self._request(
            Serve(number=self._orders, load=tuple(load), seconds=seconds), seconds
        )
        assert isinstance(reply, ServedLoad)
        return reply.log

    async def roll(self, *, seconds: float, mixed: bool = False, seed: int = 0) -> GuestLog:
        """Raises ConfigError where the engine fails."""
        self._orders += 1
        reply = await self._request(
            Roll(number=self._orders, seconds=seconds, mixed=mixed, seed=seed), seconds
        )
        assert isinstance(reply, Rolled)
        return reply.log

    async def _request(self, order: Serve | Roll, seconds: float) -> Reply:
        assert self.process.stdin is not None
        answer = asyncio.get_running_loop().create_future()
        self._replies[order.number] = answer
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self.process.stdin.drain()
        try:
            async with asyncio.timeout(seconds + _LATE_S):
                reply: Reply = await answer
        except TimeoutError as error:
            raise ConfigError(f"an engine did not end its {seconds:g} s") from error
        if isinstance(reply, Broken):
            raise ConfigError(f"an engine failed: {reply.error}")
        return reply

    async def read(self) -> None:
        """Hands replies to their waiters until the process ends."""
        assert self.process.stdout is not None
        fault = "an engine's process has ended"
        try:
            while line := await self.process.stdout.readline():
                reply = REPLIES.decode(line)
                if not isinstance(reply, EnginesReady):
                    self._replies.pop(reply.number).set_result(reply)
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            fault = f"an engine's reply cannot be read: {error}"
        for answer in self._replies.values():
            if not answer.done():
                answer.set_exception(ConfigError(fault))


@asynccontextmanager
async def engine(
    setting: EngineSetting, environment: Mapping[str, str]
) -> AsyncIterator[EngineChild]:
    """A process once it is ready; its errors go to this one's. Raises ConfigError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.gpu_slot.engines.process",
        msgspec.json.encode(setting).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
        env=os.environ | dict(environment),
        preexec_fn=partial(end_with, os.getpid()),
    )
    try:
        child = EngineChild(process, await _ready(process))
        reading = asyncio.ensure_future(child.read())
        try:
            yield child
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
    finally:
        assert process.stdin is not None
        # The end of its input first: a client of MPS is not to be killed in a kernel.
        await ended(process, process.stdin.close, process.terminate)


async def _ready(process: asyncio.subprocess.Process) -> EnginesReady:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise ConfigError(f"an engine was not ready within {_START_S:.0f} s") from error
    if not line:
        raise ConfigError("an engine's process ended at its start; its error stands above")
    reply = REPLIES.decode(line)
    assert isinstance(reply, EnginesReady)
    return reply
