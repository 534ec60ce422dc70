"""The stage on which strikes act, and an operator's commands. The strikes are in `faults`."""

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from harvester.contracts.clock import Clock
from tests.soak.node import SoakNode
from tests.soak.parts import AGENT, SLOT
from tests.soak.processes import MARK, PartSupervisor
from tests.soak.records import Sink
from tests.soak.trainer import Trainer

_COMMAND_S = 120.0
"""A command imports for seconds where the machine is full."""
_DEMAND_S = 45.0
"""Time for what the product does within a beat. A guest in its idle group has taken
14 s to make its page again on a full machine."""


class FaultSkipped(Exception):  # noqa: N818 - nothing is wrong
    pass


class DemandUnmet(Exception):  # noqa: N818 - a finding about the product
    pass


@dataclass(slots=True, kw_only=True)
class FaultStage:
    """All that strikes act on."""

    node: SoakNode
    parts: PartSupervisor
    trainer: Trainer
    rng: random.Random
    clock: Clock
    sink: Sink
    session: aiohttp.ClientSession
    mark: str
    small_disk: bool
    """The agent's state is on a file system of its own, which may be filled."""
    reloads: int = 0

    async def rest(self, low_s: float, high_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(low_s, high_s))

    async def until(self, holds: Callable[[], Awaitable[bool]], demand: str) -> None:
        """Raises DemandUnmet where it does not hold soon."""
        until_s = self.clock.now() + _DEMAND_S
        while not await holds():
            if self.clock.now() > until_s:
                raise DemandUnmet(demand)
            await asyncio.sleep(0.1)

    async def rosemux(self, *words: str) -> None:
        """Runs a command of an operator. Raises DemandUnmet where it fails."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "harvester.cli", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, MARK: f"{self.mark}.command"},
        )
        try:
            async with asyncio.timeout(_COMMAND_S):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise DemandUnmet(f"rosemux {words[0]} took more than {_COMMAND_S:g} s") from None
        if process.returncode != 0:
            text = output.decode(errors="replace")[-300:]
            raise DemandUnmet(f"rosemux {words[0]} ended with {process.returncode}: {text}")

    async def slot(self) -> dict[str, Any]:
        """The agent's own report of its slot; empty while it does not answer."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            url = f"{self.node.url(AGENT)}/v1/slots"
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=2.0)) as reply:
                found: dict[str, Any] = (await reply.json())["slots"][0]
                return found
        return {}


async def released(stage: FaultStage) -> bool:
    """Lifts a quarantine as an operator does once the cause is known: the harness is."""
    if (await stage.slot()).get("state") != "quarantined":
        return False
    config = str(stage.node.agent_file)
    await stage.rosemux("release", "--config", config, "--slot", SLOT, "--reason", "soak")
    return True
