"""A real engine, restarted behind its port with random weights, and the fake checked against it.

Three starts of one engine: the slowest test of the gateway, and the only one of its kind.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from harvester.contracts.ids import EngineId
from harvester.contracts.wire.engines import (
    CONTINUATION_FEATURE,
    ENGINE_HEADER,
    ENGINE_ROUTE,
    WEIGHTS_FEATURE,
    EngineReport,
)
from scheduler.gateway.engines.engine_client import EngineClient
from tests.integration.gateway_in_process import PROMPT, gateway_on

CONTEXT_TOKENS = 512
TURNS = 30


async def says_with_every_reply_which_engine_it_is(url: str) -> EngineReport:
    body = {
        "request_id": "identity",
        "token_ids": PROMPT,
        "stream": True,
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "detokenize": False},
    }
    async with aiohttp.ClientSession() as session:

        async def told() -> EngineReport:
            async with session.get(url + ENGINE_ROUTE) as reply:
                report = msgspec.json.decode(await reply.read(), type=EngineReport)
                assert reply.headers[ENGINE_HEADER] == report.identity
                return report

        async def asked(path: str, given: Any, wanted: str = "") -> tuple[int, str]:
            headers = {ENGINE_HEADER: wanted} if wanted else {}
            async with session.post(url + path, json=given, headers=headers) as reply:
                await reply.read()
                return reply.status, reply.headers[ENGINE_HEADER]

        report = await told()
        async with session.get(f"{url}/health") as reply:
            assert reply.headers[ENGINE_HEADER] == report.identity
        generate = "/inference/v1/generate"
        assert await asked(generate, body, "another.0") == (412, report.identity)
        assert await asked(generate, body, report.identity) == (200, report.identity)
        assert (await asked("/collective_rpc", {"method": "rosemux_weights"}))[0] == 200
        for path in ("/pause?mode=keep", "/resume"):
            assert (await asked(path, {}))[0] == 200
        assert (await told()).identity == report.identity
        assert (await asked("/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
        assert (await asked("/start_weight_update", {}))[0] == 200
        assert (await told()).identity != report.identity
        return report


async def test_a_fake_engine_says_which_one_it_is(fake_engine) -> None:
    report = await says_with_every_reply_which_engine_it_is(fake_engine().url)
    assert WEIGHTS_FEATURE in report.description.features


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Any]:
    """Starts a dedicated engine, in the place of the one before; its weights are random."""
    pytest.importorskip("vllm")
    from benchmarks.testbed.prerequisites import free_ports
    from benchmarks.testbed.processes import Processes
    from coserve.vllm import launch
    from coserve.vllm.capabilities import capabilities, installed_vllm_version
    from examples.grpo.model import write_checkpoint
    from examples.grpo.policy_shape import PolicyShape
    from tests.integration.engine_slot import wait_for
    from tests.integration.forked_program import begin_forked

    shape = PolicyShape(
        hidden=128, intermediate=256, layers=2, heads=2, kv_heads=2, context_tokens=CONTEXT_TOKENS
    )
    write_checkpoint(tmp_path / "model", shape)
    (tmp_path / "weights").mkdir()
    spec = launch.EngineSpec(
        name="policy",
        model=tmp_path / "model",
        port=free_ports(1)[0],
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=8,
        vllm=capabilities(installed_vllm_version()),
    )
    command = launch.dedicated(spec, weights=tmp_path / "weights")
    url = f"http://127.0.0.1:{spec.port}"
    with Processes(tmp_path / "logs", begin=begin_forked) as processes:
        running = []

        def start() -> str:
            if running:
                processes.kill(running.pop())
            running.append(
                processes.start("policy", command.arguments, environment=command.environment)
            )
            wait_for(url, running[0])
            return url

        yield start


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_no_token_of_a_restarted_engine_is_labelled_with_the_version_before(
    restarted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.grpo.vocabulary import VOCABULARY_SIZE
    from tests.integration.test_guest_weights import first_state, next_state
    from weightsync.publisher import Publisher

    async def never(_client: EngineClient, **_: bool) -> bool:
        return False

    # Only a turn finds the change out.
    monkeypatch.setattr(EngineClient, "changed", never)
    url = await asyncio.to_thread(restarted)
    report = await says_with_every_reply_which_engine_it_is(url)
    told = report.description
    assert (told.model, told.architecture) == ("policy", "Qwen2ForCausalLM")
    assert (told.context_tokens, told.dtype) == (CONTEXT_TOKENS, "bfloat16")
    assert told.logprobs_mode == "processed_logprobs"
    assert told.features == (WEIGHTS_FEATURE, CONTINUATION_FEATURE)
    assert told.vocabulary == VOCABULARY_SIZE
    async with gateway_on(url, timeouts={"queue_s": 60}) as gateway:
        status, base = await gateway.generate("base", 24)
        assert (status, base["spans"][0]["version"]) == (200, 0)
        store = tmp_path / "weights" / "job.store"
        with Publisher(store) as publisher:
            ours = publisher.publish(first_state()).state_hash
        assert (await gateway.publish(1, state_hash=ours))[0] == 200
        _, before = await gateway.generate("before", 24)
        assert before["token_ids"] != base["token_ids"]
        identity = (await gateway.status())["engines"]["e0"]["identity"]
        await asyncio.to_thread(restarted)
        assert (await gateway.status())["engines"]["e0"]["version"] == 1
        for each in range(TURNS):
            status, choice = await gateway.generate(f"t{each}", 24, weight_version={"exact": 1})
            assert status == 200
            assert {span["version"] for span in choice["spans"]} == {1}
            assert choice["token_ids"] == before["token_ids"]
        assert (await gateway.status())["engines"]["e0"]["identity"] != identity

        # The trainer begins anew in the emptied store, and the engine restarts meanwhile.
        shutil.rmtree(store)
        with Publisher(store) as publisher:
            states = [next_state(first_state())]
            states.append(next_state(states[0]))
            hashes = [publisher.publish(state).state_hash for state in states]
        assert (await gateway.publish(1, state_hash=hashes[0]))[0] == 409
        assert (await gateway.generate("refused", 4, weight_version={"exact": 1}))[0] == 409
        monkeypatch.undo()
        await asyncio.to_thread(restarted)
        member = gateway.scheduler.fleet.members[EngineId("e0")]
        expects = f"is state {hashes[0]}, the caller expects {ours}"
        await gateway.until(lambda: expects in member.fault, timeout_s=60.0)
        assert (await gateway.status())["engines"]["e0"]["version"] is None
        assert (await gateway.publish(2, state_hash=hashes[1]))[0] == 200
        status, choice = await gateway.generate("new", 24, weight_version={"exact": 2})
        assert (status, choice["spans"][0]["version"]) == (200, 2)
        assert choice["token_ids"] != before["token_ids"]
