"""`deploy/gpu/check`: does the activated directory of packages serve a dense model here?

Says the machine's facts. Then imports what a vLLM server and RoseMux's adapters import, looks for
the entry points, and with a GPU compares a handful of vLLM's kernels with torch. A line each; ends
with 1 at a failure, and at the first one where no bundle is on Python's path.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from deploy.gpu import machine
from deploy.gpu.unpacking import INSTALLED

SERVER_MODULES = (
    "torch",
    "triton",
    "transformers",
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.platforms.cuda",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.main",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.sample.sampler",
    "vllm.compilation.backends",
    "vllm.device_allocator.cumem",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
)
DRIVER_MODULES = {
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.platforms.cuda",
    "vllm.device_allocator.cumem",
}
"""Linked with the driver's library: without it they cannot be loaded."""
ROSEMUX_MODULES = (
    "harvester.agent.node",
    "harvester.cli",
    "coserve.vllm.launch",
    "scheduler.gateway",
    "weightsync.publisher",
    "weightsync.receiver",
)
ADAPTER_MODULES = (
    "coserve.vllm.plugin",
    "coserve.vllm.scheduler",
    "coserve.vllm.kv_worker",
    "coserve.vllm.middleware",
    "coserve.vllm.pulse_logger",
    "weightsync.vllm.plugin",
    "weightsync.vllm.engine",
    "weightsync.vllm.worker_weights",
)
ENTRY_POINTS = {
    "vllm.general_plugins": {"rosemux_coserve", "rosemux_weightsync"},
    "vllm.stat_logger_plugins": {"rosemux_pulse"},
}


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    error: str = ""
    """Empty where all is well."""
    seconds: float = 0.0
    absent: bool = False
    """Whether the subject itself, or what it imports, is on no path."""

    def __str__(self) -> str:
        if self.error:
            return f"FAILED   {self.subject}: {self.error}"
        return f"ok       {self.subject}  {self.seconds:.1f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy/gpu/check", description=__doc__)
    parser.add_argument("--only", choices=["rosemux"], help="without vLLM")
    asked = parser.parse_args(arguments)
    driver = machine.driver_version()
    needed = asked.only is None
    failed = int(needed and not driver)
    if failed:
        print(Finding("NVIDIA driver", machine.NO_DRIVER))
    else:
        print(machine.Fact("NVIDIA driver", f"CUDA {driver}" if driver else machine.NO_DRIVER))
    for fact in machine.facts(os.environ):
        print(fact, flush=True)
    for finding in findings(with_vllm=needed, with_driver=bool(driver)):
        print(finding, flush=True)
        failed += bool(finding.error)
        if finding.absent and not bundle_is_on_the_path(sys.path):
            print("check: no bundle is on Python's path; source SITE/activate first")
            return 1
    print(f"check: {failed} failed" if failed else "check: all is well")
    return 1 if failed else 0


def bundle_is_on_the_path(search: Iterable[str]) -> bool:
    return any((Path(folder) / INSTALLED).is_file() for folder in search)


def imports(modules: Iterable[str]) -> Iterator[Finding]:
    """Import each; what one leaves behind is there for the next, as in a server."""
    for module in modules:
        yield _tried(f"import {module}", partial(importlib.import_module, module))


def plugins() -> Iterator[Finding]:
    """RoseMux's entry points, as vLLM looks for them."""
    for group, expected in ENTRY_POINTS.items():
        missing = expected - {point.name for point in entry_points(group=group)}
        error = f"not found: {', '.join(sorted(missing))}" if missing else ""
        yield Finding(f"entry points {group}", error, absent=bool(missing))


def findings(*, with_vllm: bool, with_driver: bool) -> Iterator[Finding]:
    """vLLM first: a server imports RoseMux's plugins when its own modules are there."""
    yield from plugins()
    if with_vllm:
        yield _tried("distribution vllm", lambda: print("         vllm", version("vllm")))
        if not with_driver:
            print("         not tried without a driver:", ", ".join(sorted(DRIVER_MODULES)))
        yield from imports(m for m in SERVER_MODULES if with_driver or m not in DRIVER_MODULES)
    yield from imports(ROSEMUX_MODULES)
    if with_vllm:
        yield from imports(ADAPTER_MODULES)
        yield from _kernels()


def _kernels() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        print("         no CUDA device here: no kernel was tried", flush=True)
        return
    from deploy.gpu import kernels

    for probe in kernels.PROBES:
        yield _tried(f"kernel {probe.__name__}", partial(probe, "cuda"))


def _tried(subject: str, action: Callable[[], object]) -> Finding:
    start = time.perf_counter()
    try:
        action()
    # A server's import can end in anything: SystemExit of a plugin, OSError of a library.
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:400]
        absent = isinstance(error, ModuleNotFoundError | PackageNotFoundError)
        return Finding(subject, f"{type(error).__name__}: {text}", absent=absent)
    return Finding(subject, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
