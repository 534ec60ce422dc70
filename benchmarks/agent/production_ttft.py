"""Production's latencies with pulse and an observing agent, over those of a server without either.

The servers, their turns and their figures are those of benchmarks.pulse. The agent runs in the
turns of the server with the pulse alone, on production's own core.
"""

import asyncio
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent.agent_child import AgentChild
from benchmarks.pulse.__main__ import Bench
from benchmarks.pulse.__main__ import measured as measured_servers
from benchmarks.pulse.figures import Arm
from benchmarks.testbed.slot import SERVING_CORE

ROUNDS = 18
"""Six make a balanced order of three arms."""
_SETTLE_S = 2.0


@dataclass(slots=True)
class ObservedBench(Bench):
    arms: Sequence[Arm] = (Arm.STOCK, Arm.PULSE, Arm.TWIN)

    @asynccontextmanager
    async def _level(self, arm: Arm, url: str) -> AsyncIterator[None]:  # noqa: ARG002
        if arm is not Arm.PULSE:
            yield
            return
        root, core = self.parts.paths.run / "agent", self.hardware.core(SERVING_CORE)
        root.mkdir(exist_ok=True)
        agent = AgentChild(
            root,
            {
                "mode": "observe",
                "unsafe_experiments": False,
                "page_root": str(self.parts.paths.pages),
                "slots": [{"name": "slot-0"}],
            },
            before="" if core is None else f"taskset -cp {core} $$",
        )
        try:
            await asyncio.to_thread(agent.start)
            await asyncio.sleep(_SETTLE_S)
            yield
            (slot,) = agent.call("GET", "/v1/slots")[1]["slots"]
            if slot["mode"] != "observe" or slot["idle_ratio"] is None:
                raise RuntimeError(f"the agent does not observe production: {slot['reason']}")
        finally:
            agent.end()


def production_ttft(json: Path, *, trace: Path | None, rounds: int, seed: int) -> dict[str, Any]:
    """Ratios over the server without anything; `twin` is the noise floor."""
    given = Namespace(hardware=None, trace=trace, rounds=rounds, seed=seed, json=json)
    found = measured_servers(given, ObservedBench)
    kept = ("trace", "hardware", "requests", "failed", "core_ms_per_request")
    return {
        **{name: found[name] for name in kept},
        "twin": found[Arm.TWIN],
        "observed": found[Arm.PULSE],
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
    }
