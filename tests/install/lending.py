"""`python -m tests.install.lending TOKENS`, on the node: rollouts through its gateway.

Engines, agent and gateway are there already, by their units and files. The gateway's dedicated
engine is not, so that every token comes from the guest.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from harvester.config_file import load_agent_config
from tests.integration.engine_slot import answers
from tests.integration.test_shipped_path import Shipped, learn

CONFIG = Path("/etc/rosemux/agent.yaml")
PRODUCTION = "http://127.0.0.1:8000"
GATEWAY = "http://127.0.0.1:8300"
TURN_TOKENS = 128
WITHIN_S = 240.0
"""A guest in the idle class waits for whatever else this machine does."""


def wait_for_engines(slot: Shipped) -> None:
    """Raises CalledProcessError where a unit has ended instead."""
    for unit, url in (("vllm", slot.production_url), ("rosemux-guest@slot0", slot.guest_url)):
        while not answers(url):
            subprocess.run(["systemctl", "is-active", "--quiet", unit], check=True)
            time.sleep(0.5)


async def roll_out(session: aiohttp.ClientSession, number: int) -> list[dict[str, Any]]:
    """One turn; the spans of its tokens."""
    body = {
        "token_ids": [5 + (number * 31 + i) % 50 for i in range(24)],
        "sampling_params": {"max_tokens": TURN_TOKENS, "ignore_eos": True},
    }
    async with session.post("/inference/v1/generate", json=body) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    assert len(choice["token_ids"]) == TURN_TOKENS, choice
    return list(choice["spans"])


async def lend(least: int) -> None:
    slot = Shipped(load_agent_config(CONFIG, environment={}), PRODUCTION, guest=None)  # type: ignore[arg-type]
    wait_for_engines(slot)
    await learn(slot)
    turns = -(-least // TURN_TOKENS)
    async with asyncio.timeout(WITHIN_S), aiohttp.ClientSession(GATEWAY) as session:
        spans = await asyncio.gather(*(roll_out(session, number) for number in range(turns)))
        async with session.get("/v1/status") as response:
            status = await response.json()
    engines = {span["engine"] for each in spans for span in each}
    lent = status["jobs"]["job-a"]["tokens"]["guest"]
    assert len(engines) == 1, engines
    assert lent >= least, status
    ratio = slot.metric('harvester_blocking_ratio{kind="in_force",slot="slot0"}')
    print(f"{lent} tokens lent through the gateway at a blocking ratio of {ratio:g}")


if __name__ == "__main__":
    asyncio.run(lend(int(sys.argv[1])))
