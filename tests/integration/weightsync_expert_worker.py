"""A worker that vLLM's CPU build needs for ranks that share out experts (test_weightsync_parallel).

Its experts for CPUs are given the map from a model's experts to those of the rank and do not look
at it: the kernel takes the number of every chosen expert for one of the rank's own and reads past
its weights. Here an expert of another rank goes to the kernel as the first one with weight 0, which
is what kernels of GPUs make of the map. Nothing of weightsync is touched.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker

_given: Any = CPUUnquantizedExperts.apply


class ExpertMapWorker(CPUWorker):
    """An engine's `worker_cls`: importing it is what counts."""


def _apply(
    experts: Any, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **others: Any
) -> None:
    held = others["expert_map"]
    if held is not None:
        own = held[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(own < 0, 0)
        topk_ids = own.clamp(min=0).to(topk_ids.dtype)
    _given(experts, topk_ids=topk_ids, topk_weights=topk_weights, **others)


CPUUnquantizedExperts.apply = _apply
