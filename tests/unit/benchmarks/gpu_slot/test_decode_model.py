"""The decode step does a transformer's work, on any device."""

import pytest
import torch

from benchmarks.gpu_slot.decode_model import LLAMA_8B, TINY, DecodeModel
from benchmarks.gpu_slot.device import CpuDevice


def test_the_8b_shape_has_the_model_s_parameters_and_kv() -> None:
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=0.01)
    assert LLAMA_8B.kv_bytes_per_token == 131072


def test_a_prefill_fills_the_kv_that_decodes_read() -> None:
    torch.manual_seed(0)
    model = DecodeModel(TINY, torch.device("cpu"), kv_tokens=64)
    before = model._keys[0].clone()
    CpuDevice().captured(model.prefill(tokens=8))()
    size = 8 * TINY.kv_heads * TINY.head_dim
    assert not torch.equal(model._keys[0][:size], before[:size])
    assert torch.equal(model._keys[0][size:], before[size:])
    assert all(torch.isfinite(keys).all() for keys in model._keys)


def test_a_decode_s_attention_is_torch_s_own() -> None:
    """Held against scaled_dot_product_attention on the same KV, one layer of one request."""
    torch.manual_seed(0)
    model = DecodeModel(TINY, torch.device("cpu"), kv_tokens=16)
    seen: dict[str, torch.Tensor] = {}
    real = torch.bmm

    def bmm(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = real(one, other)
        seen.setdefault("q" if "q" not in seen else "mixed", one if "q" not in seen else found)
        return found

    torch.bmm = bmm  # type: ignore[assignment]
    try:
        model.decode(batch=1, context_tokens=16)()
    finally:
        torch.bmm = real  # type: ignore[assignment]
    rows = (TINY.kv_heads, 16, TINY.head_dim)
    keys, values = model._keys[0].view(rows), model._values[0].view(rows)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        seen["q"].float(), keys.float(), values.float()
    )
    assert torch.allclose(seen["mixed"].float(), wanted, atol=1e-2)
