"""The gate: may the guest start a step now, and of how many tokens.

It decides from page readings alone and the time that is passed in. Whatever it cannot know closes
it: an expired grant, a missing, torn or foreign pulse, a production engine that hangs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from coserve.slack import hung, slack_s
from coserve.step_time import StepTimeModel
from harvester.contracts.page import Grant, GrantMode, PageFault, Pulse, Reading

# What it costs production to preempt a step, however short: the switch, and the weights that the
# step pushed out of the caches. A decode's slack is less: no step starts between two decode steps.
PREEMPTION_S = 5e-4


class Closed(StrEnum):
    """Why no step may start."""

    NO_GRANT = "no_grant"
    GRANT_FAULT = "grant_fault"
    GRANT_CLOSED = "grant_closed"
    NO_PULSE = "no_pulse"
    PULSE_FAULT = "pulse_fault"
    HUNG = "hung"
    NO_SLACK = "no_slack"


@dataclass(frozen=True, slots=True)
class Decision:
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


def decide(
    grant: Reading[Grant],
    pulses: Sequence[Reading[Pulse]],
    *,
    step_time: StepTimeModel,
    decodes: int,
    launched_s: float,
    token_limit: int,
    may_probe: bool,
    now_ns: int,
) -> Decision:
    """The step law over all pulses of a slot.

    `launched_s` is the predicted time of guest steps that are launched and not finished,
    `token_limit` the engine's own maximum per step, `decodes` its running decode requests.
    `may_probe` says that the last step is long enough ago: a prediction that is too long admits no
    step and so is never corrected, wherefore idle production is then asked for one token.
    """
    record = grant.record
    if record is None:
        missing = grant.fault is PageFault.MISSING
        return Decision(0, Closed.NO_GRANT if missing else Closed.GRANT_FAULT, 0.0, grant.fault)
    if record.mode is GrantMode.CLOSED:
        return Decision(0, Closed.GRANT_CLOSED, 0.0)
    cap = token_limit
    if 0 < record.step_tokens_cap < cap:
        cap = record.step_tokens_cap
    if record.mode is GrantMode.UNGATED:
        return Decision(cap, None, math.inf)
    if not pulses or len(pulses) != len(record.pulses):
        return Decision(0, Closed.NO_PULSE, 0.0)
    slack, idle = math.inf, True
    for reading in pulses:
        pulse = reading.record
        if pulse is None:
            return Decision(0, Closed.PULSE_FAULT, 0.0, reading.fault)
        if pulse.in_flight:
            idle = False
            if hung(pulse, record, now_ns=now_ns):
                return Decision(0, Closed.HUNG, 0.0)
        slack = min(slack, slack_s(pulse, record, now_ns=now_ns))
    # An isolation backend lets production preempt a running step, so only the preemption and a
    # share of the step delay production; without one the whole step does.
    preemption_s = PREEMPTION_S if record.blocking_ratio < 1.0 else 0.0
    budget_s = (slack - preemption_s) / max(record.blocking_ratio, 1e-3) - launched_s
    tokens = step_time.tokens_within_s(budget_s, decodes=decodes, cap=cap)
    if tokens > 0:
        return Decision(tokens, None, slack)
    if may_probe and idle and slack > 0.0 and launched_s == 0.0 and cap > 0:
        return Decision(1, None, slack, probe=True)
    return Decision(0, Closed.NO_SLACK, slack)
