"""One process with production's engine, the guest's, or both, which obeys lines on its input.

    python -m benchmarks.gpu_slot.engines.process SETTING

Replies are lines on its output; orders of the two engines run side by side. The process ends with
its input.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from benchmarks.gpu_slot.decode_model import LLAMA_8B, TINY, DecodeModel
from benchmarks.gpu_slot.device import CudaDevice, Device, Work, device_of
from benchmarks.gpu_slot.engines.green_context import partition
from benchmarks.gpu_slot.engines.guest import SyntheticGuest
from benchmarks.gpu_slot.engines.orders import (
    ORDERS,
    Broken,
    EngineForms,
    EngineSetting,
    EnginesReady,
    Reply,
    Roll,
    Rolled,
    Serve,
    ServedLoad,
)
from benchmarks.gpu_slot.engines.production import ProductionEngine
from coserve.guest.isolation import Isolation, apply_to_process
from harvester.contracts.clock import MonotonicClock

T = TypeVar("T")
_write_lock = threading.Lock()
_SWITCH_S = 5e-5


def main() -> None:
    setting = msgspec.json.decode(sys.argv[1], type=EngineSetting)
    clock = MonotonicClock()
    began_s = clock.now()
    # Standard output carries replies alone: a library's word to a person goes to the log.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(message: Reply) -> None:
        with _write_lock:
            output.write(msgspec.json.encode(message) + b"\n")
            output.flush()

    # Both engines of one process share Python's lock: neither may keep the other waiting for it.
    sys.setswitchinterval(_SWITCH_S)
    engines = _engines(setting)
    reply(EnginesReady(start_s=clock.now() - began_s, multiprocessors=engines.multiprocessors))
    for line in sys.stdin.buffer:
        order = ORDERS.decode(line)
        threading.Thread(target=_obey, args=(engines, order, reply), daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Engines:
    production: ProductionEngine | None
    guest: SyntheticGuest | None
    multiprocessors: dict[str, int]


def _obey(engines: _Engines, order: Serve | Roll, reply: Callable[[Reply], None]) -> None:
    try:
        if isinstance(order, Serve):
            assert engines.production is not None
            log = engines.production.serve(order.load, seconds=order.seconds)
            reply(ServedLoad(number=order.number, log=log))
        else:
            assert engines.guest is not None
            rolled = engines.guest.roll(seconds=order.seconds, mixed=order.mixed, seed=order.seed)
            reply(Rolled(number=order.number, log=rolled))
    except Exception as error:
        traceback.print_exc()
        reply(Broken(number=order.number, error=f"{type(error).__name__}: {error}"))


def _engines(setting: EngineSetting) -> _Engines:
    if setting.guest is not None and setting.production is None:
        # Before the first thread of CUDA or torch: those made later inherit it.
        apply_to_process(Isolation(setting.isolation, blocking_ratio=1.0))
    devices, multiprocessors = _devices(setting)
    production = guest = None
    if setting.production is not None:
        prefills, decodes = _captured(devices[0], setting, setting.production)
        production = ProductionEngine(
            devices[0],
            pages=Path(setting.pages),
            prefills=prefills,
            decodes=decodes,
            shape=f"decode {'tiny' if setting.tiny else '8B'} on {devices[0].name}",
        )
    if setting.guest is not None:
        prefills, decodes = _captured(devices[1], setting, setting.guest)
        guest = SyntheticGuest(
            devices[1],
            pages=Path(setting.pages),
            prefills=prefills,
            decodes=decodes,
            context_tokens=setting.guest.context_tokens,
            isolation=setting.isolation,
            pid=os.getpid(),
        )
    return _Engines(production, guest, multiprocessors)


def _devices(setting: EngineSetting) -> tuple[tuple[Device, Device], dict[str, int]]:
    """Production's and the guest's."""
    if setting.kind != "cuda":
        torch.set_num_threads(1)
        return (device_of(setting.kind), device_of(setting.kind)), {}
    if setting.partition_ratio > 0.0:
        parts = partition(setting.partition_ratio)
        counts = {
            "production": parts.production_multiprocessors,
            "guest": parts.guest_multiprocessors,
        }
        return (CudaDevice(parts.production), CudaDevice(parts.guest)), counts
    # Under MPS a client sees its share.
    count = torch.cuda.get_device_properties(0).multi_processor_count
    role = "guest" if setting.production is None else "production"
    return (CudaDevice(), CudaDevice()), {role: count}


def _captured(
    device: Device, setting: EngineSetting, forms: EngineForms
) -> tuple[dict[int, Work], dict[int, Work]]:
    """Prefills by tokens, decodes by requests."""
    kv_tokens = max(max(forms.decodes) * forms.context_tokens, *forms.prefills)
    with device.current():
        model = DecodeModel(TINY if setting.tiny else LLAMA_8B, device.torch_device, kv_tokens)
        prefills = {n: model.prefill(tokens=n) for n in forms.prefills}
        decodes = {
            n: model.decode(batch=n, context_tokens=forms.context_tokens) for n in forms.decodes
        }
    device.synchronize()
    return (
        {n: device.captured(work) for n, work in prefills.items()},
        {n: device.captured(work) for n, work in decodes.items()},
    )


if __name__ == "__main__":
    main()
