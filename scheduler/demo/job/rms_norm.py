"""RMS normalisation with its backward pass written out.

Same values as the plain expression (statistics in float32, scaled back in the input's type); the
backward that autograd derives from it takes three times as long on a CPU.
"""

from typing import Any

import torch
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float() if x.dtype != torch.float32 else x.clone()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        scaled = wide.mul_(scale).to(x.dtype)
        ctx.save_for_backward(scaled, scale, weight)
        return scaled * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad = grads[0]
        scaled, scale, weight = ctx.saved_tensors
        weight_grad = (grad * scaled).flatten(0, -2).sum(0)
        weighted = grad * weight
        along = (weighted * scaled).sum(-1, keepdim=True, dtype=torch.float32)
        wide = weighted.float()
        wide.addcmul_(scaled, along, value=-1.0 / weight.shape[0]).mul_(scale)
        return wide.to(grad.dtype), weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x` (..., width) over the root mean square of its last dimension, times `weight`."""
    normed: Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed
