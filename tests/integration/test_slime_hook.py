"""slime's and miles' disk deltas: read as they are, and in force behind a gateway."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import safetensors.torch
import torch

from examples import slime_hook
from harvester.contracts.ids import WeightVersion
from tests.integration.conftest import Served
from tests.integration.engine_list import EngineListTrainer
from tests.integration.gateway_in_process import gateway_on
from tests.integration.slime_writer import DeltaTrainer, State, raw
from weightsync import Receiver, TensorTarget

JOB = "job"


def states() -> tuple[State, State, State]:
    """Three versions; the last step moves one tensor."""
    torch.manual_seed(0)
    first = {"a": torch.randn(30, 20).bfloat16(), "b": torch.randn(9), "c": torch.ones(4)}
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["a"][3] *= 1.01
    second["b"][8] = float("nan")
    third = {name: tensor.clone() for name, tensor in second.items()}
    third["c"][1] = 7.0
    return first, second, third


def same(left: State, right: State) -> bool:
    return all((raw(left[name]) == raw(right[name])).all() for name in left)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_a_trainer_s_deltas_are_versions_of_the_job(
    encoding: str,
    checksum: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_engine: Callable[..., Served],
    gateway: Callable[..., Served],
) -> None:
    service = gateway(fake_engine())
    monkeypatch.setenv("ROSEMUX_GATEWAY", service.url)
    first, second, third = states()
    checkpoint, store = tmp_path / "hf", tmp_path / JOB
    checkpoint.mkdir()
    safetensors.torch.save_file(dict(first), checkpoint / "model.safetensors")
    trainer = DeltaTrainer(store, checkpoint, encoding=encoding, checksum=checksum, ranks=2)
    given = SimpleNamespace(update_weight_disk_dir=str(store), hf_checkpoint=str(checkpoint))

    slime_hook.publish(given, str(store), [])
    # A step of a warm-up from a learning rate of 0 moves nothing.
    for version, (old, new) in enumerate(
        ((first, second), (second, second), (second, third)), start=1
    ):
        written = trainer.update(new)
        for _rank in range(2):
            slime_hook.publish(given, str(written), [])
        receiver = Receiver(store, base_checkpoint=checkpoint)
        assert receiver.latest() == version
        for held, current in ((old, WeightVersion(version - 1)), (first, None)):
            target = {name: tensor.clone() for name, tensor in held.items()}
            receiver.sync(current, WeightVersion(version), TensorTarget(target))
            assert same(target, new)
        receiver.close()

    with slime_hook.RolloutClient(service.url, JOB) as client:
        choice = client.generate([1, 2], {"max_tokens": 2}, weight_version=3)
    assert {span.version for span in choice.spans} == {3}


@asynccontextmanager
async def beside_the_trainer(store: Path, url: str) -> AsyncIterator[None]:
    """The hook's program, which the trainer knows nothing of."""
    arguments = ("-m", "examples.slime_hook", str(store), url)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """URL of a real engine with random weights, its weight root, and a trainer's checkpoint."""
    pytest.importorskip("vllm")
    from tests.integration.engine_slot import served_model

    root = tmp_path_factory.mktemp("slime")
    arguments = ("--dtype", "float32")
    with served_model(root, name="policy", context_tokens=256, arguments=arguments) as url:
        yield url, root / "weights", root / "hf"


def dense(checkpoint: Path, state: State, prompt: list[int], count: int) -> tuple[Any, Any]:
    """Greedy tokens and their log-probabilities of a model that was loaded whole."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(dict(state))
    ids, logprobs = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, dim=-1)[ids[-1]]))
    return ids[len(prompt) :], logprobs


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("encoding", "checksum", "lists_engines"),
    [("overwrite", "xxh3-128", True), ("xor", "blake3", False)],
)
async def test_a_running_engine_samples_from_a_trainer_s_deltas_as_from_its_weights(
    encoding: str, checksum: str, lists_engines: bool, engine: tuple[str, Path, Path]
) -> None:
    """`lists_engines`: the gateway is the trainer's only engine; else a program tells it."""
    url, weights, checkpoint = engine
    job, prompt = f"job-{encoding}", [1, 70, 80, 90]
    state = safetensors.torch.load_file(checkpoint / "model.safetensors")
    trainer = DeltaTrainer(weights / job, checkpoint, encoding=encoding, checksum=checksum, ranks=2)
    torch.manual_seed(len(encoding))
    greedy = {"temperature": 0.0, "ignore_eos": True}
    said = []
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            gateway_on(url, jobs=[{"id": job}], timeouts={"queue_s": 60})
        )
        listed: EngineListTrainer | None = None
        if lists_engines:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            listed = EngineListTrainer(session, gateway.url, weights / job)
            await listed.attach()
        else:
            await stack.enter_async_context(beside_the_trainer(weights / job, gateway.url))
        for version, moved in enumerate(("self_attn", "mlp", "embed_tokens"), start=1):
            for name, tensor in state.items():
                if moved in name:
                    state[name] = tensor * (1 + 0.2 * torch.randn_like(tensor))
            trainer.update(state)
            if listed is not None:
                await listed.update(version)
            status, choice = await gateway.generate(
                f"v{version}",
                24,
                prompt=prompt,
                sampling=greedy,
                weight_version={"exact": version},
            )
            assert status == 200, choice
            assert {span["version"] for span in choice["spans"]} == {version}
            tokens, logprobs = await asyncio.to_thread(dense, checkpoint, state, prompt, 24)
            assert choice["token_ids"] == tokens
            told = [each["logprob"] for each in choice["logprobs"]["content"]]
            assert told == pytest.approx(logprobs, abs=1e-3)
            said.append(tokens)
    assert len({tuple(tokens) for tokens in said}) == len(said)
