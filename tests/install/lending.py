"""`python -m tests.install.lending TOKENS`, on the node: a scheduler's lease and rollouts on it.

The engines and the agent are there already, by their units and the agent's file.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from harvester.config import load_agent_config
from tests.integration.engine_slot import answers
from tests.integration.test_shipped_path import Shipped, learn, leased, loaded

CONFIG = Path("/etc/rosemux/agent.yaml")
PRODUCTION = "http://127.0.0.1:8000"
WITHIN_S = 240.0
"""A guest in the idle class waits for whatever else this machine does."""


def wait_for_engines(slot: Shipped) -> None:
    """Raises CalledProcessError where a unit has ended instead."""
    for unit, url in (("vllm", slot.production_url), ("rosemux-guest@slot0", slot.guest_url)):
        while not answers(url):
            subprocess.run(["systemctl", "is-active", "--quiet", unit], check=True)
            time.sleep(0.5)


async def lend(least: int) -> None:
    slot = Shipped(load_agent_config(CONFIG, environment={}), PRODUCTION, guest=None)  # type: ignore[arg-type]
    wait_for_engines(slot)
    await learn(slot)
    async with leased(slot) as epoch, loaded(slot, epoch) as turns:

        def tokens() -> int:
            return sum(len(turn.tokens) for turn in turns)

        async with asyncio.timeout(WITHIN_S):
            while tokens() < least:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
        ratio = slot.metric('harvester_blocking_ratio{kind="in_force",slot="slot0"}')
    print(f"{tokens()} tokens lent at a blocking ratio of {ratio:g}")


if __name__ == "__main__":
    asyncio.run(lend(int(sys.argv[1])))
