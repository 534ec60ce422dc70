"""Settings of the guest engine that `rosemux guest` starts on a slot."""

import re
from pathlib import Path

from pydantic import Field, field_validator

from harvester.contracts.isolation import IsolationBackend
from harvester.platform.yaml_file import FrozenSettings

_ON_LOOPBACK = (
    "the guest listens on 127.0.0.1 alone, since its development routes let any caller change its "
    "weights; serve it to others with `rosemux engine-proxy`, at the slot's offered_url"
)
_WITHIN = (
    "the guest's engine core must be its own process, for its isolation to hold it; leave it out"
)
_NEEDED = "RoseMux sets it, and a guest without it is not held back; leave it out"
OWN_FLAGS = {
    "host": _ON_LOOPBACK,
    "uds": _ON_LOOPBACK,
    "port": "set the port of the slot's engine_url",
    "config": "a file could name any flag; write its flags here",
    "model": "set guest.model",
    "max-model-len": "set guest.context_tokens",
    "max-num-seqs": "set the slot's concurrency",
    "kv-cache-memory-bytes": "set guest.kv_cache_bytes",
    "gpu-memory-utilization": "set guest.kv_cache_bytes",
    "data-parallel-backend": _WITHIN,
    "scheduler-cls": _NEEDED,
    "worker-extension-cls": _NEEDED,
    "weight-transfer-config": _NEEDED,
}
"""Flags of vLLM that a guest's `arguments` may not have, and the remedy. Flags that are harmless
with some values are left to the engine, which refuses the others: see `unfit_guest`."""


class GuestConfig(FrozenSettings):
    """The guest engine that `rosemux guest` starts on the slot. The agent reads `gpus` alone,
    when they are first named, for an interlock on accelerators."""

    model: Path
    """Directory of the model's configuration and tokenizer; weights come from the store."""
    weights: Path
    """Directory of the weight stores."""
    context_tokens: int = Field(gt=0, le=1 << 30)
    """Longest turn, prompt and answer together."""
    kv_cache_bytes: int = Field(gt=0, le=1 << 50)
    """KV cache on each GPU, or, on a CPU, in whole GiB. Fixed, never profiled from free memory."""
    gpus: tuple[str, ...] = Field(default=(), max_length=64)
    """UUIDs of the slot's GPUs; optional if the machine has at most one."""
    isolation: IsolationBackend | None = None
    """Defaults to the best backend that needs no consent. `mps` also needs the slot's `mps`."""
    active_thread_percentage: float = Field(default=100.0, gt=0, le=100)
    """Largest share of a GPU's multiprocessors that the guest may use under MPS."""
    sleeps: bool = False
    """Move the weights to pinned host memory of the same size while the guest sleeps."""
    eager: bool = False
    """Run without CUDA graphs: slower steps, less memory."""
    arguments: tuple[str, ...] = Field(default=(), max_length=256)
    """More flags of vLLM, placed after RoseMux's own; flags in `OWN_FLAGS` are refused."""

    @field_validator("arguments")
    @classmethod
    def _not_our_own(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            if argument.startswith("--"):
                # vLLM takes `_` for `-`, any unambiguous beginning, and fields behind a dot.
                flag = re.split("[=.]", argument[2:].replace("_", "-"), maxsplit=1)[0]
                for own, remedy in OWN_FLAGS.items():
                    if own.startswith(flag):
                        raise ValueError(f"{argument}: {remedy}")
        return arguments
