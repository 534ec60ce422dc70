"""The running parts of one machine: started, waited for, and missed as soon as one dies."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from benchmarks.testbed.processes import Child, Processes
from coserve.vllm.launch import EngineCommand
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError

T = TypeVar("T")
_START_S = 240.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Directories of a run. `pages` is in shared memory; logs and weights remain after it."""

    run: Path
    pages: Path
    logs: Path
    cache: Path

    @property
    def weights(self) -> Path:
        return self.run / "weights"


@dataclass(slots=True, kw_only=True)
class Parts:
    """Each is there for the whole run; what may end is started with `processes` alone."""

    processes: Processes
    paths: RunPaths
    clock: Clock
    running: dict[str, Child] = field(default_factory=dict)
    may_end: set[str] = field(default_factory=set)
    """Names of parts whose end is a measurement, and not the run's."""

    def engine(
        self, name: str, command: EngineCommand, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: of the machine, over the command's own."""
        temporary = self.paths.run / "tmp"
        temporary.mkdir(exist_ok=True)
        # Files that vLLM leaves in its temporary directory are removed with the run's.
        places = {"TMPDIR": str(temporary)}
        self.running[name] = self.processes.start(
            name,
            command.arguments,
            environment={**command.environment, **(environment or {}), **places},
        )

    def service(self, name: str, *arguments: str, core: int | None) -> None:
        """Starts one of `rosemux`'s own services."""
        command = (sys.executable, "-m", "harvester.cli", *arguments)
        self.running[name] = self.processes.start(name, command, core=core)

    async def answers(
        self, name: str, url: str, on_progress: Callable[[str], None], path: str = "/health"
    ) -> None:
        """Waits for an answer. Raises ConfigError if the process ends before, or takes too long."""
        child = self.running[name]
        started_s = self.clock.now()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while not await _ok(session, url + path):
                child.check()
                if self.clock.now() - started_s > _START_S:
                    raise ConfigError(f"{name} did not answer within {_START_S:.0f} s: {child.log}")
                await asyncio.sleep(_POLL_S)
        on_progress(f"{name} is up after {self.clock.now() - started_s:.0f} s")

    async def one_dies(self) -> None:
        """Raises ConfigError as soon as a part has died; never returns."""
        while True:
            for name, child in tuple(self.running.items()):
                if name not in self.may_end:
                    child.check()
            await asyncio.sleep(_POLL_S)


async def run_with_watchdog(failure: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; if `failure` raises first, cancels `work` and raises that error."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(failure)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            tasks[1].result()
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ok(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
