"""Riders: rollouts as extra rows of production's own decode step.

A decode step at a small batch is bound by reading weights, which it does once for all rows. The
cost of more rows is measured as whole steps of `batch` and of `batch + riders` rows in turn.
"""

from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu_slot.decode_model import LLAMA_8B, TINY, DecodeModel
from benchmarks.gpu_slot.device import Device, Work, device_of
from benchmarks.gpu_slot.results import Put
from harvester.contracts.clock import monotonic_ns

BATCHES = (1, 4, 16, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384)
"""Rows of whole steps: sizes that engines pad batches to, so that no tile of a product is cut."""
RIDERS_MAX = 128
CONTEXT_TOKENS = 1024
_RESERVE_BYTES = 8 << 30
"""Memory for activations, logits and graphs beside weights and KV."""
_ROUNDS = 15
_STEPS = 4
_BEARABLE = (0.01, 0.05)
"""Shares of a step's time; the most rows that cost less are reported for each."""
_AGAIN = 0
"""Stands among the arms for the batch against itself: what differs there is noise."""


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    device = device_of(kind)
    shape = TINY if tiny else LLAMA_8B
    batches, sizes = ((1, 4), (1, 2, 4, 8)) if tiny else (BATCHES, ROWS)
    context_tokens = 16 if tiny else CONTEXT_TOKENS
    rows_max = sizes[-1]
    if not tiny:
        room = device.free_bytes() - 2 * shape.parameters - _RESERVE_BYTES
        rows_max = min(rows_max, room // (shape.kv_bytes_per_token * context_tokens))
    with device.current():
        model = DecodeModel(shape, device.torch_device, rows_max * context_tokens)
    put("setting", {"device": device.name, "context_tokens": context_tokens, "rows_max": rows_max})
    steps: dict[int, Work] = {}

    def step(rows: int) -> Work:
        if rows not in steps:
            with device.current():
                work = model.decode(batch=rows, context_tokens=context_tokens)
            steps[rows] = device.captured(work)
        return steps[rows]

    for batch in batches:
        chosen = [rows for rows in sizes if batch < rows <= min(batch + RIDERS_MAX, rows_max)]
        if chosen:
            arms = {rows: step(rows) for rows in (batch, *chosen)} | {_AGAIN: step(batch)}
            put(f"batch_{batch}", rider_figures(batch, _step_times(device, arms)))


def _step_times(device: Device, arms: dict[int, Work]) -> dict[int, list[float]]:
    """Seconds of single steps by rows: the arms in turn, rotated from round to round."""
    taken: dict[int, list[float]] = {rows: [] for rows in arms}
    order = list(arms)
    for number in range(_ROUNDS):
        for rows in order[number % len(order) :] + order[: number % len(order)]:
            device.synchronize()
            for _ in range(_STEPS):
                began_ns = monotonic_ns()
                arms[rows]()
                device.synchronize()
                taken[rows].append((monotonic_ns() - began_ns) * 1e-9)
    return taken


def rider_figures(batch: int, taken: dict[int, list[float]]) -> dict[str, Any]:
    """Seconds of steps by rows; under 0 those of the batch measured a second time."""
    alone_s = median(taken[batch])
    noise_ratio = abs(median(taken[_AGAIN]) / alone_s - 1.0)
    riders = [
        {
            "rows": rows - batch,
            "cost_ratio": median(times) / alone_s - 1.0,
            "step_ms_p10_p90": _spread(times),
            "rider_tokens_per_s": (rows - batch) / median(times),
            "tokens_per_cost_percent": _per_percent(
                rows - batch, median(times) / alone_s - 1.0, noise_ratio
            ),
        }
        for rows, times in sorted(taken.items())
        if rows > batch
    ]
    return {
        "step_ms": 1e3 * alone_s,
        "step_ms_p10_p90": _spread(taken[batch]),
        "noise_ratio": noise_ratio,
        "riders": riders,
        "rows_borne": {f"within_{share:g}": _borne(riders, share) for share in _BEARABLE},
    }


def _borne(riders: list[dict[str, Any]], share: float) -> int:
    """The largest number of rows up to which every measured number costs at most `share`."""
    borne = 0
    for one in riders:
        if one["cost_ratio"] > share:
            break
        borne = one["rows"]
    return borne


def _per_percent(rows: int, cost_ratio: float, noise_ratio: float) -> float | None:
    """None where the cost is within the noise."""
    return rows / (100.0 * cost_ratio) if cost_ratio > noise_ratio else None


def _spread(times: list[float]) -> list[float]:
    """P10 and P90 in milliseconds."""
    return [1e3 * float(one) for one in np.quantile(times, (0.1, 0.9))]
