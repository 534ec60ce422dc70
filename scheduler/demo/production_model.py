"""The production engine's model: 21 million parameters, random, with the demo's small tokenizer.

What it says means nothing; how long it takes is what counts. Written as a Hugging Face
configuration and started with dummy weights, so that nothing is downloaded.
"""

import json
from pathlib import Path

from harvester.contracts.errors import ConfigError
from scheduler.demo.job.vocabulary import BOS_ID, PAD_ID, STOP_ID, VOCABULARY_SIZE, write_tokenizer

PROMPT_IDS = (4, VOCABULARY_SIZE - 1)
"""Range of token ids that a prompt may hold, both ends included."""

STEP_TOKENS = 512
"""A step's budget, as whoever minds the time between tokens sets it: with vLLM's own 2,048, every
request in flight waits while four long prompts are prefilled."""

_SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def write_production_checkpoint(directory: Path, *, context_tokens: int = 4096) -> None:
    """Configuration and tokenizer; the engine is started with `--load-format dummy`."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is in the way")
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY_SIZE,
        **_SHAPE,
        "max_position_embeddings": max(4096, context_tokens),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": BOS_ID,
        "eos_token_id": STOP_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(directory)
