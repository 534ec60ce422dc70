"""What one decision of the guest's gate costs: `python -m benchmarks.step_gate --json PATH`.

Real pages in shared memory, a real `GuestSlot`; no engine. Two cases in turn, block by block: no
page changed since the last decision, and every pulse written anew before it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.reporting import report
from coserve.guest_slot import GuestSlot
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
DECISIONS = 500
HOUR_NS = 3_600_000_000_000
SAMPLES_S = tuple(0.01 + 1e-4 * place for place in range(32))
MODEL = ProductionModel(prefill_base_s=0.02, prefill_s_per_token=1e-4, decode_base_s=0.01)


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


def measured(pulses: int) -> dict[str, dict[str, float]]:
    """Microseconds per decision over `pulses` production processes."""
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
            phantom_prompt_tokens=512,
            production=MODEL,
        )
        grant_page = pages.grant_writer()
        grant_page.write(grant, now_ns=time.monotonic_ns(), ttl_ns=HOUR_NS)  # noqa: TID251
        slot = GuestSlot(pages.path, token_limit=2048)
        cases: dict[str, Callable[[int], None]] = {
            "unchanged": lambda _: None,
            "changed": lambda turn: write_all(writers, turn),
        }
        write_all(writers, 0)
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(BLOCKS):
            for name, before in cases.items():
                taken[name].append(block_us(slot, before))
        slot.close()
    return {name: summary(values) for name, values in taken.items()}


def block_us(slot: GuestSlot, before: Callable[[int], None]) -> float:
    """Mean of one block; what happens before each decision is not counted."""
    total_ns = 0
    for turn in range(DECISIONS):
        before(turn)
        start_ns = time.perf_counter_ns()
        slot.decide(for_step=True)
        total_ns += time.perf_counter_ns() - start_ns
    return total_ns / DECISIONS / 1e3


def write_all(writers: list[PageWriter[Pulse]], turn: int) -> None:
    """As full as those of a busy engine are."""
    now_ns = time.monotonic_ns()  # noqa: TID251
    pulse = Pulse(
        in_flight=turn % 3,
        decoding=turn % 3,
        last_step_end_ns=now_ns,
        steps_total=turn,
        ttft_s_recent=SAMPLES_S,
        itl_s_recent=SAMPLES_S,
        model=MODEL,
        cores=(EngineCore(told_ns=now_ns, kv_usage_ratio=0.5),),
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
