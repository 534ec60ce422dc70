"""vLLM's executors on Ray with workers on CPUs, which its CPU build refuses.

Upstream names no Ray resource for CPUs. Here they take one that Ray knows and this machine lacks.
Each worker imports this module too: its class, by which Ray starts it, is in it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor, ray_executor_v2

RESOURCE = "HPU"
LEGACY = {
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0",
    # The default is for NCCL.
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "shm",
    "VLLM_USE_RAY_WRAPPED_PP_COMM": "0",
}
"""Variables of the executor that calls its workers by Ray's own messages."""


class CpuWorkerProc(ray_executor_v2.RayWorkerProc):
    """Imports this module."""


class CpuWorkerWrapper(ray_executor.RayWorkerWrapper):
    """Imports this module."""


type(current_platform).ray_device_key = RESOURCE
ray_executor_v2.RayWorkerProc = CpuWorkerProc
ray_executor.RayWorkerWrapper = CpuWorkerWrapper


@contextmanager
def cluster(*, workers: int) -> Iterator[None]:
    """Ray on this machine alone, with room for so many workers; its files are in TMPDIR."""
    ray.init(
        num_cpus=workers,
        num_gpus=0,
        resources={RESOURCE: workers},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["TMPDIR"],
    )
    try:
        yield
    finally:
        ray.shutdown()


def unlink_shared_memory(engine: Any) -> None:
    """Names of what the ranks of a started engine share, after the port by which they met: all have
    it open by now, and nothing removes them."""
    (met, *_) = engine.collective_rpc(_meeting)
    for segment in Path("/dev/shm").glob(f"{met}-*"):
        segment.unlink(missing_ok=True)


def _meeting(_worker: Any) -> str:
    return os.environ["VLLM_DIST_IDENT"]
