"""Figures from requests and slices. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.coserve.arms import BESIDE, IN_ROUNDS, Arm, baseline
from benchmarks.coserve.blocking import percentile_of
from benchmarks.coserve.goals import STEPS_MET_MAX, verdicts
from benchmarks.coserve.residual import residual_figures, share
from benchmarks.coserve.round_log import ProvingSlice
from benchmarks.coserve.rounds import ArmSlice, slower_by_round
from benchmarks.testbed.interleaving import cycle_rounds
from benchmarks.testbed.latencies import ArmLatencies, itl_of, ttft_of
from benchmarks.testbed.latency_ratios import latency_ratios
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.round_ratios import STATISTICS, mean_interval
from benchmarks.testbed.serving_figures import ArmRequests, arms_of, serving_of
from benchmarks.testbed.slo import ServiceLevel, attains


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    trace: str
    requests_per_s: float
    level: ServiceLevel
    """The SLO, fixed before the first round."""
    arms: tuple[Arm, ...]


def figures(
    requests: Sequence[ProductionRequest], slices: Sequence[ArmSlice], facts: Facts
) -> dict[str, Any]:
    """Every latency rests on the requests that all arms replayed.

    Rounds of a cycle of orders that is not over are left out, but where it is the first.
    """
    every, cycle = len({each.round for each in slices}), cycle_rounds(len(facts.arms))
    rounds = every - every % cycle or every
    slices = [each for each in slices if each.round < rounds]
    requests = [each for each in requests if each.block < rounds]
    serving = tuple(arm for arm in facts.arms if IN_ROUNDS[arm].production)
    given = arms_of(requests, serving)
    base = baseline(facts.arms)
    arms = {arm: _arm(given[arm], facts.level) for arm in serving}
    for arm in facts.arms:
        arms.setdefault(arm, {})["rollout_tokens_per_s"] = _mean(
            slices, arm, lambda each: each.guest_tokens
        )
    beside = {
        arm: latency_ratios(given[arm], given[base], slower_by_round(slices, arm, base))
        | _attainment_drop(given[arm], given[base], facts.level)
        | _speeds(slices, arm, base)
        | residual_figures(slices, arm, base=base)
        for arm in serving
        if arm in BESIDE
    }
    over_stock = {
        arm: latency_ratios(given[arm], given[Arm.STOCK], slower_by_round(slices, arm, Arm.STOCK))
        for arm in serving
        if Arm.STOCK in serving and arm is not Arm.STOCK
    }
    result: dict[str, Any] = {
        "trace": facts.trace,
        "requests_per_s": facts.requests_per_s,
        "rounds": rounds,
        "rounds_of_an_unfinished_cycle": every - rounds,
        "orders_balanced": rounds % cycle == 0,
        "slo": {"ttft_ms": facts.level.ttft_s * 1e3, "itl_ms": facts.level.itl_s * 1e3},
        "ratios_over": base,
        "arms": arms,
        "production_busy_share": _mean(slices, base, lambda each: each.production_busy_s or 0.0),
        "production_core_share": _mean(slices, base, lambda each: each.production_core_s),
        "beside": beside,
        "over_stock": over_stock,
    }
    if Arm.ROSEMUX in beside:
        result |= beside[Arm.ROSEMUX] | _steps_of(slices, Arm.ROSEMUX)
        fewest = min(arms[arm]["requests"] for arm in serving)
        result["verdicts"] = verdicts(result, requests=fewest)
    return result


def proving_figures(
    proving: Sequence[ProvingSlice], slices: Sequence[ArmSlice], facts: Facts
) -> dict[str, Any]:
    """Figures of the time in which the slot proved itself; production's core share and the guest's
    pace alone are those of the rounds."""
    requests = [each for one in proving for each in one.requests]
    level = facts.level
    missed = sum(not attains(x, ttft_s=level.ttft_s, itl_s=level.itl_s) for x in requests)
    new = [one.measured for one in proving]
    others = [each for each in slices if each.arm is not Arm.ROSEMUX]
    return {
        "proving": {
            "seconds": sum(each.seconds for each in new),
            "requests": len(requests),
            "slo_attainment": 1.0 - missed / len(requests) if requests else None,
            "residual_share": share((*new, *others), Arm.ROSEMUX, baseline(facts.arms)),
        }
    }


def _arm(given: ArmRequests, level: ServiceLevel) -> dict[str, Any]:
    serving = serving_of(given, ttft_slo_s=level.ttft_s, itl_slo_s=level.itl_s)
    return {
        f"{name}_{statistic}_ms": _ms(of(given.shared), figure)
        for name, of in (("ttft", ttft_of), ("itl", itl_of))
        for statistic, figure in STATISTICS.items()
    } | {
        "slo_attainment": serving.slo_attainment,
        "requests": serving.requests,
        "failed": serving.failed,
    }


def _ms(latencies: ArmLatencies, figure: Callable[[Any], float]) -> float | None:
    return 1e3 * figure(latencies.values_s) if len(latencies.values_s) else None


def _steps_of(slices: Sequence[ArmSlice], arm: Arm) -> dict[str, Any]:
    """Our own work in a step, and the guest steps that requests met; intervals over rounds."""
    own = [each for each in slices if each.arm is arm]
    met: Counter[int] = Counter()
    for each in own:
        met.update(each.steps_met)
    steps = sum(each.guest_steps for each in own)
    histogram = dict(sorted(met.items()))
    works = [(1e6 * s.step_work_s, s.guest_steps) for s in own]
    beyond = [
        (
            sum(count for number, count in s.steps_met.items() if number > STEPS_MET_MAX),
            sum(s.steps_met.values()),
        )
        for s in own
    ]
    return {
        "step_overhead_us": 1e6 * sum(s.step_work_s for s in own) / steps if steps else None,
        "step_overhead_interval_us": _ratio_interval(works),
        "steps_met": histogram,
        # Without a step there is nothing to meet.
        "steps_met_p99": percentile_of(histogram, 99) if steps else None,
        "steps_met_beyond_interval": _ratio_interval(beyond) if steps else None,
        "steps_unseen_ratio": sum(s.steps_missed for s in own) / steps if steps else None,
    }


def _ratio_interval(slices: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Interval of a ratio of sums over slices, of which each has both parts (Cochran, Sampling
    Techniques, 6.4)."""
    whole = fmean(part for _, part in slices) if slices else 0.0
    if not whole:
        return None
    ratio = fmean(part for part, _ in slices) / whole
    return mean_interval([ratio + (part - ratio * of) / whole for part, of in slices])


def _speeds(slices: Sequence[ArmSlice], arm: Arm, base: Arm) -> dict[str, Any]:
    """How much slower the machine was in the arm's slices: 1, but for chance."""
    slower = list(slower_by_round(slices, arm, base).values())
    interval = mean_interval(slower)
    return {
        "machine_slower_ratio": math.exp(fmean(slower)) if slower else None,
        "machine_slower_interval": None if interval is None else tuple(map(math.exp, interval)),
    }


def _mean(slices: Sequence[ArmSlice], arm: Arm, of: Callable[[ArmSlice], float]) -> float | None:
    """Amount in a second, over all of an arm's slices, which are equally long."""
    rates = [of(each) / each.seconds for each in slices if each.arm is arm]
    return fmean(rates) if rates else None


def _attainment_drop(above: ArmRequests, below: ArmRequests, level: ServiceLevel) -> dict[str, Any]:
    """Points of SLO attainment that are lost, of all requests, and their interval over rounds."""
    lost: Counter[int] = Counter({each.block: 0 for each in below.shared})
    for arm, sign in ((above, 1), (below, -1)):
        for each in arm.shared:
            missed = not attains(each, ttft_s=level.ttft_s, itl_s=level.itl_s)
            lost[each.block] += sign * missed
    # Every round weighs as its requests do.
    points = [100.0 * len(lost) * each / max(1, len(below.shared)) for each in lost.values()]
    return {
        "slo_attainment_drop": fmean(points) if points else None,
        "slo_attainment_drop_interval": mean_interval(points),
    }
