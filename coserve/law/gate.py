"""The gate: may the guest start a step now, and of how many tokens.

It decides from page readings alone and the time that is passed in. Whatever it cannot know closes
it: an expired grant, a missing, torn or foreign pulse, a production engine that hangs.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from random import random

import msgspec

from coserve.law.engine_terms import idle, terms_of
from coserve.law.laws import Admission, GuestLoad, rose_law, saturation_law, slack_law
from coserve.law.slack import hung
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Grant, GrantMode, Law, PageFault, PulseHead, Reading


class Closed(StrEnum):
    """Why no step may start."""

    NO_GRANT = "no_grant"
    GRANT_FAULT = "grant_fault"
    GRANT_CLOSED = "grant_closed"
    NO_PULSE = "no_pulse"
    PULSE_FAULT = "pulse_fault"
    HUNG = "hung"
    NO_SLACK = "no_slack"


_BY_GRANT = (Closed.NO_GRANT, Closed.GRANT_FAULT, Closed.GRANT_CLOSED)


class StepDecision(msgspec.Struct, frozen=True):
    tokens: int
    """0 closes the gate; more is the largest step that may start now."""
    reason: Closed | None
    slack_s: float
    fault: PageFault | None = None
    probe: bool = False
    """Open for one token against the prediction, to learn whether it is right."""

    @property
    def open(self) -> bool:
        return self.tokens > 0

    @property
    def closed_by_grant(self) -> bool:
        """Whatever production does, only another grant can open it."""
        return self.reason in _BY_GRANT


def decide(
    grant: Reading[Grant],
    pulses: Sequence[Reading[PulseHead]],
    *,
    step_time: StepTimeModel,
    decodes: int,
    context_tokens: int,
    launched_s: float,
    token_limit: int,
    may_probe: bool,
    now_ns: int,
    chance: Callable[[], float] = random,
) -> StepDecision:
    """The grant's law over all pulses of a slot.

    `launched_s` is the predicted time of guest steps that are launched and not finished,
    `token_limit` the engine's own maximum per step, `decodes` its running decode requests and
    `context_tokens` the KV that these hold.
    `may_probe` says that the last step is long enough ago: a prediction that is too long admits no
    step and so is never corrected, wherefore idle production is then asked for one token.
    """
    record = grant.record
    if record is None:
        missing = grant.fault is PageFault.MISSING
        return StepDecision(0, Closed.NO_GRANT if missing else Closed.GRANT_FAULT, 0.0, grant.fault)
    if record.mode is GrantMode.CLOSED:
        return StepDecision(0, Closed.GRANT_CLOSED, 0.0)
    cap = token_limit
    if 0 < record.step_tokens_cap < cap:
        cap = record.step_tokens_cap
    if record.mode is GrantMode.UNGATED:
        return StepDecision(cap, None, math.inf)
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
    guest = GuestLoad(step_time, decodes, context_tokens, launched_s, cap)
    match record.law:
        case Law.SLACK:
            admitted = slack_law(present, record, guest, terms=terms, now_ns=now_ns)
        case Law.ROSE:
            admitted = rose_law(present, record, guest, terms=terms, now_ns=now_ns)
        case Law.SATURATION:
            admitted = saturation_law(present, guest, chance=chance())
    if admitted.tokens > 0:
        return StepDecision(admitted.tokens, None, admitted.slack_s)
    if may_probe and _may_probe(admitted, guest) and idle(present, terms, now_ns=now_ns):
        return StepDecision(1, None, admitted.slack_s, probe=True)
    return StepDecision(0, Closed.NO_SLACK, admitted.slack_s)


def _may_probe(admitted: Admission, guest: GuestLoad) -> bool:
    return admitted.slack_s > 0.0 and guest.launched_s == 0.0 and guest.cap > 0
