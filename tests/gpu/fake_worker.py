"""A worker with the memory parts of an engine, each of a known size: tied weights, a buffer, KV, a
captured graph and activations."""

import os
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
WEIGHTS_BYTES = 64 * MIB + 16 * MIB
KV_BYTES = 3 * 32 * MIB
GRAPH_BYTES = 24 * MIB
ACTIVATIONS_BYTES = 48 * MIB


class FakeWorker:
    """The attributes of vLLM's worker that `memory_report.report` reads."""

    def __init__(self, device: str) -> None:
        import torch

        def taken(size: int) -> Any:
            return torch.zeros(size, dtype=torch.uint8, device=device)

        self._torch = torch
        self._model = torch.nn.Module()
        self._model.embedding = torch.nn.Parameter(
            taken(64 * MIB).view(torch.bfloat16), requires_grad=False
        )
        self._model.head = self._model.embedding
        self._model.register_buffer("scale", taken(16 * MIB))
        kv = taken(2 * 32 * MIB)
        # Some layouts share an allocation between layers, others nest tensors.
        caches = [kv[: 32 * MIB], [kv[32 * MIB :], taken(32 * MIB)]]
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.model_runner = SimpleNamespace(get_model=lambda: self._model, kv_caches=caches)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
        self._activations = taken(ACTIVATIONS_BYTES)
        self._graph = self._captured(taken(16)) if device == "cuda" else None

    def report(self) -> dict[str, Any]:
        import msgspec

        from coserve.vllm.memory_report import process_bytes, report

        memory = msgspec.to_builtins(report(self))
        if self.device.type == "cpu":
            return {"memory": memory}
        cuda = self._torch.cuda
        uuid = str(cuda.get_device_properties(self.device).uuid)
        return {
            "memory": memory,
            "driver_bytes": process_bytes(uuid, os.getpid()),
            "reserved_bytes": cuda.memory_reserved(self.device),
        }

    def _captured(self, seed: Any) -> tuple[Any, Any]:
        """A graph and its output, which lies in the graph's own pool."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            written = seed.repeat(GRAPH_BYTES // seed.numel())
        graph.replay()
        self._torch.cuda.synchronize()
        return graph, written
