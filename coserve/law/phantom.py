"""The phantom: a production request that might arrive at any moment, drawn from the prompts seen.

It decides how long an arrival may wait for a guest step that has begun, so that harvesting keeps
its promise on the time to first token (TTFT). Touches no page and no clock.

    T        TTFT of a prompt alone on an idle engine: its prefill
    H        harmonic mean of T over the prompts, 1 / mean(1 / T)
    w(s)     longest wait behind a step of s seconds: preemption + blocking ratio * s
    room     share * SLO / (1 + share), the share epsilon of a prompt that just keeps its SLO

    each     min(epsilon * T(P10), epsilon * H, longest)
    mean     epsilon * min(H, T(P50))
    longest  max(room, SLO - T(P99))

A step with w(s) <= each may start at any time. A request then takes at most T + each, so

    TTFT(q) <= (1 + epsilon) T(q)             at every percentile q from P10 up,
    mean(TTFT / T) <= 1 + each mean(1 / T) <= 1 + epsilon, and the ratio of means with it,
    TTFT(P99) <= SLO                          where production alone keeps it by `each`.

With isolation, where production preempts a step, nearly every step is one of these. Without it none
is: the whole step is a wait. A longer step, w(s) <= longest, starts only beside idle production and
rests afterwards. Arrivals are independent of guest steps: among those that find production idle, a
share s / c meets a step that is repeated every c seconds, and waits for m(s), on average, where

    c     = s * max(3, m(s) / mean),   m(s) = s / 2 at a blocking ratio of 1, else w(s)

so that

    mean(TTFT / T) <= 1 + (s / c) m(s) / H <= 1 + epsilon, and the ratio of means with it,
    two thirds of the requests do not wait at all, and none longer than w(s),
    TTFT(P50) <= (1 + epsilon) T(P50)         where T is spread evenly over a step's length below
                                              its median; always at most T(P75),
    TTFT(P99) <= SLO                          where production alone keeps it by w(s).

Each rest is drawn evenly from the length of a cycle around its mean, c - s: a client that sends at
a constant interval is independent of the steps too. The worst interval waits for 1.4 * mean.

While no prompt is known, and beside the first few, a prompt of one token stands among them.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from harvester.contracts.page import Grant, ProductionModel

SHORTEST_PROMPT_TOKENS = 1
MOST_RESTED_STEPS = 3.0
"""A step with a rest takes at most one part in this many of idle time."""
_QUANTILES = 10
# Largest share of its SLO, however large epsilon is, that a prompt too long for it may lose.
_UNKEPT_SHARE_MAX = 0.25


class Phantom(NamedTuple):
    """Waits of an arrival, in seconds."""

    each_s: float
    """Wait that every arrival may have."""
    mean_s: float
    """Mean wait that arrivals may have."""
    longest_s: float
    """Upper bound on the wait of any arrival."""

    def least(self, other: "Phantom") -> "Phantom":
        return Phantom(*[lesser(one, two) for one, two in zip(self, other, strict=True)])


def quantiles_of(prompt_tokens: Sequence[int]) -> tuple[int, ...]:
    """Prompt lengths in ascending order, at most 10, each of which stands for an equal share of
    prompts that are at least as long. Fewer than 10 prompts are joined by a prompt of one token."""
    ordered = sorted(prompt_tokens)
    if len(ordered) < _QUANTILES:
        return (SHORTEST_PROMPT_TOKENS, *ordered)
    return tuple(ordered[place * len(ordered) // _QUANTILES] for place in range(_QUANTILES))


@lru_cache(maxsize=1024)
def phantom(
    prompts: tuple[int, ...],
    longest_prompt: int,
    model: ProductionModel,
    slo_s: float,
    epsilon: float,
) -> Phantom:
    """`prompts`: from `quantiles_of`, in any order; `longest_prompt`: their P99. With an infinite
    epsilon only the longest prompt's SLO counts, as in ROSE's law."""
    late_s = slo_s - _alone_s(model, longest_prompt)
    if epsilon == math.inf:
        return Phantom(late_s, late_s, late_s)
    if not epsilon >= 0.0:
        return Phantom(-math.inf, -math.inf, -math.inf)
    share = min(epsilon, _UNKEPT_SHARE_MAX)
    room_s = share * slo_s / (1.0 + share)
    # A prompt that production alone serves late, or hardly in time, has no SLO to lose: judged by
    # it, an SLO set near the P99 would shut an idle machine for ever.
    longest_s = late_s if late_s > room_s else room_s
    alone_s = [_alone_s(model, each) for each in sorted(prompts) or (SHORTEST_PROMPT_TOKENS,)]
    harmonic_s = 0.0
    if min(alone_s) > 0.0:
        harmonic_s = len(alone_s) / max(sum([1.0 / each for each in alone_s]), 1e-300)
    each_s = epsilon * lesser(alone_s[len(alone_s) // 10], harmonic_s)
    mean_s = epsilon * lesser(alone_s[len(alone_s) // 2], harmonic_s)
    return Phantom(lesser(each_s, longest_s), mean_s, longest_s)


def step_budget_s(wait_s: float, grant: Grant) -> float:
    """The longest guest step behind which an event of production waits no longer than `wait_s`.

    An isolation backend lets production preempt a running step, so only the preemption and a share
    of the step delay production; without one the whole step does. A decode's slack is usually less
    than the preemption: no step starts between two decode steps.
    """
    preemption_s = grant.preemption_s if grant.blocking_ratio < 1.0 else 0.0
    return (wait_s - preemption_s) / max(grant.blocking_ratio, 1e-3)


def rest_s(step_s: float, mean_s: float, grant: Grant) -> float:
    """Idle time of production, in seconds, owed after a step of `step_s` that is longer than any
    arrival may wait; infinite if arrivals may not wait at all."""
    if not mean_s > 0.0:
        return math.inf
    waits_s = step_s / 2
    if grant.blocking_ratio < 1.0:
        waits_s = grant.preemption_s + grant.blocking_ratio * step_s
    return step_s * max(MOST_RESTED_STEPS - 1.0, waits_s / mean_s - 1.0)


def _alone_s(model: ProductionModel, prompt_tokens: int) -> float:
    # The first token comes with the prefill; a NaN in the decodes' times makes this one too.
    return model.prefill_s(prompt_tokens) + 0.0 * model.decode_s(1)


def lesser(one_s: float, other_s: float) -> float:
    """The smaller value; minus infinity if either is NaN."""
    if one_s <= other_s:
        return one_s
    return other_s if other_s < one_s else -math.inf
