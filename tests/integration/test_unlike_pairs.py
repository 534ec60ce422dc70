"""A pair that is unlike in every way: a Llama of one rank in production, beside it a Qwen2 of two.

The guest's ranks have one scheduler and so one gate, and each of them holds KV of its own.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import aiohttp
import psutil
import pytest

from examples.grpo.vocabulary import (
    BOS_ID,
    PAD_ID,
    STOP_ID,
    VOCABULARY_SIZE,
    write_tokenizer,
)
from harvester.contracts.page import GrantMode
from tests.integration.engine_slot import (
    CONTEXT_TOKENS,
    PRODUCTION,
    PRODUCTION_PULSE,
    EngineSlot,
    started_slot,
    until,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RANKS = 2


def write_llama(directory: Path) -> None:
    """Larger than the guest, with fewer KV heads than heads; weights are dummies."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": STOP_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSlot]:
    pytest.importorskip("vllm")
    with started_slot(
        tmp_path_factory.mktemp("pair"),
        production_model=write_llama,
        guest_arguments=("--tensor-parallel-size", str(RANKS)),
        start_s=500.0,
    ) as slot:
        yield slot


def workers(slot: EngineSlot) -> list[psutil.Process]:
    """The ranks, as the guest's page names its processes: the engine core, then these."""
    return [psutil.Process(process.pid) for process in slot.guest().processes[1:]]


async def complete(slot: EngineSlot, max_tokens: int) -> None:
    body = {"model": PRODUCTION, "prompt": [5, 6, 7, 8], "max_tokens": max_tokens}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{slot.production_url}/v1/completions", json=body | {"ignore_eos": True}
        ) as response,
    ):
        assert response.status == 200, await response.text()


async def test_both_ranks_stand_still_while_production_decodes_and_go_on_together(
    pair: EngineSlot,
) -> None:
    pair.agent.raise_epoch()
    pair.agent.say(
        GrantMode.OPEN,
        ttft_slo_s=10.0,
        itl_slo_s=0.0,
        epsilon=math.inf,
        pulses=(PRODUCTION_PULSE,),
    )
    alone = await pair.begin(400).ended()
    assert (len(alone.tokens), alone.finish_reason) == (400, "length")
    busy = asyncio.create_task(complete(pair, 3500))
    await until(lambda: pair.pulse().decoding == 1, "production decodes", seen=pair.pulse)
    turn = pair.begin(400)
    await pair.guest_becomes(
        lambda guest: guest.waiting == 1 and guest.reason == "no_slack", "the guest waits"
    )
    steps = pair.guest().steps_launched
    await asyncio.sleep(0.5)
    assert not busy.done(), "production's request is too short for this machine"
    assert (turn.tokens, pair.guest().steps_launched) == ([], steps)
    await busy
    await turn.ended()
    assert (turn.tokens, turn.logprobs) == (alone.tokens, alone.logprobs)


async def test_each_rank_gives_its_memory_back(pair: EngineSlot) -> None:
    pair.agent.raise_epoch()
    pair.agent.say(GrantMode.UNGATED)
    ranks = workers(pair)
    assert len(ranks) == RANKS
    for _ in range(16):
        prompt = tuple(Random(_).choices(range(5, 21), k=CONTEXT_TOKENS - 96))
        assert len((await pair.begin(1, prompt=prompt).ended()).tokens) == 1
    before = [rank.memory_info().rss for rank in ranks]
    pair.agent.say(GrantMode.CLOSED, asleep=True)
    await pair.guest_becomes(
        lambda guest: guest.kv_tokens_withheld == guest.kv_tokens_total, "everything is returned"
    )
    returned = [was - rank.memory_info().rss for was, rank in zip(before, ranks, strict=True)]
    assert min(returned) > 8 << 20
    pair.agent.say(GrantMode.UNGATED)
    assert len((await pair.begin(40).ended()).tokens) == 40
