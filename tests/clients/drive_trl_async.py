"""TRL's AsyncGRPOTrainer: its own rollout worker asks the gateway, its weights go by our store.

The trainer needs CUDA for two things, which stand in here: FlashAttention 3, which torch computes
under the kernel's name in transformers' own register of attentions, and the device's name, for its
FLOPS. All else is TRL's. Its own transfer of weights, by NCCL, must end in words.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from examples.trl_weight_transfer import StoreTransfer
from harvester.contracts.clock import MonotonicClock
from tests.clients.client_facts import JOB, MODEL, STORE, URL, Facts

LOW_IDS = 256
"""The reward is the share of token ids below this one, half of the vocabulary."""
MAX_TOKENS = 16
GENERATIONS = 8
STEPS = 8
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")
REPLIES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {"content": {"content": "text"}},
}
"""Replies of the test model's chat template, which TRL does not know."""
WORDS_S = 20.0
"""A refusal is there in less."""


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(each < LOW_IDS for each in ids) / len(ids) for ids in completion_ids]


def attention_on_cpu(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Each segment of the tree attends to the path that ends with it, causally."""
    parts = []
    ends_q, ends_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for at in range(len(ends_q) - 1):
        rows = slice(ends_q[at], ends_q[at + 1])
        path = tree_kv_index[ends_k[at] : ends_k[at + 1]]
        asked = query[:, :, rows]
        length = asked.shape[2]
        seen = torch.ones(length, len(path), dtype=torch.bool).tril(len(path) - length)
        parts.append(
            scaled_dot_product_attention(
                asked,
                key[:, :, path],
                value[:, :, path],
                attn_mask=seen,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


class Seen:
    """The trainer's queue of samples, and what it took from it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.samples: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        self.samples.append(sample)
        return sample


def check_refusal() -> None:
    """Without `weight_transfer` the trainer would open a group of NCCL."""
    client = WeightTransferClient(
        VLLMClient(URL), {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
    )
    clock = MonotonicClock()
    began_s = clock.now()
    try:
        client.init_weight_transfer()
    except RuntimeError as error:
        refused = f"{error}: {error.__cause__}"
    assert "not through a process group" in refused, refused
    assert clock.now() - began_s < WORDS_S


def train(transfer: StoreTransfer) -> tuple[list[float], list[Any]]:
    """Mean reward of each step, and the samples that TRL trained on."""
    torch.cuda.get_device_name = lambda _device: "a CPU"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.response_template = REPLIES
    trainer = AsyncGRPOTrainer(
        model=str(MODEL),
        processing_class=tokenizer,
        reward_funcs=low_ids,
        train_dataset=_questions(),
        weight_transfer=transfer,
        args=AsyncGRPOConfig(
            output_dir=str(Path("trl-async").resolve()),
            vllm_server_base_url=URL,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4 * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=MAX_TOKENS,
            max_steps=STEPS,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    AttentionInterface.register(TREE_ATTENTION, attention_on_cpu)
    trainer.rollout_queue = seen = Seen(trainer.rollout_queue)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return rewards, seen.samples


def _questions() -> Dataset:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return Dataset.from_dict({"prompt": prompts * STEPS})


def main() -> None:
    facts = Facts()
    transfer = StoreTransfer(STORE, f"{URL}/v1/jobs/{JOB}", timeout_s=60.0)
    rewards, samples = train(transfer)
    for sample in samples:
        made = sample.completion_mask.astype(bool)
        facts.turn(sample.input_ids[made].tolist(), sample.old_log_probs[made].tolist())
    print(rewards, file=sys.stderr)
    assert len(rewards) == STEPS, rewards
    check_refusal()
    # TRL's rollouts run ahead of its training: some are left over at the end.
    facts.report(client=trl.__version__, rewards=[round(r, 3) for r in rewards], whole=False)


if __name__ == "__main__":
    main()
