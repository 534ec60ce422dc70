"""A small model whose greedy choices are clear, with a tokenizer that has text and a chat template.

Random weights of the usual size give almost equal logits, so that a rounding error moves a greedy
choice; these are larger. Computes nothing but files.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from weightsync.publisher import Publisher

VOCABULARY = 512
BOS_ID, EOS_ID, PAD_ID, THINK_ID, END_THINK_ID = 1, 2, 0, 3, 4
FIRST_ID = 5
"""First token that has text: an exclamation mark."""
REASONING = {"reasoning_start_str": "<think>", "reasoning_end_str": "Enough.</think>"}
"""vLLM's `--reasoning-config`: a budget forces an end of several tokens."""
ENGINE_ARGUMENTS = ("--dtype", "float32", "--reasoning-config", json.dumps(REASONING))
PARSER_ARGUMENTS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-parser", "deepseek_r1"),
)
"""Engines whose chats are parted into reasoning, content and calls. A grammar then rules behind the
end of reasoning, so that prompts of other routes end with it."""
_TEMPLATE = (
    "{% if tools %}<bos>tools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}"
    # A line's end right behind a block would be left out.
    "{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "assistant:{% if thinking %}<think>{% endif %}"
)


def chat_text(
    messages: Iterable[Mapping[str, str]], *, tools: Iterable[str] = (), thinks: bool = False
) -> str:
    """The template's text of a chat; `tools` are names."""
    offered = "".join(f" {name}" for name in tools)
    text = "".join(f"<bos>{one['role']}: {one['content']}\n" for one in messages)
    opened = "<think>" if thinks else ""
    return (f"<bos>tools:{offered}\n" if offered else "") + f"{text}assistant:{opened}"


def write_model(directory: Path, *, texts: Iterable[str], context_tokens: int, seed: int) -> None:
    """Configuration, weights (float32) and tokenizer of a Llama of 0.7 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        initializer_range=0.3,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    _write_tokenizer(directory, texts)


def publish_model(directory: Path, store: Path) -> str:
    """The model's weights as version 1 of a store, as a trainer publishes them; its state hash."""
    from safetensors.torch import load_file

    with Publisher(store) as publisher:
        return publisher.publish(load_file(directory / "model.safetensors")).state_hash


def _write_tokenizer(directory: Path, texts: Iterable[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>", "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        # Reasoning is text, as with the models that have it.
        token["special"] = token["id"] not in (THINK_ID, END_THINK_ID)
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": _TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
