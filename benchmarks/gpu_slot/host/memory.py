"""The guest's memory report against the driver's and torch's own figures.

A small model, KV, a CUDA graph with its private pool and activations stand for a guest's worker.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from benchmarks.gpu_slot.device import Device
from coserve.vllm.memory_report import nvml, process_bytes, report
from harvester.contracts.clock import monotonic_ns

_DEFAULT_POOL = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    width: int
    layers: int
    kv_layers: int
    kv_elements: int
    tokens: int
    """Rows of the product that is captured in a graph."""


_FULL = _Sizes(width=4096, layers=8, kv_layers=8, kv_elements=64 << 20, tokens=8192)
_TINY = _Sizes(width=32, layers=2, kv_layers=2, kv_elements=4096, tokens=16)


def context_facts(kind: str) -> dict[str, Any]:
    """Device memory that the first CUDA call and the first matrix product of a process take."""
    if kind != "cuda":
        return {"not_here": "no GPU"}
    before = _device_used_bytes()
    began_ns = monotonic_ns()
    torch.empty(1, device="cuda:0")
    torch.cuda.synchronize()
    first_call_s = (monotonic_ns() - began_ns) * 1e-9
    with_context = _device_used_bytes()
    reserved = torch.cuda.memory_reserved()
    began_ns = monotonic_ns()
    square = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda:0")
    (square @ square).sum().item()
    first_product_s = (monotonic_ns() - began_ns) * 1e-9
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "first_call_s": first_call_s,
        "device_used_bytes_before": before,
        "context_bytes": _difference(with_context, before, reserved),
        "first_product_s": first_product_s,
        "with_libraries_bytes": _difference(
            _device_used_bytes(), before, torch.cuda.memory_reserved()
        ),
        "own_process_bytes": _own_process_bytes(),
        "process_known_to_nvml": _own_process_bytes() is not None,
        "pids_of_nvml": _pids(),
        "own_pid": os.getpid(),
        "used_bytes_by_cuda": total_bytes - free_bytes,
        "used_bytes_by_nvml": _device_used_bytes(),
    }


def report_facts(device: Device, *, tiny: bool) -> dict[str, Any]:
    """`memory_report.report` of a fake worker, and the errors of its parts."""
    sizes = _TINY if tiny else _FULL
    on = device.torch_device
    model = _model(sizes, on)
    kv = [
        torch.zeros(sizes.kv_elements, dtype=torch.bfloat16, device=on)
        for _ in range(sizes.kv_layers)
    ]
    replay = device.captured(_step(model, sizes, on))
    activation = torch.empty(sizes.tokens, 4 * sizes.width, dtype=torch.bfloat16, device=on)
    # The allocator keeps the activations' memory: the report counts it as theirs.
    del activation
    replay()
    device.synchronize()
    memory = report(_worker(model, kv, on))
    found = msgspec.to_builtins(memory)
    weights = sum(one.nbytes for one in (*model.layers, model.embedding))
    differences = {
        "weights_minus_allocated": memory.weights_bytes - weights,
        "kv_minus_allocated": memory.kv_bytes - sum(one.nbytes for one in kv),
    }
    if on.type == "cuda":
        differences |= _against_the_driver(memory, on)
    return {"report": found, "differences_bytes": differences}


def _against_the_driver(memory: Any, on: torch.device) -> dict[str, Any]:
    reserved = torch.cuda.memory_reserved(on)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = {
        kind: sum(
            one["total_size"]
            for one in segments
            if (tuple(one["segment_pool_id"]) != _DEFAULT_POOL) is private
        )
        for kind, private in (("private", True), ("default", False))
    }
    inside = memory.weights_bytes + memory.kv_bytes + memory.graphs_bytes + memory.activations_bytes
    held = _own_process_bytes()
    return {
        "graphs_minus_private_pools": memory.graphs_bytes - pools["private"],
        "pools_minus_reserved": pools["private"] + pools["default"] - reserved,
        "parts_minus_reserved": inside - reserved,
        "parts_and_other_minus_process": (
            None if held is None else inside + memory.other_bytes - held
        ),
        "process_minus_device_used": _difference(held, _device_used_bytes(), 0),
    }


class _Model(torch.nn.Module):
    """Matrices, and a head that is the embedding: one storage under two names."""

    def __init__(self, layers: list[torch.nn.Parameter], embedding: torch.nn.Parameter) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(layers)
        self.embedding = embedding
        self.head = embedding


def _model(sizes: _Sizes, on: torch.device) -> _Model:
    def matrix() -> torch.nn.Parameter:
        values = torch.zeros(sizes.width, sizes.width, dtype=torch.bfloat16, device=on)
        return torch.nn.Parameter(values, requires_grad=False)

    return _Model([matrix() for _ in range(sizes.layers)], matrix())


def _step(model: _Model, sizes: _Sizes, on: torch.device) -> Any:
    x = torch.zeros(sizes.tokens, sizes.width, dtype=torch.bfloat16, device=on)

    def work() -> None:
        rows = x
        for layer in model.layers:
            rows = torch.tanh(rows @ layer)
        x.copy_(rows)

    return work


def _worker(model: _Model, kv: list[torch.Tensor], on: torch.device) -> Any:
    """The attributes of vLLM's worker that the report reads; KV as some backends nest it."""
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[*kv[:1], kv[1:]])
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
    return SimpleNamespace(model_runner=runner, device=on, vllm_config=config)


def _own_process_bytes() -> int | None:
    return process_bytes(str(torch.cuda.get_device_properties(0).uuid), os.getpid())


def _device_used_bytes() -> int | None:
    """NVML's figure, which makes no context. None where it cannot be asked."""
    used = _queried(lambda library, gpu: library.nvmlDeviceGetMemoryInfo(gpu).used)
    return None if used is None else int(used)


def _pids() -> Any:
    """Pids that NVML sees on the GPU: with pid namespaces not those seen here."""
    return _queried(
        lambda library, gpu: [one.pid for one in library.nvmlDeviceGetComputeRunningProcesses(gpu)]
    )


def _queried(question: Any) -> Any:
    library = nvml()
    if library is None:
        return None
    try:
        library.nvmlInit()
        try:
            return question(library, library.nvmlDeviceGetHandleByIndex(0))
        finally:
            library.nvmlShutdown()
    except library.NVMLError:
        return None


def _difference(later: int | None, earlier: int | None, beside: int) -> int | None:
    return None if later is None or earlier is None else later - earlier - beside
