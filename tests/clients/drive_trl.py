"""TRL: its vLLM client's generation half, then GRPO through `rollout_func`.

The client's other half pushes weights by NCCL into a group of ranks: it must end at once.
GRPO trains on turns of our engines, the harvested one included: each step publishes the policy to
the store, and each rollout is pinned to the version of its step.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from harvester.contracts.clock import MonotonicClock
from tests.clients.client_facts import JOB, MODEL, STORE, URL, Facts
from weightsync import Publisher

LOW_IDS = 256
"""The reward is the share of token ids below this one, half of the vocabulary."""
MAX_TOKENS = 16
GENERATIONS = 8
STEPS = 16
WORDS_S = 20.0
"""A push that cannot be is refused in less."""
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")


class StoreSync:
    """The policy's versions: published to the store, announced to the gateway."""

    def __init__(self) -> None:
        self._publisher = Publisher(STORE, announce=f"{URL}/v1/jobs/{JOB}")
        self.version = 0
        self._step = -1

    def follow(self, step: int, model: torch.nn.Module) -> None:
        """Publishes the model of a step, once."""
        if step == self._step:
            return
        self._step = step
        published = self._publisher.publish(model.state_dict())
        assert self._publisher.announced(60.0), "every dedicated engine serves it"
        self.version = published.version


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(each < LOW_IDS for each in ids) / len(ids) for ids in completion_ids]


def check_client(client: VLLMClient, sync: StoreSync, facts: Facts) -> None:
    """`generate` and `chat`, as GRPO's server mode calls them."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    sync.follow(0, model)
    told = client.generate(["A lease ends.", "An engine"], n=3, max_tokens=MAX_TOKENS, logprobs=0)
    assert [len(told["prompt_ids"]), len(told["completion_ids"])] == [2, 6], told
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    talked = client.chat(chats, n=2, max_tokens=MAX_TOKENS, logprobs=0)
    assert len(talked["completion_ids"]) == 2 * len(chats), talked
    for reply in (told, talked):
        for ids, logprobs, of_ids in zip(
            reply["completion_ids"], reply["logprobs"], reply["logprob_token_ids"], strict=True
        ):
            assert [each[0] for each in of_ids] == ids
            facts.turn(ids, [each[0] for each in logprobs], versions=[sync.version])
    _check_logprobs(told, model)


def _check_logprobs(told: dict[str, list[Any]], model: torch.nn.Module) -> None:
    """The trainer's own model gives the same log-probabilities as the engines."""
    for index, ids in enumerate(told["completion_ids"]):
        prompt = told["prompt_ids"][index // 3]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, dim=-1)[range(len(ids)), ids]
        theirs = torch.tensor([each[0] for each in told["logprobs"][index]])
        assert (own - theirs).abs().max() < 1e-3, (own, theirs)


def check_pushes(client: VLLMClient) -> None:
    """The calls of `vllm_mode="server"`; the client generates on after each."""
    clock = MonotonicClock()
    began_s = clock.now()
    refused = {}
    for name, push in (
        ("init_communicator", client.init_communicator),
        ("update_named_param", lambda: client.update_named_param("w", torch.zeros(4))),
        ("update_model_params", lambda: client.update_model_params(torch.nn.Linear(4, 4))),
    ):
        try:
            push()
        except Exception as error:
            refused[name] = str(error)
        client.reset_prefix_cache()
    assert clock.now() - began_s < WORDS_S
    assert len(refused) == 3, refused
    assert "has no weight-transfer engine" in refused["init_communicator"], refused


def train(client: VLLMClient, sync: StoreSync, facts: Facts) -> list[float]:
    """Mean reward of each step."""

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        sync.follow(trainer.state.global_step, trainer.model)
        ids = [
            trainer.processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False
            )
            for prompt in prompts
        ]
        told = client.generate(
            ids,
            max_tokens=trainer.args.max_completion_length,
            temperature=trainer.temperature,
            generation_kwargs={"weight_version": {"exact": sync.version}},
        )
        logprobs = [[each[0] for each in one] for one in told["logprobs"]]
        for token_ids, own in zip(told["completion_ids"], logprobs, strict=True):
            facts.turn(token_ids, own, versions=[sync.version])
        return {
            "prompt_ids": told["prompt_ids"],
            "completion_ids": told["completion_ids"],
            "logprobs": logprobs,
        }

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=low_ids,
        train_dataset=_questions(),
        rollout_func=rollout,
        args=GRPOConfig(
            output_dir=str(Path("trl").resolve()),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4 * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=MAX_TOKENS,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return [log["reward"] for log in trainer.state.log_history if "reward" in log]


def _questions() -> Dataset:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return Dataset.from_dict({"prompt": prompts * STEPS})


def main() -> None:
    facts = Facts()
    client = VLLMClient(base_url=URL, connection_timeout=10.0)
    sync = StoreSync()
    check_pushes(client)
    check_client(client, sync, facts)
    rewards = train(client, sync, facts)
    print(rewards, file=sys.stderr)
    assert len(rewards) == STEPS, rewards
    assert rewards[-1] > rewards[0] + 0.1, rewards
    facts.report(client=trl.__version__, rewards=[round(each, 3) for each in rewards])


if __name__ == "__main__":
    main()
