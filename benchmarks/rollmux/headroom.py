"""Headroom of a serving accelerator, second by second: a trace through the step-time model.

One slot is one production engine that replays the trace, as the demo's does: token counts scaled to
its model, time scaled until it has steps to run for a given share of the time. The rest of each
second, times the share of idle time that harvesting was measured to get, is its headroom.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.testbed.calibration import TARGET_BUSY_SHARE
from benchmarks.testbed.production_model import STEP_TOKENS
from benchmarks.testbed.trace import Trace
from harvester.contracts.page import ProductionModel
from scheduler.rollmux.forecast.compiled import Records, compiled

MEASURED_STEPS: Final = ProductionModel(
    prefill_base_s=3.5e-3,
    prefill_s_per_token=1.35e-4,
    decode_base_s=4.4e-3,
    decode_s_per_request=1e-4,
)
"""The demo's production model (21 M parameters) in stock vLLM on one core of a 2.6 GHz Sapphire
Rapids Xeon: a line through the least of twelve prefills of 64 to 384 tokens, and of eight decode
steps of 1 to 24 requests."""
HARVESTED_RATIO: Final = 0.92
"""Share of idle time that a guest gets: the goal of `benchmarks/coserve`, which measures 0.88
[0.85, 0.92] and 0.94 [0.87, 1.02] on one core."""
INPUT_SCALE: Final = 0.25
OUTPUT_SCALE: Final = 0.25
INPUT_MAX: Final = 1024
OUTPUT_MAX: Final = 128
_HALVINGS: Final = 24
_SLOWEST, _FASTEST = 1 / 256, 256.0
REQUESTS_MAX: Final = 200_000
"""Limit of requests; only the beginning of a longer trace counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    trace: str
    speed: float
    """Trace seconds in one second."""
    busy_share: float
    """Busy share of production alone."""
    harvested_ratio: float
    given_s: Records
    """Accelerator seconds that a slot gave by the end of each second, from 0 on."""

    @property
    def mean(self) -> float:
        return float(self.given_s[-1]) / (len(self.given_s) - 1)


@compiled
def _busy_s(
    arrivals_s: Records,
    input_tokens: Records,
    output_tokens: Records,
    model: tuple[float, float, float, float],
    step_tokens: int,
    seconds: int,
) -> Records:
    """Per second, the engine's stepping time in s: continuous batching, prompts cut to steps."""
    prefill_base_s, s_per_token, decode_base_s, s_per_request = model
    busy_s = np.zeros(seconds)
    ring = np.zeros(output_tokens.max() + 1, dtype=np.int64)
    at, step, running, left, now_s = 0, 0, 0, 0, 0.0
    while now_s < seconds and (at < arrivals_s.size or running > 0):
        if running == 0:
            now_s = max(now_s, arrivals_s[at])
        step_s = decode_base_s + s_per_request * running
        room, joined = step_tokens - running, 0
        prompt = 0
        while at < arrivals_s.size and arrivals_s[at] <= now_s and prompt < room:
            left = input_tokens[at] if left == 0 else left
            piece = min(left, room - prompt)
            left -= piece
            prompt += piece
            if left == 0:
                if output_tokens[at] > 1:
                    ring[(step + output_tokens[at] - 1) % ring.size] += 1
                    joined += 1
                at += 1
        if prompt:
            step_s += s_per_token * prompt + max(0.0, prefill_base_s - decode_base_s)
        running += joined - ring[step % ring.size]
        ring[step % ring.size] = 0
        step += 1
        end_s = now_s + step_s
        while now_s < end_s and now_s < seconds:
            second = int(now_s)
            part_s = min(end_s, second + 1.0) - now_s
            busy_s[second] += part_s
            now_s = end_s if end_s <= second + 1.0 else second + 1.0
    return busy_s


def _sized(tokens: npt.NDArray[np.int64], scale: float, most: int) -> npt.NDArray[np.int64]:
    return np.asarray(np.clip(np.rint(tokens * scale), 1, most), dtype=np.int64)


def headroom_of(
    trace: Trace,
    *,
    model: ProductionModel = MEASURED_STEPS,
    busy_share: float = TARGET_BUSY_SHARE,
    harvested_ratio: float = HARVESTED_RATIO,
) -> Headroom:
    """The trace at the speed that keeps production alone busy for `busy_share` of the time.

    Raises ValueError for shares outside (0, 1).
    """
    if not 0.0 < busy_share < 1.0 or not 0.0 <= harvested_ratio <= 1.0:
        raise ValueError("busy_share must lie between 0 and 1, harvested_ratio from 0 to 1")
    t_s = trace.t_s[:REQUESTS_MAX]
    inputs = _sized(trace.input_tokens[:REQUESTS_MAX], INPUT_SCALE, INPUT_MAX)
    outputs = _sized(trace.output_tokens[:REQUESTS_MAX], OUTPUT_SCALE, OUTPUT_MAX)
    steps = (
        model.prefill_base_s,
        model.prefill_s_per_token,
        model.decode_base_s,
        model.decode_s_per_request,
    )

    def busy(speed: float) -> npt.NDArray[np.float64]:
        seconds = max(1, int(np.ceil(float(t_s[-1]) / speed)))
        return np.asarray(_busy_s(t_s / speed, inputs, outputs, steps, STEP_TOKENS, seconds))

    slow, fast = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        if busy(middle).mean() < busy_share:
            slow = middle
        else:
            fast = middle
    found = busy(slow)
    idle = harvested_ratio * np.clip(1.0 - found, 0.0, 1.0)
    return Headroom(
        trace=trace.name,
        speed=slow,
        busy_share=float(found.mean()),
        harvested_ratio=harvested_ratio,
        given_s=np.concatenate([[0.0], np.cumsum(idle)]),
    )
