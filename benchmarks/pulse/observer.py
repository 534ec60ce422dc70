"""An agent that observes the server with the pulse, as its shipped configuration does, until it is
ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import yaml

from benchmarks.testbed.parts import Parts
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.slot import url
from harvester.platform import whole_file

SLOT = "slot-0"
_AGENT = "agent"
_SETTLE_S = 2.0


@asynccontextmanager
async def observed(parts: Parts, *, core: int | None) -> AsyncIterator[None]:
    """While its context lasts. Raises RuntimeError if it did not see the server."""
    (port,) = free_ports(1)
    file = parts.paths.run / "agent.yaml"
    config = {
        "node": "node",
        "mode": "observe",
        "page_root": str(parts.paths.pages),
        "state_dir": str(parts.paths.run / _AGENT),
        "http": {"port": port},
        "slots": [{"name": SLOT}],
    }
    whole_file.write_whole(file, yaml.safe_dump(config))
    parts.service(_AGENT, "agent", "--config", str(file), core=core)
    try:
        await parts.answers(_AGENT, url(port), lambda _: None, path="/healthz")
        await asyncio.sleep(_SETTLE_S)
        yield
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url(port)}/v1/slots") as reply,
        ):
            (slot,) = (await reply.json())["slots"]
        if slot["mode"] != "observe" or slot["idle_ratio"] is None:
            raise RuntimeError(f"the agent does not observe production: {slot['reason']}")
    finally:
        await asyncio.to_thread(parts.processes.end, parts.running.pop(_AGENT))
