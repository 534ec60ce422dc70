"""Weights of an 8B model, and what an optimizer step makes of them, on any device."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

State: TypeAlias = Mapping[str, torch.Tensor]

_INIT_STD = 0.02
_SAMPLE_ELEMENTS = 1 << 16
_SEARCHES = 16
_LEAST_STD = 1e-9
_PIECE_ELEMENTS = 1 << 26
"""Stepped together: a step takes some 30 bytes for each element that it steps."""
_MANTISSA_BITS = 8
"""Significant bits of bfloat16 with the leading one: exponent e has units of 2 ** (e - 8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A dense decoder with a head of its own, as checkpoints name its tensors."""

    layers: int
    hidden: int
    key_value: int
    intermediate: int
    vocabulary: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{at}.self_attn.k_proj.weight", (self.key_value, self.hidden)
            yield f"{at}.self_attn.v_proj.weight", (self.key_value, self.hidden)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{at}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{at}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


LLAMA_8B = DecoderShape(
    layers=3, hidden=4096, key_value=1024, intermediate=14_336, vocabulary=128_256
)
"""Llama-3.1-8B's tensors, three of its 32 layers: 3.4 GB, of which the host has its
share to do within a minute."""
TINY = DecoderShape(layers=1, hidden=48, key_value=16, intermediate=80, vocabulary=160)


def drawn(shape: DecoderShape, device: torch.device, *, seed: int) -> dict[str, torch.Tensor]:
    """Random weights in bfloat16; norms are about one."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: _normal(size, 1.0 if "norm" in name else 0.0, generator)
        for name, size in shape.tensors()
    }


def _normal(size: tuple[int, ...], mean: float, generator: torch.Generator) -> torch.Tensor:
    # Drawn in bfloat16, one number in a hundred would be zero.
    drawn = torch.empty(size, device=generator.device)
    return drawn.normal_(mean, _INIT_STD, generator=generator).bfloat16()


def step_std(share: float, device: torch.device) -> float:
    """Deviation of a master weight's step by which that share of published weights changes."""
    sample = _normal((_SAMPLE_ELEMENTS,), 0.0, torch.Generator(device).manual_seed(1))
    low, high = _LEAST_STD, _INIT_STD
    for _ in range(_SEARCHES):
        middle = math.sqrt(low * high)
        changed = (stepped(sample, middle, seed=2) != sample).float().mean().item()
        low, high = (middle, high) if changed < share else (low, middle)
    return high


def stepped(old: torch.Tensor, std: float, *, seed: int) -> torch.Tensor:
    """The weight after one step of its 32-bit master, published in bfloat16 as before.

    The master lies within half a unit of its published value; its step is normal, as
    Adam's where noise dominates.
    """
    generator = torch.Generator(old.device).manual_seed(seed)
    new = torch.empty_like(old)
    for start in range(0, old.numel(), _PIECE_ELEMENTS):
        before = old.view(-1)[start : start + _PIECE_ELEMENTS]
        after = new.view(-1)[start : start + _PIECE_ELEMENTS]
        master = before.float()
        _, exponent = torch.frexp(master)
        unit = torch.ldexp(torch.ones_like(master), exponent - _MANTISSA_BITS)
        within = torch.empty_like(master).uniform_(-0.5, 0.5, generator=generator)
        master += unit * within
        # Below a power of two units are half as large.
        master = torch.where(master.bfloat16() == before, master, before.float())
        after.copy_(master.add_(within.normal_(0.0, std, generator=generator)))
    return new
