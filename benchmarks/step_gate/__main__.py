"""Cost of a guest step beside vLLM's own work: `python -m benchmarks.step_gate --json PATH`.

Real pages in shared memory, a real `GuestSlot`; no engine. Three cases in turn, block by block: no
page changed since the last step, every pulse written anew before it, and the same with caches that
were emptied before each part, as an engine's step does by reading its weights. A step is one
decision, the account at its launch and at its end, and the guest page written after it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.testbed.reporting import report
from coserve.guest.guest_slot import GuestSlot
from harvester.contracts.page import (
    EngineCore,
    Grant,
    GrantMode,
    PageDirectory,
    PageWriter,
    ProductionModel,
    Pulse,
    pulse_page,
)

BLOCKS = 30
STEPS = 500
COLD_STEPS = 20
EVICTING_BYTES = 256 << 20
"""More than the last cache of any host processor that is shared between few cores."""
DECODES = 16
HOUR_NS = 3_600_000_000_000
SAMPLES_S = tuple(0.01 + 1e-4 * index for index in range(32))
MODEL = ProductionModel(prefill_base_s=0.02, prefill_s_per_token=1e-4, decode_base_s=0.01)


@dataclass(frozen=True, slots=True)
class Case:
    steps: int
    """Steps of one block."""
    before_step: Callable[[int], None]
    before_part: Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_gate", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report(
        "step_gate",
        lambda: {"pulses": {str(count): measured(count) for count in (1, 4)}},
        given.json,
        engines=False,
    )


def measured(pulses: int) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of each part of a step over `pulses` production processes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        pages = PageDirectory.create(Path(directory))
        writers = [pages.pulse_writer("production", process) for process in range(pulses)]
        names = tuple(pulse_page("production", process) for process in range(pulses))
        grant = Grant(
            epoch=1,
            mode=GrantMode.OPEN,
            pulses=names,
            ttft_slo_s=0.25,
            itl_slo_s=0.05,
            production=MODEL,
        )
        grant_page = pages.grant_writer()
        slot = GuestSlot(pages.path, token_limit=2048)
        memory = np.zeros(EVICTING_BYTES // 8)
        nothing, evict = lambda: None, memory.sum
        cases: dict[str, Case] = {
            "unchanged": Case(STEPS, lambda _: None, nothing),
            "changed": Case(STEPS, lambda step: write_all(writers, step), nothing),
            "cold": Case(COLD_STEPS, lambda step: write_all(writers, step), evict),
        }
        write_all(writers, 0)
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for _ in range(BLOCKS):
            for name, case in cases.items():
                # One block is over well before a grant is too old.
                grant_page.write(grant, now_ns=time.monotonic_ns(), ttl_ns=HOUR_NS)  # noqa: TID251
                taken[name].append(block_us(slot, case))
        slot.close()
    return {
        name: {part: summary([block[part] for block in blocks]) for part in blocks[0]}
        for name, blocks in taken.items()
    }


def block_us(slot: GuestSlot, case: Case) -> dict[str, float]:
    """Means of one block, in the thread's own time; what happens between parts is not counted."""
    parts: dict[str, Callable[[], object]] = {
        "decide": lambda: slot.decide(for_step=True),
        "launched": lambda: slot.launched(decodes=DECODES, prefill_tokens=0),
        "finished": slot.finished,
        "publish": slot.publish,
    }
    total_ns = dict.fromkeys(parts, 0)
    for step in range(case.steps):
        case.before_step(step)
        for part, act in parts.items():
            case.before_part()
            start_ns = time.thread_time_ns()
            act()
            total_ns[part] += time.thread_time_ns() - start_ns
    means = {part: taken_ns / case.steps / 1e3 for part, taken_ns in total_ns.items()}
    return means | {"step": sum(means.values())}


def write_all(writers: list[PageWriter[Pulse]], step: int) -> None:
    """Writes pulses as full as those of a busy engine."""
    now_ns = time.monotonic_ns()  # noqa: TID251
    pulse = Pulse(
        in_flight=step % 3,
        decoding=step % 3,
        last_step_end_ns=now_ns,
        steps_total=step,
        ttft_s_recent=SAMPLES_S,
        itl_s_recent=SAMPLES_S,
        model=MODEL,
        cores=(EngineCore(told_ns=now_ns, kv_usage_ratio=0.5),),
        prompt_tokens_quantiles=tuple(range(80, 880, 80)),
        prompt_tokens_p99=820,
        shape="Qwen2ForCausalLM 48x5120 bfloat16 tp4 pp1 on NVIDIA H100 80GB HBM3",
    )
    for writer in writers:
        writer.write(pulse, now_ns=now_ns, ttl_ns=HOUR_NS)


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median_us": round(statistics.median(values), 2),
        "min_us": round(min(values), 2),
        "max_us": round(max(values), 2),
    }


if __name__ == "__main__":
    main()
