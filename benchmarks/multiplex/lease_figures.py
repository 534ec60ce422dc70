"""The lease's gain, and its effect on production. Pure."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.multiplex.arms import BESIDE_PRODUCTION, MultiplexArm
from benchmarks.multiplex.outcomes import (
    ArmDone,
    Done,
    Round,
    each_round,
    medians,
    named_median,
    of_arm,
    over,
    rounds_of,
    spread,
)
from benchmarks.multiplex.serving_node import ServingFigures
from benchmarks.testbed.latency_ratios import latency_ratios
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import ArmRequests, arms_of, serving_of
from benchmarks.testbed.slo import Slo, choose_slo
from examples.grpo.events import StepDone

_TAIL_KEYS = ("moved", "seconds", "returned", "lost")


def lease_figures(
    done: Done, served: Sequence[ServingFigures], requests: Sequence[ProductionRequest]
) -> dict[str, Any]:
    """Ratios are of the others' makespans over the leased one's, medians over rounds."""
    rounds = rounds_of(done)
    ratios = {
        arm.value: each_round(rounds, partial(over, arm=arm, ours=MultiplexArm.LEASED))
        for arm in MultiplexArm
        if arm is not MultiplexArm.LEASED
    }
    busy_ratio = _busy_ratio([each for each in served if each.run.arm is MultiplexArm.LEASED])
    over_bound = each_round(rounds, partial(_over_bound, production_busy_ratio=busy_ratio))
    jobs = [job for arm in of_arm(done, MultiplexArm.LEASED) for job in arm.jobs.values()]
    tokens = sum(step.rollout_tokens for job in jobs for step in job.steps)
    leased = sum(_leased_tokens(step) for job in jobs for step in job.steps)
    return {
        "makespan_ratio": medians(ratios),
        "spread": spread(ratios),
        **named_median("over_bound", over_bound),
        "leased_tokens_ratio": leased / max(1, tokens),
        "tails": {key: sum(job.tails.get(key, 0.0) for job in jobs) for key in _TAIL_KEYS},
        "production": _production(requests, served),
    }


def bound_s(alone: ArmDone, *, production_busy_ratio: float) -> float:
    """All work of these phases, spread over both cores without a gap, beside production."""
    return (alone.rollouts_s + alone.trainings_s) / (2.0 - production_busy_ratio)


def _over_bound(of: Round, *, production_busy_ratio: float) -> float | None:
    if not {MultiplexArm.SEQUENTIAL, MultiplexArm.LEASED} <= of.keys():
        return None
    bound = bound_s(of[MultiplexArm.SEQUENTIAL], production_busy_ratio=production_busy_ratio)
    return of[MultiplexArm.LEASED].makespan_s / bound


def _production(
    requests: Sequence[ProductionRequest], served: Sequence[ServingFigures]
) -> dict[str, Any]:
    """Ratios with the lease over without, on the requests that both arms replayed.

    The SLO is the one that production attains without the lease, trainers beside it.
    """
    given = arms_of(requests, BESIDE_PRODUCTION)
    control, leased = given[MultiplexArm.SERVING], given[MultiplexArm.LEASED]
    if not control.shared or not leased.shared:
        return {}
    slo = choose_slo(control.shared)
    return {
        "slo": {"ttft_ms": slo.ttft_s * 1e3, "itl_ms": slo.itl_s * 1e3},
        "arms": {
            arm.value: _arm(given[arm], [each for each in served if each.run.arm is arm], slo)
            for arm in BESIDE_PRODUCTION
        },
        **latency_ratios(leased, control),
    }


def _arm(requests: ArmRequests, served: Sequence[ServingFigures], slo: Slo) -> dict[str, Any]:
    serving = serving_of(requests, ttft_slo_s=slo.ttft_s, itl_slo_s=slo.itl_s)
    return {
        "ttft_p50_ms": serving.ttft_p50_ms,
        "ttft_p99_ms": serving.ttft_p99_ms,
        "itl_p50_ms": serving.itl_p50_ms,
        "itl_p99_ms": serving.itl_p99_ms,
        "slo_attainment": serving.slo_attainment,
        "requests": serving.requests,
        "failed": serving.failed,
        "busy_ratio": _busy_ratio(served),
        "guest_tokens_per_s": sum(s.guest_tokens for s in served) / sum(s.seconds for s in served),
    }


def _leased_tokens(step: StepDone) -> int:
    own = (count for name, count in step.tokens_by_engine.items() if name.startswith("rollout-"))
    return step.rollout_tokens - sum(own)


def _busy_ratio(served: Sequence[ServingFigures]) -> float:
    seconds = sum(each.seconds for each in served)
    return sum(each.production_busy_s for each in served) / seconds if seconds else 0.0
