"""How engines of one model divide a GPU's memory, as fractions for vLLM and as bytes of KV.

Production, and engines that stand side by side, take a fraction of the whole and fill it with KV; a
guest's KV is a fixed size, out of what production leaves. Pure.
"""

from dataclasses import dataclass

from benchmarks.testbed.production_model import ModelShape
from harvester.contracts.errors import Unsupported

GIB = 1 << 30
PRODUCTION_RATIO = 0.5
SIDE_BY_SIDE_RATIO = 0.9
"""Share of the GPU for all stock engines together: the rest is for graphs, which vLLM does not
count."""
WORKSPACE_BYTES = 4 * GIB
"""Memory of an engine beside weights and KV: context, activations of a step, graphs."""
KV_BYTES_MIN = 4 * GIB
GUEST_KV_BYTES_MAX = 24 * GIB
"""A batch of rollouts uses less; the rest of a large GPU stays free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGpu:
    production_ratio: float
    guest_kv_bytes: int


def beside(memory: GpuMemory, shape: ModelShape) -> SharedGpu:
    """Production and a guest of one shape. Raises Unsupported where they do not fit."""
    floor_bytes = shape.weights_bytes + WORKSPACE_BYTES
    production_bytes = int(PRODUCTION_RATIO * memory.total_bytes)
    # The guest's half, less production's graphs, which lie outside of its fraction.
    rest_bytes = memory.total_bytes - production_bytes - WORKSPACE_BYTES
    guest_kv_bytes = min(GUEST_KV_BYTES_MAX, rest_bytes - floor_bytes)
    least_bytes = floor_bytes + KV_BYTES_MIN
    if production_bytes < least_bytes or guest_kv_bytes < KV_BYTES_MIN:
        needed_bytes = 2 * least_bytes + 2 * WORKSPACE_BYTES
        raise _too_small(memory, needed_bytes, "production and a guest", shape)
    _check_free(memory, production_bytes + floor_bytes + guest_kv_bytes)
    return SharedGpu(production_ratio=PRODUCTION_RATIO, guest_kv_bytes=guest_kv_bytes)


def side_by_side(memory: GpuMemory, shape: ModelShape, *, engines: int) -> float:
    """Each of several stock engines' fraction. Raises Unsupported where they do not fit."""
    each_bytes = int(SIDE_BY_SIDE_RATIO / engines * memory.total_bytes)
    least_bytes = shape.weights_bytes + WORKSPACE_BYTES + KV_BYTES_MIN
    if each_bytes < least_bytes:
        needed_bytes = int(engines * least_bytes / SIDE_BY_SIDE_RATIO)
        raise _too_small(memory, needed_bytes, f"{engines} engines", shape)
    _check_free(memory, engines * each_bytes)
    return SIDE_BY_SIDE_RATIO / engines


def _too_small(memory: GpuMemory, needed: int, engines: str, shape: ModelShape) -> Unsupported:
    return Unsupported(
        f"the GPU has {memory.total_bytes / GIB:.0f} GiB; {engines} of {shape.layers} layers of "
        f"{shape.hidden} need {-(-needed // GIB)} GiB: take a larger GPU, or --hardware cpu with a "
        "CPU build of vLLM"
    )


def _check_free(memory: GpuMemory, needed_bytes: int) -> None:
    if memory.free_bytes < needed_bytes:
        raise Unsupported(
            f"{memory.free_bytes / GIB:.0f} GiB of the GPU's memory are free, "
            f"{-(-needed_bytes // GIB)} GiB are needed: end what nvidia-smi shows"
        )
