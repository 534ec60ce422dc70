"""A handful of vLLM's own kernels against torch: proof that stripped libraries still have them.

Each probe raises where a kernel is missing for this GPU or differs from torch. Tiny shapes, some
MiB of device memory.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS = 8, 2, 128, 16
TOKENS = 40
"""Neither a multiple of a block nor of a warp."""


def rms_norm(device: str) -> None:
    hidden = _random(TOKENS, 512, device=device)
    weight = _random(512, device=device)
    normed = torch.empty_like(hidden)
    torch.ops._C.rms_norm(normed, hidden, weight, 1e-6)
    expected = functional.rms_norm(hidden.float(), (512,), weight.float(), 1e-6)
    _alike(normed, expected)


def silu_and_mul(device: str) -> None:
    gate_up = _random(TOKENS, 512, device=device)
    out = torch.empty(TOKENS, 256, dtype=gate_up.dtype, device=device)
    torch.ops._C.silu_and_mul(out, gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    _alike(out, functional.silu(gate) * up)


def paged_attention(device: str) -> None:
    """Write keys and values into a paged cache, then read them with FlashAttention 3."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    query = _random(TOKENS, HEADS, HEAD_SIZE, device=device)
    key = _random(TOKENS, KV_HEADS, HEAD_SIZE, device=device)
    value = _random(TOKENS, KV_HEADS, HEAD_SIZE, device=device)
    blocks = -(-TOKENS // BLOCK_TOKENS)
    cache = torch.zeros(
        2, blocks, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE, dtype=query.dtype, device=device
    )
    scale = torch.ones(1, dtype=torch.float32, device=device)
    slots = torch.arange(TOKENS, device=device)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, cache[0], cache[1], slots, "auto", scale, scale
    )
    out = flash_attn_varlen_func(
        q=query,
        k=cache[0],
        v=cache[1],
        max_seqlen_q=TOKENS,
        cu_seqlens_q=torch.tensor([0, TOKENS], dtype=torch.int32, device=device),
        max_seqlen_k=TOKENS,
        seqused_k=torch.tensor([TOKENS], dtype=torch.int32, device=device),
        softmax_scale=HEAD_SIZE**-0.5,
        causal=True,
        block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        fa_version=3,
    )
    _alike(out, attention(query, key, value))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence in float32; shapes (tokens, heads, head size)."""
    groups = query.shape[1] // key.shape[1]
    out = functional.scaled_dot_product_attention(
        query.float().transpose(0, 1),
        key.float().repeat_interleave(groups, 1).transpose(0, 1),
        value.float().repeat_interleave(groups, 1).transpose(0, 1),
        is_causal=True,
    )
    return out.transpose(0, 1)


PROBES: tuple[Callable[[str], None], ...] = (rms_norm, silu_and_mul, paged_attention)


def _random(*shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)


def _alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)
