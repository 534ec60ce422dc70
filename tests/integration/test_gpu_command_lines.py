"""The flags of a GPU machine's engines as vLLM itself reads them, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.gpu_hardware import GpuHardware
from benchmarks.testbed.memory_split import GpuMemory
from coserve.guest.gpus import ComputeMode, Gpu
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineCommand, EngineSpec
from examples.grpo.policy_shape import PolicyShape

pytestmark = pytest.mark.engine

GIB = 1 << 30
HARDWARE = GpuHardware(
    Gpu("GPU-1", ComputeMode.DEFAULT), GpuMemory(total_bytes=140 * GIB, free_bytes=139 * GIB)
)
_START = 3
"""The interpreter, -m and the module."""


def commands(folder: Path) -> dict[str, EngineCommand]:
    def spec(name: str, **changes: Any) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=folder / "model",
            port=8000,
            max_model_len=2048,
            max_num_seqs=64,
            vllm=capabilities(installed_vllm_version()),
            **changes,
        )

    owned = (*HARDWARE.engine_arguments(), "--load-format", "dummy")
    rollouts = (*HARDWARE.guest_arguments(), *HARDWARE.engine_arguments())
    production = spec("production", gpu=HARDWARE.production(), extra_arguments=owned)
    stock = spec("stock", gpu=HARDWARE.stock(3), extra_arguments=owned)
    guest = spec("guest", gpu=HARDWARE.guest(), extra_arguments=rollouts)
    return {
        "production": launch.production(production, pages=folder),
        "stock": launch.stock(stock),
        "guest": launch.guest(guest, pages=folder, weights=folder),
    }


def test_vllm_reads_every_flag_as_it_is_meant(tmp_path: Path) -> None:
    HARDWARE.write_policy(tmp_path / "model", PolicyShape())
    lines = tmp_path / "lines.json"
    given = {name: each.arguments[_START:] for name, each in commands(tmp_path).items()}
    lines.write_text(json.dumps(given))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.gpu_line_parser", str(lines)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    graphs = {"mode": 0, "graphs": "FULL_DECODE_ONLY", "eager": False, "requests": 64}
    assert found["production"] == {"memory_ratio": 0.5, "kv_bytes": None, **graphs}
    assert found["stock"] == {"memory_ratio": 0.3, "kv_bytes": None, **graphs}
    assert found["guest"] == {"memory_ratio": 0.01, "kv_bytes": 24 * GIB, **graphs}
