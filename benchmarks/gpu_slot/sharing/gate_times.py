"""Times of a guest's obedience: grant to step, closing to silence, arrival to silence.

Pure, from logs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu_slot.engines.step_log import LoggedStep, ServedRequest


def grant_to_step_s(opened_ns: Sequence[int], guest: Sequence[LoggedStep]) -> list[float]:
    """Seconds from each opening to the launch of the first step after it."""
    starts = [step.start_ns for step in guest]
    indices = [bisect_left(starts, at_ns) for at_ns in opened_ns]
    pairs = zip(opened_ns, indices, strict=True)
    return [(starts[index] - at_ns) * 1e-9 for at_ns, index in pairs if index < len(starts)]


def closing_to_silence_s(
    closed_ns: Sequence[int], until_ns: Sequence[int], guest: Sequence[LoggedStep]
) -> list[float]:
    """From each closing to the end of the last step launched before `until_ns`, the next opening;
    0 where none ran or was launched."""
    found = []
    starts = [step.start_ns for step in guest]
    for at_ns, end_ns in zip(closed_ns, until_ns, strict=True):
        last = bisect_left(starts, end_ns) - 1
        silent_ns = guest[last].end_ns if last >= 0 else 0
        found.append(max(0, silent_ns - at_ns) * 1e-9)
    return found


def arrival_to_silence_s(
    requests: Sequence[ServedRequest], guest: Sequence[LoggedStep]
) -> list[float]:
    """From each arrival while a guest step ran to the end of the last step launched before the
    request had its first token. Requests that met no guest step are left out."""
    starts = [step.start_ns for step in guest]
    found = []
    for request in requests:
        running = bisect_right(starts, request.arrival_ns) - 1
        if running < 0 or guest[running].end_ns <= request.arrival_ns:
            continue
        last = bisect_left(starts, request.first_ns) - 1
        found.append((guest[last].end_ns - request.arrival_ns) * 1e-9)
    return found


def launched_after_arrival(requests: Sequence[ServedRequest], guest: Sequence[LoggedStep]) -> int:
    """Guest steps launched between an arrival and that request's first token."""
    starts = [step.start_ns for step in guest]
    return sum(
        bisect_left(starts, request.first_ns) - bisect_right(starts, request.arrival_ns)
        for request in requests
    )


def summary_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Count, and quantiles in milliseconds; the count alone where there are none."""
    if not seconds:
        return {"count": 0}
    values = 1e3 * np.asarray(seconds)
    named = {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in (0.5, 0.9, 0.99)}
    return {"count": len(seconds), **named, "max": float(values.max())}
