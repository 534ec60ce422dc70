"""A dense transformer in plain torch operations, with the shapes of a real one and random weights.

Steps have static shapes and write into buffers of their own, so that CUDA graphs replay them. A
decode step reads all weights and the KV of its whole batch, as a serving engine's does; the token
it samples is the next step's input. Rotary embeddings are left out: they move nothing.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.gpu_slot.device import Work

_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn
        return self.layers * layer + 2 * self.vocabulary * self.hidden


LLAMA_8B = DecodeShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=128256
)
"""Llama 3.1 8B's config.json."""
TINY = DecodeShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocabulary=256)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True)
class DecodeModel:
    """Weights and one pool of KV, which all steps of the model share."""

    shape: DecodeShape
    device: torch.device
    kv_tokens: int
    """Capacity of the KV pool, in tokens."""
    _layers: list[_Layer] = field(init=False)
    _keys: list[torch.Tensor] = field(init=False)
    _values: list[torch.Tensor] = field(init=False)
    _embedding: torch.Tensor = field(init=False)
    _head: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self._layers = [
            _Layer(
                qkv=self._weight(shape.hidden, heads),
                out=self._weight(shape.heads * shape.head_dim, shape.hidden),
                gate_up=self._weight(shape.hidden, 2 * shape.ffn),
                down=self._weight(shape.ffn, shape.hidden),
            )
            for _ in range(shape.layers)
        ]
        pool = self.kv_tokens * shape.kv_heads * shape.head_dim
        self._keys = [self._weight(pool) for _ in range(shape.layers)]
        self._values = [self._weight(pool) for _ in range(shape.layers)]
        self._embedding = self._weight(shape.vocabulary, shape.hidden)
        self._head = self._weight(shape.hidden, shape.vocabulary)

    def decode(self, *, batch: int, context_tokens: int) -> Work:
        """One token for each of `batch` requests that hold `context_tokens` of KV each."""
        shape = self.shape
        tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        group = shape.heads // shape.kv_heads
        rows = batch * shape.kv_heads
        size = rows * context_tokens * shape.head_dim
        keys = [pool[:size].view(rows, context_tokens, shape.head_dim) for pool in self._keys]
        values = [pool[:size].view(rows, context_tokens, shape.head_dim) for pool in self._values]

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = self._heads(qkv)
            # The new token takes the last place of its context.
            keys[layer][:, -1] = k.reshape(rows, shape.head_dim)
            values[layer][:, -1] = v.reshape(rows, shape.head_dim)
            scores = torch.bmm(q.reshape(rows, group, shape.head_dim), keys[layer].transpose(1, 2))
            weights = torch.softmax(scores * shape.head_dim**-0.5, dim=-1)
            return torch.bmm(weights, values[layer]).reshape(batch, -1)

        def work() -> None:
            x = self._embedding[tokens]
            for number, layer in enumerate(self._layers):
                x = x + attention(number, _normed(x) @ layer.qkv) @ layer.out
                x = x + _feed_forward(_normed(x), layer)
            tokens.copy_((_normed(x) @ self._head).argmax(-1))

        return work

    def prefill(self, *, tokens: int) -> Work:
        """A prompt of `tokens`, its KV written to the pool's beginning, and its first token."""
        shape = self.shape
        prompt = torch.arange(tokens, device=self.device) % shape.vocabulary
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        size = tokens * shape.kv_heads * shape.head_dim

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in self._heads(qkv))
            self._keys[layer][:size].copy_(k.reshape(-1))
            self._values[layer][:size].copy_(v.reshape(-1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.squeeze(0).transpose(0, 1).reshape(tokens, -1)

        def work() -> None:
            x = self._embedding[prompt]
            for number, layer in enumerate(self._layers):
                x = x + attention(number, _normed(x) @ layer.qkv) @ layer.out
                x = x + _feed_forward(_normed(x), layer)
            first.copy_((_normed(x[-1:]) @ self._head).argmax(-1))

        return work

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [tokens, heads, head_dim]."""
        size, heads, kv_heads = self.shape.head_dim, self.shape.heads, self.shape.kv_heads
        both = qkv.view(qkv.shape[0], heads + 2 * kv_heads, size)
        q, k, v = torch.split(both, [heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    def _weight(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(std=_STD)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _feed_forward(x: torch.Tensor, layer: _Layer) -> torch.Tensor:
    gate, up = (x @ layer.gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ layer.down
