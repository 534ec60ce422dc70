"""The laws by which a guest's steps are admitted, each from pulses, grant and time alone.

    slack        RoseMux's: the largest step that fits into production's slack
    rose         ROSE, section 4.1: chunks of 512 tokens while TTFT and TPOT slack to the SLO itself
                 are positive
    saturation   llm-d's probabilistic admitter (inference scheduler 520af478): new work is shed
                 with probability min(1, 300 * saturation ** 5), work that runs goes on

The last two are other projects' laws, for comparison on one engine. A law is asked only once the
grant is open and every pulse is present and fresh. Pure; the random number is an argument.
"""

import math
from collections.abc import Sequence

import msgspec

from coserve.law.engine_terms import EngineTerms
from coserve.law.slack import events_slack_s, slack_s
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Grant, PulseHead

ROSE_CHUNK_TOKENS = 512
# llm-d's bounds: an engine is full with five waiting requests, or four fifths of its KV in use.
_FULL_WAITING = 5.0
_FULL_KV_RATIO = 0.8
_SHED_FACTOR = 300.0
_SHED_POWER = 5


class GuestLoad(msgspec.Struct, frozen=True):
    """The guest's load and limits for its next step."""

    step_time: StepTimeModel
    decodes: int
    """Running decode requests."""
    context_tokens: int
    """KV tokens of the running requests."""
    launched_s: float
    """Predicted time of launched, unfinished steps."""
    cap: int
    """Token limit of a step, by engine and grant."""


class Admission(msgspec.Struct, frozen=True):
    tokens: int
    """0 admits no step."""
    slack_s: float


def slack_law(
    pulses: Sequence[PulseHead],
    grant: Grant,
    guest: GuestLoad,
    *,
    terms: Sequence[EngineTerms],
    now_ns: int,
) -> Admission:
    """Admit the largest step that fits into production's slack. `terms` has one entry per pulse."""
    slack = slack_s(pulses, grant, terms, now_ns=now_ns)
    budget_s = step_budget_s(slack, grant) - guest.launched_s
    tokens = guest.step_time.tokens_within_s(
        budget_s, decodes=guest.decodes, context_tokens=guest.context_tokens, cap=guest.cap
    )
    return Admission(tokens, slack)


def step_budget_s(slack_s: float, grant: Grant) -> float:
    """The longest guest step that delays production by no more than the slack.

    An isolation backend lets production preempt a running step, so only the preemption and a share
    of the step delay production; without one the whole step does. A decode's slack is usually less
    than the preemption: no step starts between two decode steps.
    """
    preemption_s = grant.preemption_s if grant.blocking_ratio < 1.0 else 0.0
    return (slack_s - preemption_s) / max(grant.blocking_ratio, 1e-3)


def rose_law(
    pulses: Sequence[PulseHead],
    grant: Grant,
    guest: GuestLoad,
    *,
    terms: Sequence[EngineTerms],
    now_ns: int,
) -> Admission:
    """Admit a chunk while all slack to the SLO is positive. `terms` has one entry per pulse."""
    slack = min(
        (
            events_slack_s(pulse, grant, of_engine, epsilon=math.inf, now_ns=now_ns)
            for pulse, of_engine in zip(pulses, terms, strict=True)
        ),
        default=-math.inf,
    )
    return Admission(min(guest.cap, ROSE_CHUNK_TOKENS) if slack > 0.0 else 0, slack)


def saturation_law(pulses: Sequence[PulseHead], guest: GuestLoad, *, chance: float) -> Admission:
    """Shed new work at random as production fills up. `chance` is uniform in [0, 1)."""
    full = [max(p.waiting / _FULL_WAITING, p.kv_usage_ratio / _FULL_KV_RATIO) for p in pulses]
    saturation = sum(full) / len(full) if full else 1.0
    shed = chance < _SHED_FACTOR * saturation**_SHED_POWER
    return Admission(min(guest.cap, guest.decodes) if shed else guest.cap, math.inf)
