"""The gate: may the guest start a step now, and of how many tokens.

It decides from page readings and a given time alone. It is closed without a valid grant, with a
missing, torn or foreign pulse, and while a production engine hangs. Once the
grant is open and every pulse is present and fresh, the grant's law admits the step:

    slack        RoseMux's: the largest step that fits into production's slack; where none does, a
                 short step beside idle production, and then a rest
    rose         ROSE, section 4.1: chunks of 512 tokens while TTFT and TPOT slack to the SLO itself
                 are positive
    saturation   llm-d's probabilistic admitter (inference scheduler 520af478): new work is shed
                 with probability min(1, 300 * saturation ** 5), work that runs goes on

The last two are other projects' laws, for comparison on one engine.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from random import random

import msgspec

from coserve.law.engine_terms import EngineTerms, idle, terms_of
from coserve.law.phantom import MOST_RESTED_STEPS, Phantom, lesser, rest_s, step_budget_s
from coserve.law.slack import events_slack_s, hung, slack_s
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Grant, GrantMode, Law, PageFault, PulseHead, Reading

ROSE_CHUNK_TOKENS = 512
# llm-d's bounds: an engine is full with five waiting requests, or four fifths of its KV in use.
_FULL_WAITING = 5.0
_FULL_KV_RATIO = 0.8
_SHED_FACTOR = 300.0
_SHED_POWER = 5
_PROBE_AGAIN_NS = 600_000_000_000
"""Pause after a step that was longer than production's SLO bears: a guest whose steps all are must
not make a hundredth of production's requests miss their SLO by its probes."""
_BRIEF_STEPS = 2.0
"""Step length, in multiples of the shortest step, with the highest throughput when the rest grows
with the step's square."""


class Closed(StrEnum):
    """Why no step may start."""

    NO_GRANT = "no_grant"
    GRANT_FAULT = "grant_fault"
    GRANT_CLOSED = "grant_closed"
    NO_PULSE = "no_pulse"
    PULSE_FAULT = "pulse_fault"
    HUNG = "hung"
    NO_SLACK = "no_slack"
    RESTING = "resting"


_BY_GRANT = (Closed.NO_GRANT, Closed.GRANT_FAULT, Closed.GRANT_CLOSED)


class StepDecision(msgspec.Struct, frozen=True):
    tokens: int
    """0 closes the gate; more is the largest step that may start now."""
    reason: Closed | None
    slack_s: float
    fault: PageFault | None = None
    probe: bool = False
    """Open for one token against the prediction, to learn whether it is right."""
    mean_wait_s: float | None = None
    """Mean wait in s that arrivals can bear, which sets the step's rest; None without a rest."""
    rest_s: float = 0.0
    """Time until the rest is over, if production stays idle."""
    owed_s: float | None = None
    """Remaining rest, counted until now; None if production was not seen idle."""

    @property
    def open(self) -> bool:
        return self.tokens > 0

    @property
    def closed_by_grant(self) -> bool:
        """Whether only another grant can open the gate, whatever production does."""
        return self.reason in _BY_GRANT


class GuestLoad(msgspec.Struct):
    """The guest's load and limits for its next step. The gate changes nothing in it."""

    step_time: StepTimeModel
    decodes: int = 0
    """Running decode requests."""
    context_tokens: int = 0
    """KV tokens of the running requests."""
    launched_s: float = 0.0
    """Predicted time of steps that are launched and not finished."""
    cap: int = 0
    """Token limit of a step: the engine's; a law gets the lesser of it and the grant's."""
    rest_s: float = 0.0
    """Idle time of production that the last step still owes."""
    quiet_s: float = 0.0
    """Part of the rest that production's idle time before a step must have in one piece."""
    rested_ns: int = 0
    """Time until which the rest is counted."""
    last_end_ns: int = 0
    """End of the last step."""
    last_own_s: float = 0.0
    """The last step's time without production's: what an arrival may have to wait for."""


def decide(
    grant: Reading[Grant],
    pulses: Sequence[Reading[PulseHead]],
    guest: GuestLoad,
    *,
    may_probe: bool,
    now_ns: int,
    chance: Callable[[], float] = random,
) -> StepDecision:
    """Decision of the grant's law over all pulses of a slot.

    `may_probe`: the last step is long enough ago for a probe, one token beside idle production
    although not even a short step is predicted to fit. Without probes a wrong prediction would
    never be corrected. A probe rests as a step that arrivals wait for; after one that was too long
    for the SLO the next follows ten minutes later.
    """
    record = grant.record
    if record is None:
        missing = grant.fault is PageFault.MISSING
        return StepDecision(0, Closed.NO_GRANT if missing else Closed.GRANT_FAULT, 0.0, grant.fault)
    if record.mode is GrantMode.CLOSED:
        return StepDecision(0, Closed.GRANT_CLOSED, 0.0)
    if 0 < record.step_tokens_cap < guest.cap:
        guest = msgspec.structs.replace(guest, cap=record.step_tokens_cap)
    if record.mode is GrantMode.UNGATED:
        return StepDecision(guest.cap, None, math.inf)
    if not pulses or len(pulses) != len(record.pulses):
        return StepDecision(0, Closed.NO_PULSE, 0.0)
    present: list[PulseHead] = []
    for reading in pulses:
        if reading.record is None:
            return StepDecision(0, Closed.PULSE_FAULT, 0.0, reading.fault)
        present.append(reading.record)
    terms = terms_of(present, record)
    for pulse, of_engine in zip(present, terms, strict=True):
        if pulse.in_flight and hung(pulse, of_engine, now_ns=now_ns):
            return StepDecision(0, Closed.HUNG, 0.0)
    match record.law:
        case Law.SLACK:
            found = slack_law(present, record, guest, terms=terms, now_ns=now_ns)
        case Law.ROSE:
            found = rose_law(present, record, guest, terms=terms, now_ns=now_ns)
        case Law.SATURATION:
            found = saturation_law(present, guest, chance=chance())
    if record.law is not Law.SLACK or guest.cap <= 0 or guest.launched_s > 0.0:
        return found
    if not idle(present, terms, now_ns=now_ns):
        return found
    owed_s = 0.0
    if guest.quiet_s > 0.0:
        # Idle times add up: one long rest would else never end between production's requests.
        since_ns = max([guest.last_end_ns, *[pulse.last_step_end_ns for pulse in present]])
        owed_s = max(0.0, guest.rest_s - (now_ns - max(since_ns, guest.rested_ns)) * 1e-9)
        left_s = max(owed_s, guest.quiet_s - (now_ns - since_ns) * 1e-9)
        if left_s > 0.0:
            return StepDecision(0, Closed.RESTING, found.slack_s, rest_s=left_s, owed_s=owed_s)
    waits = waits_of(terms, record)
    step = idle_step(waits, record, guest)
    if step.tokens > 0:
        return StepDecision(
            step.tokens, None, found.slack_s, mean_wait_s=step.mean_wait_s, owed_s=owed_s
        )
    if guest.last_own_s > step_budget_s(waits.longest_s, record):
        may_probe &= now_ns - guest.last_end_ns >= _PROBE_AGAIN_NS
    if may_probe and found.slack_s > 0.0:
        return StepDecision(1, None, found.slack_s, probe=True, mean_wait_s=waits.mean_s)
    return found


class IdleStep(msgspec.Struct, frozen=True):
    """The step that lends most while production is idle."""

    tokens: int
    mean_wait_s: float | None = None
    """Mean wait in s that arrivals can bear, as in `StepDecision`."""
    share_ratio: float = 1.0
    """Share of idle time that these steps take."""
    longest_s: float = 0.0
    """Longest step with a rest that was considered."""


def idle_step(waits: Phantom, grant: Grant, guest: GuestLoad) -> IdleStep:
    """A step beside idle production: the short step that any arrival may wait for, if it is mostly
    tokens; otherwise the better of it and a longer step with a rest. 0 tokens if neither fits."""
    model, decodes, context = guest.step_time, guest.decodes, guest.context_tokens

    def within(budget_s: float) -> tuple[int, float]:
        """Tokens that fit, and the time that they take."""
        fit = model.tokens_within_s(
            budget_s, decodes=decodes, context_tokens=context, cap=guest.cap
        )
        prefill = max(0, fit - decodes)
        return fit, model.predict_s(
            decodes=fit - prefill, prefill_tokens=prefill, context_tokens=context
        )

    each_s = step_budget_s(waits.each_s, grant)
    brief_s = _BRIEF_STEPS * model.predict_s(decodes=0, prefill_tokens=0, context_tokens=context)
    tokens, step_s = within(each_s)
    ample = tokens > 0 and (tokens == guest.cap or each_s >= brief_s)
    if ample or not waits.mean_s > 0.0:
        return IdleStep(tokens)
    # Up to here a rest is a multiple of its step, beyond it grows with the square of the step.
    steady_s = step_budget_s(MOST_RESTED_STEPS * waits.mean_s, grant)
    steady_s *= 2.0 if grant.blocking_ratio >= 1.0 else 1.0
    longest_s = lesser(step_budget_s(waits.longest_s, grant), max(brief_s, steady_s))
    rested, rested_s = within(longest_s)
    cycle_s = rested_s + rest_s(rested_s, waits.mean_s, grant)
    # A step of no tokens takes no time if the guest's steps have no fixed cost.
    if tokens >= rested or 0.0 < rested * step_s <= tokens * cycle_s:
        return IdleStep(tokens, longest_s=longest_s)
    return IdleStep(rested, waits.mean_s, rested_s / cycle_s)


def waits_of(terms: Sequence[EngineTerms], grant: Grant) -> Phantom:
    """The waits that a request of any engine can bear."""
    found = terms[0].phantom(grant)
    for of_engine in terms[1:]:
        found = found.least(of_engine.phantom(grant))
    return found


def slack_law(
    pulses: Sequence[PulseHead],
    grant: Grant,
    guest: GuestLoad,
    *,
    terms: Sequence[EngineTerms],
    now_ns: int,
) -> StepDecision:
    """Admit the largest step that fits into production's slack. `terms` has one entry per pulse."""
    slack = slack_s(pulses, grant, terms, now_ns=now_ns)
    budget_s = step_budget_s(slack, grant) - guest.launched_s
    tokens = guest.step_time.tokens_within_s(
        budget_s, decodes=guest.decodes, context_tokens=guest.context_tokens, cap=guest.cap
    )
    return _admitted(tokens, slack)


def rose_law(
    pulses: Sequence[PulseHead],
    grant: Grant,
    guest: GuestLoad,
    *,
    terms: Sequence[EngineTerms],
    now_ns: int,
) -> StepDecision:
    """Admit a chunk while all slack to the SLO is positive. `terms` has one entry per pulse."""
    slack = min(
        (
            events_slack_s(pulse, grant, of_engine, epsilon=math.inf, now_ns=now_ns)
            for pulse, of_engine in zip(pulses, terms, strict=True)
        ),
        default=-math.inf,
    )
    return _admitted(min(guest.cap, ROSE_CHUNK_TOKENS) if slack > 0.0 else 0, slack)


def saturation_law(pulses: Sequence[PulseHead], guest: GuestLoad, *, chance: float) -> StepDecision:
    """Shed new work at random as production fills up. `chance` is uniform in [0, 1)."""
    full = [max(p.waiting / _FULL_WAITING, p.kv_usage_ratio / _FULL_KV_RATIO) for p in pulses]
    saturation = sum(full) / len(full) if full else 1.0
    shed = chance < _SHED_FACTOR * saturation**_SHED_POWER
    return _admitted(min(guest.cap, guest.decodes) if shed else guest.cap, math.inf)


def _admitted(tokens: int, slack_s: float) -> StepDecision:
    return StepDecision(tokens, None if tokens > 0 else Closed.NO_SLACK, slack_s)
