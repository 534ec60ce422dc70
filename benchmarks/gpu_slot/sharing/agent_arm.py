"""The shipped agent beside both engines: started for one arm, with a lease held until its end.

A fresh agent for each arm, so that no arm inherits the caution that another one taught it.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yaml

from benchmarks.gpu_slot.ended_process import ended
from benchmarks.testbed.held_lease import HeldLease
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.slot import SLOT
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageDirectory
from harvester.platform.parent import end_with
from scheduler.gateway.capacity.agent_client import AgentClient

_START_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class AgentArm:
    pages: PageDirectory
    """Pages of a slot named SLOT."""
    policy: Mapping[str, Any]
    """Settings over the shipped defaults."""
    experiment: bool = False
    """Whether the policy goes beyond the protection of production."""

    @asynccontextmanager
    async def leased(self) -> AsyncIterator[None]:
        """Raises ConfigError where the agent does not start or gives no lease."""
        [port] = free_ports(1)
        with TemporaryDirectory(prefix="rosemux-agent-") as directory:
            config = Path(directory, "agent.yaml")
            config.write_text(yaml.safe_dump(self._config(port, Path(directory, "state"))))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "harvester.cli", "agent", "--config", str(config)),
                *("--log-level", "warning"),
                preexec_fn=partial(end_with, os.getpid()),
            )
            url = f"http://127.0.0.1:{port}"
            try:
                async with aiohttp.ClientSession() as session:
                    await _answers(session, url, process)
                    async with HeldLease(AgentClient(session, url, timeout_s=5.0)).holding():
                        yield
            finally:
                await ended(process, process.terminate)

    def _config(self, port: int, state: Path) -> dict[str, Any]:
        return {
            "mode": "harvest",
            "unsafe_experiments": self.experiment,
            "page_root": str(self.pages.path.parent),
            "state_dir": str(state),
            "http": {"port": port},
            "slots": [{"name": SLOT, "policy": dict(self.policy)}],
        }


async def _answers(
    session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process
) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            while process.returncode is None:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/healthz") as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(_POLL_S)
    raise ConfigError(f"the agent did not answer within {_START_S:.0f} s (its log stands above)")
