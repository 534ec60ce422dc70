"""The policy: a small Qwen2-architecture transformer, and the checkpoint that engines load.

Decides shapes, initial weights and numerics of the trainer's side. Parameter names and layouts are
Hugging Face's, so that a state dict is a checkpoint. Knows nothing of tasks, losses or optimizers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from examples.grpo.policy_shape import PolicyShape
from examples.grpo.rms_norm import rms_norm
from examples.grpo.vocabulary import BOS_ID, PAD_ID, STOP_ID, VOCABULARY_SIZE, write_tokenizer


@dataclass(slots=True)
class KvCache:
    """Keys and values of one batch, per layer, each (rows, kv_heads, tokens, head_width)."""

    layers: list[tuple[Tensor, Tensor]]

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def keep_rows(self, rows: Tensor) -> None:
        self.layers = [(k[rows], v[rows]) for k, v in self.layers]


_SLOW_BF16 = not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Without AVX-512 torch multiplies bf16 matrices a hundred times slower than float32 ones. Both sum
in float32 and round the result once."""


def matmul(one: Tensor, other: Tensor) -> Tensor:
    if _SLOW_BF16 and one.dtype is torch.bfloat16:
        return torch.matmul(one.float(), other.float()).to(one.dtype)
    return torch.matmul(one, other)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if _SLOW_BF16 and x.dtype is torch.bfloat16:
            bias = None if self.bias is None else self.bias.float()
            return nnf.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        return super().forward(x)


class RmsNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._epsilon)


class Attention(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        width = shape.head_width
        self.q_proj = Linear(shape.hidden, shape.heads * width)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * width)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * width)
        self.o_proj = Linear(shape.heads * width, shape.hidden, bias=False)
        self._width = width
        self._shared_by = shape.heads // shape.kv_heads

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q = _rotated(self._heads(self.q_proj(x)), cos, sin)
        k = _rotated(self._heads(self.k_proj(x)), cos, sin)
        v = self._heads(self.v_proj(x))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        kv = (k, v)
        if self._shared_by > 1:
            k, v = (each.repeat_interleave(self._shared_by, dim=1) for each in kv)
        # Written out: the fused CPU kernel's backward is three times slower in bf16.
        scores = matmul(q * self._width**-0.5, k.transpose(-1, -2)) + mask
        mixed = matmul(torch.softmax(scores, dim=-1), v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out, kv

    def _heads(self, projected: Tensor) -> Tensor:
        rows, tokens, _ = projected.shape
        return projected.view(rows, tokens, -1, self._width).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(nnf.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class Layer(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = Mlp(shape)


class Trunk(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_epsilon)


class PolicyModel(nn.Module):
    """`state_dict()` holds a Qwen2ForCausalLM checkpoint's names and layouts."""

    def __init__(self, shape: PolicyShape, *, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden, VOCABULARY_SIZE, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, token_ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """Final hidden states (rows, tokens, hidden) of `token_ids` (rows, tokens).

        Rows may be padded at their end. With a cache the tokens follow those already in it, and
        the cache grows by them.
        """
        seen = cache.tokens if cache is not None else 0
        x = self.model.embed_tokens(token_ids)
        cos, sin, mask = self._positions(seen, token_ids.shape[1], x.dtype)
        for at, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            past = cache.layers[at] if cache is not None and seen else None
            mixed, kv = layer.self_attn(layer.input_layernorm(x), cos, sin, mask, past)
            x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if cache is not None:
                cache.layers[at : at + 1] = [kv]
        normed: Tensor = self.model.norm(x)
        return normed

    def logprobs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., vocabulary) in float32 at temperature 1."""
        return torch.log_softmax(self.lm_head(hidden).float(), dim=-1)

    def _positions(self, seen: int, new: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        width = self.shape.head_width
        frequencies = self.shape.rope_theta ** -(torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(seen, seen + new).float(), frequencies)
        both = torch.cat((angles, angles), dim=-1)
        mask = torch.full((new, seen + new), -torch.inf).triu(seen + 1)
        return both.cos().to(dtype), both.sin().to(dtype), mask.to(dtype)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, self.shape.initial_std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def write_checkpoint(
    directory: Path, shape: PolicyShape, state: Mapping[str, Tensor] | None = None
) -> None:
    """Writes what an engine loads: configuration, tokenizer and, where given, bf16 weights.

    Without `state` the directory serves an engine started with `--load-format dummy`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_hugging_face_config(shape), indent=1))
    write_tokenizer(directory)
    if state is not None:
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _hugging_face_config(shape: PolicyShape) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context_tokens,
        "max_window_layers": shape.layers,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": shape.initial_std,
        "bos_token_id": BOS_ID,
        "eos_token_id": STOP_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
    }
