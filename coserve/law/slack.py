"""The slack law: how long production can spare its accelerator from now on.

A production event (a prefill, a decode step) has the deadline `min(SLO, (1 + epsilon) * T_alone)`,
counted from the start of its latency. Slack is the rest of it after the event's own predicted time:

    prefill   S = t_arrival   + D_TTFT - now - T_prefill      (ROSE, section 4.1)
    decode    S = t_last_step + D_TPOT - now - T_decode

With epsilon = infinity this is ROSE's law; a finite epsilon bounds how much of the SLO harvesting
may use up. A phantom request that arrives now with the P99 prompt is always among the events, so an
idle machine has a finite slack too.

At consent level `plugin` single requests are not visible, so the law works on bounds: one last step
for all decodes, and the oldest waiting arrival with both an empty prompt and the largest waiting
one. Both, because a long prompt leaves less of an SLO and a short one has the smaller share
epsilon. Likewise decodes are judged both as one batch and as spread over data-parallel ranks.
Requests that the engine's cores hold and no middleware saw count as decodes since the core's last
report.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from coserve.law.engine_terms import EngineTerms
from harvester.contracts.page import Grant, PulseHead

# Requests in flight and no step for this many predicted steps: the engine hangs.
HUNG_STEPS = 20
# Shorter silences are slow steps, not hangs.
HUNG_FLOOR_S = 5.0
# Largest share of its time, however large epsilon is, that a prompt too long for its SLO may lose;
# also how near to the SLO a prompt must come to count as too long.
_UNKEPT_SHARE_MAX = 0.25


def deadline_s(slo_s: float, alone_s: float, epsilon: float) -> float:
    """Latency budget of one event, seconds from its start."""
    if epsilon == math.inf:
        return slo_s
    return _lesser((1.0 + epsilon) * alone_s, slo_s)


def slack_s(
    pulses: Sequence[PulseHead], grant: Grant, terms: Sequence[EngineTerms], *, now_ns: int
) -> float:
    """Least slack in seconds over all known events; negative is a breach.

    `terms` has one entry for each pulse; pulses of one engine share theirs. Minus infinity without
    a pulse, or if it cannot be computed (a NaN in a model): unknown is not idle.
    """
    slack, phantom_of = math.inf, None
    for pulse, of_engine in zip(pulses, terms, strict=True):
        if of_engine is not phantom_of:
            phantom_of = of_engine
            alone_s = of_engine.model.prefill_s(of_engine.phantom_prompt_tokens)
            alone_s += of_engine.model.decode_base_s
            phantom = _phantom_slack_s(grant.ttft_slo_s, alone_s, grant.epsilon)
            slack = _lesser(slack, phantom)
        if pulse.in_flight or of_engine.unseen or of_engine.unseen_step_ns:
            events = events_slack_s(pulse, grant, of_engine, epsilon=grant.epsilon, now_ns=now_ns)
            slack = _lesser(slack, events)
    return slack if phantom_of is not None else -math.inf


def step_budget_s(slack_s: float, grant: Grant) -> float:
    """The longest guest step that delays production by no more than the slack.

    An isolation backend lets production preempt a running step, so only the preemption and a share
    of the step delay production; without one the whole step does. A decode's slack is usually less
    than the preemption: no step starts between two decode steps.
    """
    preemption_s = grant.preemption_s if grant.blocking_ratio < 1.0 else 0.0
    return (slack_s - preemption_s) / max(grant.blocking_ratio, 1e-3)


def events_slack_s(
    pulse: PulseHead, grant: Grant, terms: EngineTerms, *, epsilon: float, now_ns: int
) -> float:
    """Slack over the present requests, without the phantom; infinity without requests."""
    model, slack = terms.model, math.inf
    if terms.serves_unseen(now_ns=now_ns):
        slack = _decode_slack_s(terms.unseen_since_ns, grant, terms, epsilon, now_ns)
    if pulse.in_flight == 0:
        return slack
    if pulse.waiting > 0:
        decode_s = model.decode_s(terms.decoding)
        waited_s = max(0.0, (now_ns - pulse.oldest_waiting_arrival_ns) * 1e-9)
        for prompt_tokens in (0, pulse.largest_waiting_prompt_tokens):
            alone_s = model.prefill_s(prompt_tokens) + decode_s
            event = deadline_s(grant.ttft_slo_s, alone_s, epsilon) - waited_s - alone_s
            slack = _lesser(slack, event)
    if pulse.decoding > 0:
        event = _decode_slack_s(pulse.last_step_end_ns, grant, terms, epsilon, now_ns)
        slack = _lesser(slack, event)
    return slack


def _decode_slack_s(
    last_step_end_ns: int, grant: Grant, terms: EngineTerms, epsilon: float, now_ns: int
) -> float:
    since_s = max(0.0, (now_ns - last_step_end_ns) * 1e-9)
    alone_s = terms.model.decode_s(terms.decoding)
    slack = deadline_s(grant.itl_slo_s, alone_s, epsilon) - since_s - alone_s
    if terms.cores > 1:
        alone_s = terms.model.decode_s(-(-terms.decoding // terms.cores))
        event = deadline_s(grant.itl_slo_s, alone_s, epsilon) - since_s - alone_s
        slack = _lesser(slack, event)
    return slack


@lru_cache(maxsize=1024)
def _phantom_slack_s(slo_s: float, alone_s: float, epsilon: float) -> float:
    """Slack of a request that might arrive now.

    The phantom is the longest prompt (at most P99) that production alone could serve within its
    SLO. Production alone would serve a longer prompt too late, or barely in time: judged by the
    SLO, an SLO set near the P99 would shut an idle machine for ever, and a shorter phantom would
    leave less slack than a longer one. Nor is the longer prompt's own share epsilon used, since the
    next request is likely shorter: after a single prompt of 16k tokens a twentieth of its time may
    exceed a short prompt's whole SLO.
    """
    if epsilon == math.inf:
        return slo_s - alone_s
    share = min(epsilon, _UNKEPT_SHARE_MAX)
    room_s = share * slo_s / max(1.0 + share, 1.0)  # An epsilon below 0 shuts.
    if alone_s > slo_s - room_s:
        return room_s
    return deadline_s(slo_s, alone_s, epsilon) - alone_s


def _lesser(one_s: float, other_s: float) -> float:
    """The smaller value; minus infinity if either is NaN."""
    if one_s <= other_s:
        return one_s
    return other_s if other_s < one_s else -math.inf


def hung(pulse: PulseHead, terms: EngineTerms, *, now_ns: int) -> bool:
    """Whether requests are in flight without a step for several predicted steps. An open WebSocket
    alone is no request."""
    if pulse.in_flight <= pulse.sockets:
        return False
    last_ns = max(pulse.last_step_end_ns, pulse.oldest_waiting_arrival_ns)
    since_s = (now_ns - last_ns) * 1e-9
    # Called before every step; nearly always the last step has just ended.
    if last_ns == 0 or since_s <= HUNG_FLOOR_S:
        return False
    expected_s = terms.model.prefill_s(pulse.largest_waiting_prompt_tokens)
    expected_s += terms.model.decode_s(terms.decoding)
    return since_s > max(HUNG_FLOOR_S, HUNG_STEPS * expected_s)
