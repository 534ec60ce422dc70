"""Refuses a demo's `result.json` that is not whole, or whose zeros are not zeros.

Usage: check_result.py PATH. Whole means: every key of the schema and no other, each a number of the
right kind, `null` only where something was not measured. Judges no speed: a quick run on a busy
machine may be slow, but it may lose nothing.
"""

import sys
from pathlib import Path

import msgspec


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object of the result: all of its keys, and no others."""


class Slo(Part, frozen=True):
    ttft_ms: float | None
    itl_ms: float | None


class Latency(Part, frozen=True):
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    requests: int
    failed: int
    slo_attainment: float | None


class Job(Latency, frozen=True):
    """Production's latency while the job ran, and the job."""

    steps: int
    step_s_mean: float | None
    rollout_share: float | None
    rollout_tokens: int
    rollout_tokens_per_s: float | None
    reward_first: float | None
    reward_last: float | None
    reward_se: float | None


class Ratios(Part, frozen=True):
    ttft_p50: float | None
    itl_p50: float | None
    ttft_p99: float | None
    itl_p99: float | None
    slo_attainment: float | None
    step_speedup: float | None
    rollout_speedup: float | None


Interval = tuple[float, float] | None


class Intervals(Part, frozen=True):
    ttft_p50: Interval
    itl_p50: Interval
    ttft_p99: Interval
    itl_p99: Interval


class OnPolicy(Part, frozen=True):
    logprob_gap_dedicated: float | None
    logprob_gap_harvested: float | None
    stale_tokens: int


class Weights(Part, frozen=True):
    versions: int
    bytes_dense: int
    bytes_sent: int
    hash_mismatches: int


class Trajectories(Part, frozen=True):
    started: int
    completed: int
    lost: int
    duplicated: int
    migrated: int


class Result(Part, frozen=True):
    trace: str
    scale: float | None
    slo: Slo
    serving_only: Latency
    fixed: Job
    harvest: Job
    production_busy_share: float | None
    ideal_speedup: float | None
    ratios: Ratios
    intervals: Intervals
    onpolicy: OnPolicy
    weights: Weights
    trajectories: Trajectories
    seconds_total: float
    seconds_to_first_harvested_token: float | None


def faults(result: Result) -> list[str]:
    """Return what must not be so in any run, quick or slow."""
    zeros = {
        "serving_only.failed": result.serving_only.failed,
        "fixed.failed": result.fixed.failed,
        "harvest.failed": result.harvest.failed,
        "onpolicy.stale_tokens": result.onpolicy.stale_tokens,
        "weights.hash_mismatches": result.weights.hash_mismatches,
        "trajectories.lost": result.trajectories.lost,
        "trajectories.duplicated": result.trajectories.duplicated,
    }
    happened = {
        "serving_only.requests": result.serving_only.requests,
        "fixed.requests": result.fixed.requests,
        "harvest.requests": result.harvest.requests,
        "fixed.steps": result.fixed.steps,
        "harvest.steps": result.harvest.steps,
        "fixed.rollout_tokens": result.fixed.rollout_tokens,
        "harvest.rollout_tokens": result.harvest.rollout_tokens,
        "weights.versions": result.weights.versions,
        "trajectories.completed": result.trajectories.completed,
        "seconds_to_first_harvested_token": result.seconds_to_first_harvested_token,
    }
    return [
        *(f"{name} is {value}, must be 0" for name, value in zeros.items() if value != 0),
        *(
            f"{name} is {value}, must be more than 0"
            for name, value in happened.items()
            if not value
        ),
    ]


def main(path: str) -> int:
    try:
        result = msgspec.json.decode(Path(path).read_bytes(), type=Result)
    except OSError as error:
        print(f"{path}: {error.strerror}; did the demo end?", file=sys.stderr)
        return 2
    except msgspec.ValidationError as error:
        print(f"{path} is not whole: {error}", file=sys.stderr)
        return 1
    except msgspec.DecodeError as error:
        print(f"{path} is not JSON: {error}", file=sys.stderr)
        return 1
    found = faults(result)
    for fault in found:
        print(f"{path}: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_result.py PATH")
    sys.exit(main(sys.argv[1]))
