"""Facts of the machine and its GPU, and RoseMux's own readings of them against the driver's.

Facts stand alone: one that fails leaves its error in the result, and the others are measured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu_slot.device import device_of
from benchmarks.gpu_slot.host.copies import launches, pinning, rates, shape_of
from benchmarks.gpu_slot.host.driver import agreement, mps_programs, nvidia_smi, nvml_device
from benchmarks.gpu_slot.host.launch_lock import lock_facts
from benchmarks.gpu_slot.host.memory import context_facts, report_facts
from benchmarks.gpu_slot.results import Put

Fact = Callable[[], dict[str, Any]]

_NO_GPU = "GPU-rehearsal"


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    """Raises RuntimeError, after all facts, where one of them failed."""
    # The driver first, as long as this process has no context: nvidia-smi may have to load it.
    found = _put_each(
        {
            "nvidia_smi_without_context": partial(nvidia_smi, calls=2 if tiny else 3, texts=True),
            "nvml": nvml_device,
            "mps": mps_programs,
            "context": partial(context_facts, kind),
        },
        put,
    )
    device = device_of(kind)
    gpu = next(iter(found["nvml"].get("uuids", [])), _NO_GPU)
    with device.current():
        found |= _put_each(
            {
                "nvidia_smi_with_context": partial(nvidia_smi, calls=2 if tiny else 3, texts=False),
                "agreement": partial(agreement, kind, found),
                "device": partial(shape_of, device),
                "memory_report": partial(report_facts, device, tiny=tiny),
                "copies": partial(rates, device, kind, tiny=tiny),
                "pinning": partial(pinning, kind, tiny=tiny),
                "launches": partial(launches, device, tiny=tiny),
                "launch_lock": partial(lock_facts, gpu, tiny=tiny),
            },
            put,
        )
    failed = [name for name, fact in found.items() if "failed" in fact]
    if failed:
        raise RuntimeError(f"facts not found: {', '.join(failed)}")


def _put_each(facts: dict[str, Fact], put: Put) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, fact in facts.items():
        # Any failure is the fact's own result.
        try:
            found[name] = fact()
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        put(name, found[name])
    return found
