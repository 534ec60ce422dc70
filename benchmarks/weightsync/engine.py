"""In-engine apply beside vLLM's own: `python -m benchmarks.weightsync.engine --json PATH`.

One real vLLM engine in a process of its own (100 M parameters, bfloat16, two threads) follows a
store with our backend. Between two of our updates vLLM's native sparse path applies the same kind
of step (Adam's at lr 1e-6, one value in a hundred) to the same model and takes it back, so that
both meet the same machine. Needs no GPU; on one the engine has 1 B parameters.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.testbed.gpu_hardware import find_hardware
from benchmarks.testbed.hardware import CpuHardware, Hardware, HardwareKind, add_hardware_option
from benchmarks.testbed.partial_result import PartialResult
from benchmarks.testbed.processes import Child, Processes
from benchmarks.testbed.reporting import report
from benchmarks.weightsync.engine_arms import FORM_FILE, RESULT_FILE
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import Exhausted, Unsupported

REPETITIONS = 7
ENGINE_S = 480.0
"""Time limit from the engine's start to its last repetition, in s: fits a ten-minute command."""
_LOOK_S = 0.25
_MODULE = "benchmarks.weightsync.engine_arms"

Keep = Callable[[dict[str, Any]], None]

_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}
HUNDRED_MILLION: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ONE_BILLION: Mapping[str, Any] = {
    **HUNDRED_MILLION,
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Size of Llama 3.2 1B. Each repetition moves three states through the host's memory and into a
store: with 8 B parameters that takes minutes, and more than a small disk holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """Form of the one engine on a kind of hardware."""

    model: Mapping[str, Any]
    """Its configuration as Hugging Face's."""
    environment: Mapping[str, str]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for vLLM's LLM, besides those common to all forms."""
    device: str = "cpu"
    """Device of the synthetic steps' computation."""


FORMS = {
    HardwareKind.CPU: EngineForm(model=HUNDRED_MILLION, environment=_CPU),
    HardwareKind.GPU: EngineForm(
        model=ONE_BILLION,
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        arguments={"gpu_memory_utilization": 0.2},
        device="cuda",
    ),
    HardwareKind.REHEARSAL: EngineForm(model=HUNDRED_MILLION, environment=_CPU),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.engine", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    add_hardware_option(parser)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def measured() -> dict[str, Any]:
        hardware = find_hardware(given.hardware)
        hardware.check()
        return measure(
            repetitions=given.repetitions,
            hardware=hardware,
            logs=logs_beside(given.json),
            keep=PartialResult(given.json).keep,
        )

    report("weightsync.engine", measured, given.json, engines=False)


def logs_beside(path: Path) -> Path:
    """Log directory of a run with its result at `path`."""
    return path.parent / f"{path.stem}.run" / "logs"


def measure(
    *,
    repetitions: int = REPETITIONS,
    hardware: Hardware | None = None,
    logs: Path,
    keep: Keep,
    within_s: float = ENGINE_S,
    module: str = _MODULE,
) -> dict[str, Any]:
    """Medians, in milliseconds but for `params`, `repetitions` and `changed_ratio`; `spread_ms` has
    the extremes. `keep` is called with those so far, once the engine is up and after each
    repetition.

    `ours_ms`    the update: deltas written, packed forms exchanged, all of the state hashed
    `pause_ms`   the same with the calls that begin and end it: the engine's pause
    `native_ms`  vLLM's own sparse path, which checks indices but no state and packs nothing;
                 None where this vLLM has none (before 0.29)
    `stage_ms`   the work before the pause: read, decoded, tried on copies, packed
    `unstaged_pause_ms`  the pause without that work before it

    Raises Unsupported if the engine does not come up, Exhausted if it is not done in time.
    """
    form = FORMS[(hardware or CpuHardware()).kind]
    with (
        tempfile.TemporaryDirectory(prefix="rosemux-engine-") as directory,
        Processes(logs) as processes,
    ):
        root = Path(directory)
        (root / "stores").mkdir()
        environment = {
            "ROSEMUX_WEIGHT_ROOT": str(root / "stores"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **form.environment,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        (root / FORM_FILE).write_text(json.dumps(asdict(form)))
        command = [sys.executable, "-m", module, str(root), str(repetitions)]
        child = processes.start("engine", command, environment=environment)
        print(f"{repetitions} repetitions; the engine's log is {child.log}", file=sys.stderr)
        return _followed(child, root / RESULT_FILE, repetitions, keep, within_s)


def _followed(
    child: Child, file: Path, repetitions: int, keep: Keep, within_s: float
) -> dict[str, Any]:
    """The child's last result, each passed on as it comes."""
    clock, tick = MonotonicClock(), threading.Event()
    started_s, text = clock.now(), ""
    found: dict[str, Any] = {}
    while True:
        # Before its result is read: a result read after the exit is its last.
        code = child.process.poll()
        now_text = file.read_text() if file.exists() else ""
        if now_text != text:
            text, found = now_text, json.loads(now_text)
            keep(found)
            taken_s, done = clock.now() - started_s, found["repetitions"]
            progress = f"{done} of {repetitions} repetitions" if done else "the engine is up"
            print(f"{taken_s:6.0f} s  {progress}", file=sys.stderr, flush=True)
        if code == 0:
            return found
        if code is not None:
            raise Unsupported(f"the engine ended with {code}: {child.last_words()}")
        if clock.now() - started_s > within_s:
            raise Exhausted(
                f"the engine had {within_s:.0f} s and was not done: "
                f"{found.get('repetitions', 0)} of {repetitions} repetitions are measured and kept"
                f"; its log {child.log} ends with: {child.last_words()}"
            )
        tick.wait(_LOOK_S)


if __name__ == "__main__":
    main()
