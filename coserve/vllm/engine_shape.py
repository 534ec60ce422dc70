"""The shape of an engine, from its own configuration; step times apply to one shape only.

    Qwen2ForCausalLM 48x5120 bfloat16 tp4 pp1 on NVIDIA H100 80GB HBM3

Read in production's front end, which must not touch a GPU and where no error may surface:
unreadable parts are left out.
"""

import contextlib
from pathlib import Path
from typing import Any

from harvester.contracts.page import MOST_SHAPE_CHARACTERS

_CPU_INFO = Path("/proc/cpuinfo")


def engine_shape(vllm_config: Any) -> str:
    """One line of at most 120 characters; "" if nothing is known."""
    words: list[str] = []
    # This runs in production: if upstream renames these fields, the pulse must go on.
    with contextlib.suppress(Exception):
        words.append(_model(vllm_config.model_config))
    with contextlib.suppress(Exception):
        parallel = vllm_config.parallel_config
        words.append(f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}")
    with contextlib.suppress(Exception):
        words.append(f"on {_accelerator()}")
    return " ".join(words)[:MOST_SHAPE_CHARACTERS]


def _model(model: Any) -> str:
    text = model.hf_text_config
    size = f"{text.num_hidden_layers}x{text.hidden_size}"
    dtype = model.quantization or str(model.dtype).removeprefix("torch.")
    return f"{model.architecture} {size} {dtype}"


def _accelerator() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from vllm.platforms.cuda import NvmlCudaPlatform

        # The other CUDA platform class asks torch, which would create a context on the GPU.
        if isinstance(current_platform, NvmlCudaPlatform):
            return str(current_platform.get_device_name())
    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    named = [line for line in _CPU_INFO.read_text().splitlines() if line.startswith("model name")]
    return " ".join(named[0].partition(":")[2].split())
