"""The replay speed at which production alone has steps to run for a given share of the time.

The busy share of a whole excerpt cannot be measured before its replay, and a burst-heavy
trace makes any short part of it a bad sample. So a short replay measures the duration of this
machine's steps, and the excerpt's busy share is computed from them: batched continuous serving, one
step after another, each as long as its contents demand. Pure.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.production_model import STEP_TOKENS
from benchmarks.testbed.trace import Arrival
from harvester.contracts.page import ProductionModel

TARGET_BUSY_SHARE = 0.5
_ITERATIONS = 24
_SLOWEST, _FASTEST = 1 / 64, 64.0
_QUICKEST, _LONGEST = 1 / 16, 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReplay:
    """A replay that has been measured: what came in, and how long the engine had steps to run."""

    arrivals: Sequence[Arrival]
    seconds: float
    busy_s: float


def busy_share(
    arrivals: Sequence[Arrival],
    model: ProductionModel,
    *,
    excerpt_s: float,
    step_tokens: int = STEP_TOKENS,
) -> float:
    """Share of `excerpt_s` in which the engine has something to step.

    `step_tokens` is the engine's budget for one step.
    """
    running, ending = 0, Counter[int]()  # Requests, and how many of them end with which step.
    at, step, busy_s, now = 0, 0, 0.0, 0.0
    while at < len(arrivals) or running:
        if not running:
            now = max(now, arrivals[at].t_s)
        prompt_tokens = 0
        while at < len(arrivals) and arrivals[at].t_s <= now and prompt_tokens < step_tokens:
            prompt_tokens += arrivals[at].input_tokens
            ending[step + max(1, arrivals[at].output_tokens)] += 1
            running += 1
            at += 1
        step_s = model.decode_s(running) + model.prefill_s_per_token * prompt_tokens
        if prompt_tokens:
            step_s += max(0.0, model.prefill_base_s - model.decode_base_s)
        now, busy_s = now + step_s, busy_s + step_s
        step += 1
        running -= ending.pop(step, 0)
    return busy_s / max(excerpt_s, now)


def scaled(model: ProductionModel, ratio: float) -> ProductionModel:
    """The model with every step `ratio` times as long."""
    return ProductionModel(
        prefill_base_s=ratio * model.prefill_base_s,
        prefill_s_per_token=ratio * model.prefill_s_per_token,
        decode_base_s=ratio * model.decode_base_s,
        decode_s_per_request=ratio * model.decode_s_per_request,
    )


def measured_ratio(
    replays: Sequence[MeasuredReplay], model: ProductionModel, *, step_tokens: int = STEP_TOKENS
) -> float:
    """Ratio of measured to modelled step time that explains the busy time of all replays.

    1 without busy replays; within 1/16 and 16. Fitted to busy seconds, not to busy shares: in a
    burst that keeps the engine busy to its end the share is 1 for any step time.
    """
    measured_s = sum(each.busy_s for each in replays if each.arrivals)
    if measured_s <= 0:
        return 1.0
    low, high = _QUICKEST, _LONGEST
    for _ in range(_ITERATIONS):
        middle = (low * high) ** 0.5
        longer = scaled(model, middle)
        computed_s = sum(
            busy_share(each.arrivals, longer, excerpt_s=each.seconds, step_tokens=step_tokens)
            * each.seconds
            for each in replays
        )
        if computed_s < measured_s:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)


def mean_busy_share(
    excerpts: Sequence[Excerpt], model: ProductionModel, *, step_tokens: int = STEP_TOKENS
) -> float:
    """Mean busy share of excerpts of equal length, each replayed on an idle engine."""
    return fmean(
        busy_share(excerpt.arrivals, model, excerpt_s=excerpt.duration_s, step_tokens=step_tokens)
        for excerpt in excerpts
    )


def rate_for(
    excerpts: Callable[[float], Sequence[Excerpt]],
    model: ProductionModel,
    *,
    measured_ratio: float,
    target: float = TARGET_BUSY_SHARE,
    step_tokens: int = STEP_TOKENS,
) -> float:
    """The replay rate at which the busy share of `excerpts(rate)` comes to `target`.

    `measured_ratio` is how much longer the short replays' steps were than the model says.
    """
    model = scaled(model, measured_ratio)
    slow, fast = _SLOWEST, _FASTEST
    for _ in range(_ITERATIONS):
        middle = (slow * fast) ** 0.5
        if mean_busy_share(excerpts(middle), model, step_tokens=step_tokens) < target:
            slow = middle
        else:
            fast = middle
    return float((slow * fast) ** 0.5)
