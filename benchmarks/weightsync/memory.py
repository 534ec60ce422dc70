"""Memory of publishing and receiving beyond the weights: `python -m benchmarks.weightsync.memory`.

Each role runs in a process of its own, and its peak resident memory (VmHWM) is held against a
process that holds the same weights and changes them in the same way, with no publisher or receiver.
A full version, then two steps: of 3 % of the elements by one unit in the last place, as Adam takes
them at learning rates of RL, or of every element, the worst that a delta can be.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.testbed.reporting import report

PARAMETERS = 500_000_000
STEPS = 3
SETTINGS_BYTES = (64 << 20, 256 << 20, 1 << 30)
"""Staging bytes of a receiver; the last one is the default."""
_ULP_RATIO = 0.03
_CHUNK = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.memory", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--role", choices=[*sorted(_ROLES), "receiver"])
    parser.add_argument("--store", type=Path)
    parser.add_argument("--staging-bytes", type=int, default=SETTINGS_BYTES[-1])
    given = parser.parse_args()
    if given.role == "receiver":
        print(_receiver(given.parameters, given.store, given.staging_bytes))
        return
    if given.role:
        print(_ROLES[given.role](given.parameters, given.store))
        return
    report("weightsync.memory", lambda: measure(given.parameters), given.json, engines=False)


def measure(
    parameters: int = PARAMETERS, settings_bytes: Sequence[int] = SETTINGS_BYTES
) -> dict[str, Any]:
    """`publisher_ratio`: the publisher's peak over that without one, in sizes of the model; its own
    copy is 1.0 of it, libraries and compiled kernels are in it.

    `publisher_worst_ratio` is that where every element changes. `receiver_peak_bytes` is the same
    difference for a receiver with the default setting that takes all versions of 3 %, the first one
    whole; `receivers` has it for each setting, and where every element changes.
    """
    with tempfile.TemporaryDirectory(prefix="weights-") as directory:
        store = Path(directory) / "store"
        peaks = {role: _peak_bytes(role, parameters, store) for role in _ORDER}
        receivers = [
            {
                "staging_bytes": setting,
                "peak_bytes": _beyond(peaks, parameters, store, setting),
                "worst_peak_bytes": _beyond(peaks, parameters, _worst_store(store), setting),
            }
            for setting in settings_bytes
        ]
    model_bytes = 2 * parameters
    return {
        "model_bytes": model_bytes,
        "publisher_ratio": round((peaks["publisher"] - peaks["trainer"]) / model_bytes, 3),
        "publisher_worst_ratio": round((peaks["worst"] - peaks["trainer"]) / model_bytes, 3),
        "receiver_peak_bytes": receivers[-1]["peak_bytes"],
        "receivers": receivers,
        "peaks_bytes": peaks,
    }


def _beyond(peaks: dict[str, int], parameters: int, store: Path, setting: int) -> int:
    """A receiver's peak over that of its weights alone, in bytes."""
    peak = _peak_bytes("receiver", parameters, store, "--staging-bytes", str(setting))
    return peak - peaks["trainer"]


def _peak_bytes(role: str, parameters: int, store: Path, *more: str) -> int:
    command = [sys.executable, "-m", "benchmarks.weightsync.memory", "--role", role, *more]
    command += ["--parameters", str(parameters), "--store", str(store)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _trainer(parameters: int, store: Path) -> int:  # noqa: ARG001 - nothing is stored
    """The weights alone, changed as often as they are published elsewhere."""
    state = _state(parameters)
    for step in range(1, STEPS):
        _train(state, step, every_element=step > 1)
    return _peak()


def _publisher(parameters: int, store: Path, *, every_element: bool = False) -> int:
    from weightsync.publisher import Publisher

    state = _state(parameters)
    with Publisher(store) as publisher:
        publisher.publish(state)
        for step in range(1, STEPS):
            _train(state, step, every_element=every_element)
            publisher.publish(state)
    return _peak()


def _worst(parameters: int, store: Path) -> int:
    return _publisher(parameters, _worst_store(store), every_element=True)


def _worst_store(store: Path) -> Path:
    return store.with_name("worst")


def _receiver(parameters: int, store: Path, staging_bytes: int) -> int:
    from harvester.contracts.ids import WeightVersion
    from weightsync.receive.target import TensorTarget
    from weightsync.receiver import Receiver

    target, receiver = (
        TensorTarget(_state(parameters)),
        Receiver(store, staging_bytes=staging_bytes),
    )
    current = None
    for version in range(1, STEPS + 1):
        current = receiver.sync(current, WeightVersion(version), target).version
    receiver.close()
    return _peak()


_ORDER = ("trainer", "publisher", "worst")
_ROLES: dict[str, Callable[[int, Path], int]] = {
    "trainer": _trainer,
    "publisher": _publisher,
    "worst": _worst,
}


def _state(parameters: int) -> dict[str, Any]:
    """bfloat16 weights: an embedding of a tenth, then layers of 8 Mi elements."""
    import torch

    generator = torch.Generator().manual_seed(0)
    sizes = [parameters // 10]
    while (left := parameters - sum(sizes)) > 0:
        sizes.append(min(left, 8 << 20))
    # Allocated before anything is drawn, so that no heap lies in holes that others could use.
    state = {
        f"layer.{n:05d}": torch.zeros(size, dtype=torch.bfloat16) for n, size in enumerate(sizes)
    }
    for tensor in state.values():
        for part in torch.split(tensor, _CHUNK):
            part.copy_(torch.randn(part.numel(), generator=generator) * 0.02)
    return state


def _train(state: dict[str, Any], step: int, *, every_element: bool) -> None:
    """Changes weights in place and in small pieces, so that the change itself needs little
    memory."""
    import torch

    generator = torch.Generator().manual_seed(step)
    for tensor in state.values():
        for part in torch.split(tensor.view(torch.int16), _CHUNK):
            if not every_element:
                part.add_(torch.rand(part.numel(), generator=generator) < _ULP_RATIO)
            else:
                part.bitwise_xor_(torch.randint(1, 128, part.shape, generator=generator).short())


def _peak() -> int:
    """VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel tells no VmHWM")


if __name__ == "__main__":
    main()
