"""The job's trainer: publishes a version every few minutes; a fault kills it in a publish."""

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from harvester.contracts.clock import Clock
from harvester.platform.parent import end_with
from tests.soak.node import ROLLOUT_CORE, SoakNode
from tests.soak.parts import GATEWAY, JOB
from tests.soak.processes import MARK
from tests.soak.records import Note, Sink, VersionMade

_OPEN_S = 240.0
_PUBLISH_S = 300.0


@dataclass(slots=True, kw_only=True)
class Trainer:
    node: SoakNode
    mark: str
    every_s: float
    clock: Clock
    sink: Sink
    on_served: Callable[[int], None]
    """The gateway has confirmed this version."""
    first_step: int
    known: int = 0
    """The newest durable version."""
    state_hash: str = ""
    begun_s: float = 0.0
    _step: int = 0
    _process: asyncio.subprocess.Process | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            await self.publish()

    async def publish(self) -> None:
        """Returns once the gateway has the version, or the trainer says that it has not."""
        async with self.busy:
            await self._opened()
            await self._begin()
            async with asyncio.timeout(_PUBLISH_S):
                while (reply := await self._reply())["event"] != "announced":
                    self._durable(reply)
            if reply["state"] == "served":
                self.on_served(reply["version"])
            else:
                self._note(f"version {reply['version']} was announced: {reply['state']!r}")

    async def kill_in_publish(self, rng: random.Random) -> None:
        """The next trainer goes on from what is in the store."""
        async with self.busy:
            await self._opened()
            await self._begin()
            # Some of a publish's time; it takes some hundredths of a second.
            await asyncio.sleep(rng.uniform(0.0, 0.15))
            assert self._process is not None
            self._process.kill()
            with suppress(asyncio.IncompleteReadError, ValueError):
                while True:
                    reply = await self._reply()
                    self._durable(reply)
            await self._process.wait()
            self._process = None
            await self._opened()

    async def close(self) -> None:
        async with self.busy:
            if self._process is None:
                return
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(60.0):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _opened(self) -> None:
        if self._process is not None:
            return
        self.node.out.joinpath("copies").mkdir(exist_ok=True)
        parent = os.getpid()

        def prepare() -> None:
            end_with(parent)
            os.sched_setaffinity(0, {ROLLOUT_CORE})
            os.nice(5)

        with (self.node.out / "logs/trainer.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.soak.trainer_child", str(self.node.store)),
                *(str(self.node.out / "copies"), f"{self.node.url(GATEWAY)}/v1/jobs/{JOB}"),
                str(self.node.policy_weights),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: f"{self.mark}.trainer"},
                preexec_fn=prepare,
            )
        async with asyncio.timeout(_OPEN_S):
            reply = await self._reply()
        assert reply["event"] == "opened", reply
        if reply["version"] > self.known:
            # Durable, though its trainer was killed before it could say so; or of an earlier piece.
            self._made(reply, killed=True)

    async def _begin(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._step += 1
        self.begun_s = self.clock.now()
        self._process.stdin.write(f"{self.first_step + self._step}\n".encode())
        await self._process.stdin.drain()
        async with asyncio.timeout(_OPEN_S):
            while (reply := await self._reply())["event"] != "begun":
                self._note(f"the trainer says {reply}")

    async def _reply(self) -> dict[str, Any]:
        """Raises IncompleteReadError once it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readuntil()
        found: dict[str, Any] = json.loads(line)
        return found

    def _durable(self, reply: dict[str, Any]) -> None:
        if reply["event"] == "durable":
            self._made(reply, killed=False)

    def _made(self, reply: dict[str, Any], *, killed: bool) -> None:
        self.known, self.state_hash = reply["version"], reply["state_hash"]
        self.sink(
            VersionMade(
                version=self.known,
                state_hash=self.state_hash,
                begun_s=self.begun_s,
                durable_s=self.clock.now(),
                killed=killed,
            )
        )

    def _note(self, text: str) -> None:
        self.sink(Note(at_s=self.clock.now(), text=text))
