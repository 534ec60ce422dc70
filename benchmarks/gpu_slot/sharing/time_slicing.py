"""CUDA's default: two processes with contexts that take turns on the GPU. On a CPU, its idle class.

Here the shipped agent is measured as well, each arm with an agent that has just started.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from benchmarks.gpu_slot.engines.children import engine
from benchmarks.gpu_slot.engines.orders import EngineSetting
from benchmarks.gpu_slot.results import Put
from benchmarks.gpu_slot.sharing.agent_arm import AgentArm
from benchmarks.gpu_slot.sharing.pair import FULL, REHEARSED, Sharing, Sizes
from benchmarks.testbed.slot import SLOT
from coserve.guest.gpus import gpus
from coserve.guest.isolation import Isolation, choose
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.page import PageDirectory
from harvester.contracts.page.records import Law

_NO_BRAKES = {
    "misses": {"limit_ratio": 0.999, "minimum_misses": 1e9},
    "budget": {"enforced": False},
    "proof": {"share_ratio": 0.0},
}
"""Another project's law is measured without our guards."""


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    with TemporaryDirectory(prefix="rosemux-", dir="/dev/shm") as root:
        pages = PageDirectory.create(Path(root, SLOT))
        asyncio.run(_measure(kind, tiny, pages, put))


async def _measure(kind: str, tiny: bool, pages: PageDirectory, put: Put) -> None:
    isolation = _isolation(kind)
    put("isolation", isolation.statement)
    sizes = REHEARSED if tiny else FULL
    shared = EngineSetting(kind=kind, tiny=tiny, pages=str(pages.path), isolation=isolation.backend)
    environment = dict(isolation.environment)
    async with (
        engine(replace(shared, production=sizes.production), environment) as production,
        engine(replace(shared, guest=sizes.guest), environment) as guest,
    ):
        put("start_s", {"production": production.ready.start_s, "guest": guest.ready.start_s})
        await Sharing(production, guest, pages, sizes, put).measure(_arms(pages, sizes))


def _isolation(kind: str) -> Isolation:
    return choose(gpus=gpus()) if kind == "cuda" else choose(IsolationBackend.IDLE)


def _arms(pages: PageDirectory, sizes: Sizes) -> dict[str, AgentArm]:
    # A fresh slot has not seen its prompts yet, which would make every round another experiment:
    # the phantom is the prompt by which production's pulse would come to judge.
    # Nor is its first half hour measured, in which a quarter of the time is withheld.
    known = {"phantom_prompt_tokens": min(sizes.prompts), "proof": {"proving_s": 0.0}}
    rose = {"law": Law.ROSE.value, **_NO_BRAKES}
    return {
        "shipped": AgentArm(pages, known),
        "epsilon_0.25": AgentArm(pages, {**known, "epsilon": 0.25}),
        "epsilon_1": AgentArm(pages, {**known, "epsilon": 1.0}),
        "rose_law": AgentArm(pages, rose, experiment=True),
    }
