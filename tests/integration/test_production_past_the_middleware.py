"""Real production engines with an operator's mistake: the flag forgotten, a variable misspelt.

Each test starts one engine; the guest and its slot are the session's.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from examples.grpo.model import write_checkpoint
from harvester.agent.sense import SlotSensor
from harvester.contracts.ids import Epoch
from harvester.contracts.page import GrantMode, Pulse, pulse_page
from harvester.policy.production import ProductionWatch
from harvester.policy.sample import KillSwitch, LeaseView
from harvester.policy.settings import ProfileSettings, SlotSettings
from harvester.policy.states import Condition
from tests.integration.engine_slot import (
    CONTEXT_TOKENS,
    SHAPE,
    EngineSlot,
    completed,
    until,
    wait_for,
)
from tests.integration.forked_program import begin_forked

pytestmark = pytest.mark.engine

NAME = "mistaken"


@contextmanager
def production(
    root: Path, pages: Path, *, flag: bool = True, **variables: str
) -> Iterator[tuple[str, Child]]:
    write_checkpoint(root / NAME, SHAPE)
    (port,) = free_ports(1)
    spec = EngineSpec(
        name=NAME, model=root / NAME, port=port, max_model_len=CONTEXT_TOKENS, max_num_seqs=8,
        vllm=capabilities(installed_vllm_version()), extra_arguments=("--load-format", "dummy"),
    )  # fmt: skip
    command = launch.production(spec, pages=pages)
    arguments = list(command.arguments)
    if not flag:
        place = arguments.index("--middleware")
        del arguments[place : place + 2]
    environment = {**command.environment, **variables}
    with Processes(root / "logs", begin=begin_forked) as processes:
        child = processes.start(NAME, arguments, environment=environment)
        url = f"http://127.0.0.1:{port}"
        wait_for(url, child)
        yield url, child


def pulse_of(slot: EngineSlot, page: str) -> Pulse:
    reader = slot.pages.pulse_reader(page)
    try:
        return reader.read_left().record or Pulse()
    finally:
        reader.close()


def condition_of(slot: EngineSlot, page: str) -> tuple[Condition | None, str]:
    """Condition and reason by a node agent's watch with a profile."""
    settings = SlotSettings(profile=ProfileSettings(prefill_base_s=0.01, decode_base_s=0.01))
    sensor = SlotSensor(slot.pages, pulses=(page,))
    try:
        sample = sensor.sample(lease=LeaseView(epoch=Epoch(1)), kill_switch=KillSwitch.NONE)
    finally:
        sensor.close()
    view = ProductionWatch(settings).observe(sample.pulses, now=100.0)
    return view.condition, view.reason


async def test_beside_production_without_its_middleware_a_guest_gets_no_token(
    engine_slot: EngineSlot, tmp_path: Path
) -> None:
    """The gate is open and its grant knows production's step times: only the engine's own word
    stands between the guest and production."""
    slot, page = engine_slot, pulse_page(NAME, 0)
    with production(tmp_path, slot.pages.path, flag=False) as (url, _):
        slot.agent.raise_epoch()
        slot.agent.say(
            GrantMode.OPEN, ttft_slo_s=10.0, itl_slo_s=0.0, epsilon=math.inf, pulses=(page,)
        )
        assert len((await slot.begin(4).ended()).tokens) == 4, "idle production leaves slack"
        quiet = asyncio.Event()

        async def follow_one_another(max_tokens: int) -> None:
            while not quiet.is_set():
                await completed(url, NAME, max_tokens)

        clients = [asyncio.create_task(follow_one_another(length)) for length in (1700, 2300, 2900)]
        await until(
            lambda: sum(core.running for core in pulse_of(slot, page).cores) == 3,
            "the engine decodes",
            seen=lambda: pulse_of(slot, page),
        )
        turn = slot.begin(40)
        await slot.guest_becomes(
            lambda guest: guest.waiting == 1 and guest.reason == "no_slack", "the guest waits"
        )
        steps = slot.guest().steps_launched
        await asyncio.sleep(1.0)
        assert (turn.tokens, slot.guest().steps_launched) == ([], steps)
        pulse = pulse_of(slot, page)
        assert (pulse.in_flight, pulse.requests_total, pulse.middleware) == (0, 0, False)
        assert pulse.unseen_steps_total > 0
        assert pulse.busy_s_total > 0.5
        condition, reason = condition_of(slot, page)
        assert condition is Condition.UNSEEN
        assert "--middleware coserve.vllm.middleware.PulseMiddleware" in reason
        quiet.set()
        await asyncio.gather(*clients)
        assert len((await turn.ended()).tokens) == 40, "idle again, by the engine's own word"


async def test_with_variables_misspelt_production_serves_as_stock(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    with production(tmp_path, pages, ROSEMUX_ENGINE="qwen/2.5") as (url, child):
        assert await completed(url, NAME, 8) == 8
        said = child.log.read_text(errors="replace")
        assert said.count("RoseMux is off in this process, vLLM serves as stock: ConfigError") >= 1
        assert "ROSEMUX_ENGINE" in said
        assert list(pages.iterdir()) == []
