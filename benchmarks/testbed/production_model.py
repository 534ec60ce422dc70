"""The production engine's model: 21 million parameters on a CPU, 8 billion on a GPU.

Its output is meaningless; only its timing counts. Written as a Hugging Face configuration with the
GRPO policy's small tokenizer and started with dummy weights, so that nothing is downloaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from examples.grpo.vocabulary import BOS_ID, PAD_ID, STOP_ID, VOCABULARY_SIZE, write_tokenizer
from harvester.contracts.errors import ConfigError

PROMPT_IDS = (4, VOCABULARY_SIZE - 1)
"""Range of token ids that a prompt may hold, both ends included."""

STEP_TOKENS = 512
"""A step's token budget, as for a deployment with a bound on the time between tokens: with vLLM's
own 2,048, every request in flight waits while four long prompts are prefilled."""

_BYTES = 2
"""Bytes of a weight, and of an element of KV, in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense transformer as its configuration says it."""

    architecture: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_theta: float = 10_000.0

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights without biases and norms, which are a few hundredths of a per
        cent."""
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_width)
        layer = attention + 3 * self.hidden * self.intermediate
        return _BYTES * (self.layers * layer + 2 * self.vocabulary * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        return _BYTES * 2 * self.layers * self.kv_heads * self.head_width


SMALL = ModelShape(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    hidden=512,
    intermediate=1408,
    layers=7,
    heads=8,
    kv_heads=4,
    vocabulary=VOCABULARY_SIZE,
)
EIGHT_BILLION = ModelShape(
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    vocabulary=128_256,
    rope_theta=500_000.0,
)
"""Llama 3.1 8B's."""


def write_production_checkpoint(
    directory: Path, *, context_tokens: int = 4096, shape: ModelShape = SMALL
) -> None:
    """Configuration and tokenizer; the engine is started with `--load-format dummy`."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is in the way")
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": max(4096, context_tokens),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": BOS_ID,
        "eos_token_id": STOP_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(directory, words=shape.vocabulary)
