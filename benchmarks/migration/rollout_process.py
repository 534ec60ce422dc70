"""The client's process, as the part of a run that gives its orders and hears it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from benchmarks.migration.deployment import STORE, Deployment
from benchmarks.migration.rollout_plan import PlannedTrajectory


class RolloutProcess:
    """The client's process, and its lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.idle = asyncio.Event()
        self._holds = 0

    async def lines(self) -> AsyncIterator[tuple[str, str]]:
        """Each line's first word, and its rest, until the client ends."""
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            word, _, rest = raw.decode().strip().partition(" ")
            if word == "idle":
                self.idle.set()
            yield word, rest
        if await self._process.wait():
            raise RuntimeError(f"the client ended with {self._process.returncode}")

    async def hold(self) -> None:
        """No turn begins until as many `release` have come; `idle` is set once none is open."""
        self._holds += 1
        self.idle.clear()
        await self._order("hold")

    async def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            await self._order("go")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n".encode())
        await self._process.stdin.drain()


@asynccontextmanager
async def rolling_out(
    deployment: Deployment, plan: Sequence[PlannedTrajectory]
) -> AsyncIterator[RolloutProcess]:
    file = deployment.root / "plan.json"
    file.write_bytes(msgspec.json.encode(plan))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.migration.rollout_client"),
        *("--gateway", deployment.gateway_url, "--plan", str(file)),
        *("--record", str(deployment.record), "--store", str(deployment.root / STORE)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield RolloutProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
