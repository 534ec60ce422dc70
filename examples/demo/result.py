"""The observations of a run as `result.json`. Measures nothing and invents nothing: what no record
shows is null. Pure.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from benchmarks.testbed.latency_ratios import latency_ratios
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import (
    ArmRequests,
    Serving,
    arms_of,
    idle_s,
    ratio,
    serving_of,
)
from benchmarks.testbed.slo import ServiceLevel, choose_slo
from examples.demo.checks import checks_of
from examples.demo.job_figures import (
    JobRun,
    compared,
    ideal_speedup,
    job_of,
    on_policy_of,
    trajectories_of,
    weights_of,
)
from examples.demo.records import ArmBlock, DemoArm, Record, TrainingStep
from examples.demo.schema import (
    Intervals,
    LatencyRatios,
    Ratios,
    Result,
    ServingAndJob,
    SloMs,
)
from harvester.contracts.errors import ConfigError


class DemoFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a run outside the records. None if not measured."""

    trace: str
    scale: float | None
    """Trace seconds replayed per second."""
    scaling: dict[str, float] = {}
    """Scales and bounds of token counts, and the mean rate."""
    ttft_slo_s: float
    itl_slo_s: float
    guests: frozenset[str]
    """Names of the engines with harvested tokens."""
    hash_mismatches: int | None
    migrated: int | None
    """Trajectories that went on on another engine."""
    seconds_total: float | None
    seconds_to_first_harvested_token: float | None


def result_of(records: Iterable[Record], facts: DemoFacts) -> Result:
    """The whole result; also of a run that was cut short."""
    kept = tuple(records)
    arms = arms_of([r for r in kept if isinstance(r, ProductionRequest)], DemoArm)
    serving = {
        arm: serving_of(given, ttft_slo_s=facts.ttft_slo_s, itl_slo_s=facts.itl_slo_s)
        for arm, given in arms.items()
    }
    steps = [r for r in kept if isinstance(r, TrainingStep)]
    fixed, harvest = job_of(steps, DemoArm.FIXED), job_of(steps, DemoArm.HARVEST)
    both = compared(fixed, harvest)
    alone = serving[DemoArm.SERVING_ONLY]
    ratios, intervals = _over_alone(DemoArm.HARVEST, arms, serving)
    fixed_ratios, fixed_intervals = _over_alone(DemoArm.FIXED, arms, serving)
    blocks = [r for r in kept if isinstance(r, ArmBlock)]
    busy = busy_share(blocks)
    result = Result(
        trace=facts.trace,
        scale=facts.scale,
        scaling=facts.scaling,
        slo=SloMs(ttft_ms=facts.ttft_slo_s * 1e3, itl_ms=facts.itl_slo_s * 1e3),
        serving_only=alone,
        fixed=_with_job(serving[DemoArm.FIXED], fixed),
        harvest=_with_job(serving[DemoArm.HARVEST], harvest),
        production_busy_share=busy,
        nothing_in_flight_share={
            arm: share
            for arm, given in arms.items()
            if (share := nothing_in_flight_share(blocks, arm, given)) is not None
        },
        ideal_speedup=ideal_speedup(rollout_share=fixed.rollout_share, busy_share=busy),
        ratios=Ratios(
            **msgspec.structs.asdict(ratios),
            step_speedup=both.step_speedup,
            rollout_speedup=both.rollout_speedup,
            step_speedup_per_token=both.step_speedup_per_token,
            rollout_tokens=both.rollout_tokens_ratio,
        ),
        intervals=intervals,
        fixed_ratios=fixed_ratios,
        fixed_intervals=fixed_intervals,
        onpolicy=on_policy_of(steps, guests=facts.guests),
        weights=weights_of(steps, hash_mismatches=facts.hash_mismatches),
        trajectories=trajectories_of(steps, migrated=facts.migrated),
        seconds_total=facts.seconds_total,
        seconds_to_first_harvested_token=facts.seconds_to_first_harvested_token,
    )
    checks = checks_of(result, fixed=fixed, harvest=harvest, both=both)
    return msgspec.structs.replace(result, checks=checks)


def as_json(result: Result) -> dict[str, Any]:
    """Plain values for `json.dump`; a figure that came out infinite or undefined is null."""
    plain: dict[str, Any] = _finite(msgspec.to_builtins(result))
    return plain


def busy_share(blocks: Iterable[ArmBlock]) -> float | None:
    """Busy share of production alone, over the time of its measured blocks."""
    alone = [
        (block.production_busy_share, block.end_s - block.start_s)
        for block in blocks
        if block.arm is DemoArm.SERVING_ONLY
        and block.index >= 0
        and block.production_busy_share is not None
    ]
    return ratio(sum(share * s for share, s in alone), sum(s for _, s in alone))


def nothing_in_flight_share(
    blocks: Iterable[ArmBlock], arm: DemoArm, requests: ArmRequests
) -> float | None:
    """Share of an arm's measured blocks without a request in flight."""
    own = [block for block in blocks if block.arm is arm and block.index >= 0]
    idle = [
        idle_s(
            [r for r in requests.sent if r.block == block.index],
            start_s=block.start_s,
            end_s=block.end_s,
        )
        for block in own
    ]
    return ratio(sum(idle), sum(block.end_s - block.start_s for block in own))


def _over_alone(
    arm: DemoArm, arms: Mapping[DemoArm, ArmRequests], serving: Mapping[DemoArm, Serving]
) -> tuple[LatencyRatios, Intervals]:
    """Means are left out: over so few rounds their intervals are too narrow for rare long waits."""
    found = latency_ratios(arms[arm], arms[DemoArm.SERVING_ONLY])
    attained = ratio(serving[arm].slo_attainment, serving[DemoArm.SERVING_ONLY].slo_attainment)
    return (
        msgspec.convert(found["ratios"] | {"slo_attainment": attained}, LatencyRatios),
        msgspec.convert(found["intervals"], Intervals),
    )


def _with_job(serving: Serving, job: JobRun) -> ServingAndJob:
    first, last = job.reward_first, job.reward_last
    return ServingAndJob(
        **msgspec.structs.asdict(serving),
        steps=len(job.steps),
        step_s_mean=job.step_s_mean,
        rollout_share=job.rollout_share,
        rollout_tokens=job.rollout_tokens,
        rollout_tokens_per_s=ratio(job.rollout_tokens, job.rollout_s),
        reward_first=None if first is None else first.mean,
        reward_last=None if last is None else last.mean,
        reward_se=job.reward_se,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def level_of(arms: Mapping[DemoArm, ArmRequests]) -> ServiceLevel:
    """The SLO that production alone attains on the shared requests.

    Raises ConfigError if no request was replayed in every arm.
    """
    shared = arms[DemoArm.SERVING_ONLY].shared
    if not shared:
        raise ConfigError("no request of the trace came in every arm: use a longer or busier trace")
    return choose_slo(shared).level
