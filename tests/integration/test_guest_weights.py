"""Weights reach a real guest while its gate is closed, under the gateway's own calls."""

from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from examples.grpo.model import PolicyModel
from harvester.contracts.ids import WeightVersion
from harvester.contracts.page import GrantMode
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.identity import HeldWeights
from tests.integration.engine_slot import SHAPE, EngineSlot

pytestmark = pytest.mark.engine

State = dict[str, torch.Tensor]


def first_state() -> State:
    return {
        name: tensor.detach().to(torch.bfloat16)
        for name, tensor in PolicyModel(SHAPE, seed=3).state_dict().items()
    }


def next_state(state: State) -> State:
    """A tenth of the weights move, as in a training step at bfloat16's grain."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.where(
            torch.rand(tensor.shape, generator=generator) < 0.1, tensor.float() * 1.25, tensor
        ).to(torch.bfloat16)
        for name, tensor in state.items()
    }


async def held(session: aiohttp.ClientSession, slot: EngineSlot) -> tuple[str, dict[str, Any]]:
    """The version that vLLM reports, and the guest's report of its weights in memory."""
    async with session.get(f"{slot.guest_url}/weight_info") as response:
        version = (await response.json())["weight_version"]
    body = {"method": "rosemux_weights"}
    async with session.post(f"{slot.guest_url}/collective_rpc", json=body) as response:
        report: dict[str, Any] = (await response.json())["results"][0]
    return version, report


async def test_versions_pass_a_closed_gate_and_a_waiting_turn_samples_with_the_newest(
    engine_slot: EngineSlot,
) -> None:
    from weightsync.publisher import Publisher

    slot, agent = engine_slot, engine_slot.agent
    agent.raise_epoch()
    agent.say(GrantMode.UNGATED)
    with_dummy = await slot.begin(16).ended()
    agent.say(GrantMode.CLOSED)
    waiting = slot.begin(16)
    await slot.guest_becomes(lambda guest: guest.waiting == 1, "a turn waits")
    steps = slot.guest().steps_launched
    state = first_state()
    async with aiohttp.ClientSession() as session:
        client = EngineClient(session, slot.guest_url, connect_s=10.0)
        with closing(client), Publisher(Path(slot.weights) / "job") as publisher:
            for number in (1, 2):
                published = publisher.publish(state)
                staged = await client.stage(
                    store="job", version=WeightVersion(number), timeout_s=60.0
                )
                assert staged.ready
                await client.switch(HeldWeights("job", number), timeout_s=120.0)
                version, report = await held(session, slot)
                assert version == str(number)
                assert report["store"] == "job"
                assert report["version"] == number
                assert report["state_hash"] == published.state_hash
                assert report["from_full"] == (number == 1)
                state = next_state(state)
    assert slot.guest().steps_launched == steps
    assert waiting.tokens == []
    agent.say(GrantMode.UNGATED)
    await waiting.ended()
    assert (len(waiting.tokens), waiting.finish_reason) == (16, "length")
    again = await slot.begin(16).ended()
    assert waiting.tokens == again.tokens
    assert waiting.logprobs == again.logprobs
    assert waiting.logprobs != with_dummy.logprobs
