"""The slack law: how long production can spare its accelerator from now on.

A production event (a prefill, a decode step) has the deadline `min(SLO, (1 + epsilon) * T_alone)`,
counted from the start of its latency. Slack is the rest of it after the event's own predicted time:

    prefill   S = t_arrival   + D_TTFT - now - T_prefill      (ROSE, section 4.1)
    decode    S = t_last_step + D_TPOT - now - T_decode

With epsilon = infinity this is ROSE's law; a finite epsilon bounds how much of the SLO harvesting
may use up. A phantom request that arrives now, drawn from production's prompts, is always among the
events, so an idle machine has a finite slack too.

At consent level `plugin` single requests are not visible, so the law works on bounds: one last step
for all decodes, and the oldest waiting arrival with both an empty prompt and the largest waiting
one. Both, because a long prompt leaves less of an SLO and a short one has the smaller share
epsilon. Likewise decodes are judged both as one batch and as spread over data-parallel ranks.
Requests that the engine's cores hold and no middleware saw count as decodes since the core's last
report.
"""

import math
from collections.abc import Sequence

from coserve.law.engine_terms import EngineTerms
from coserve.law.phantom import lesser
from harvester.contracts.page import Grant, PulseHead

# Requests in flight and no step for this many predicted steps: the engine hangs.
HUNG_STEPS = 20
# Shorter silences are slow steps, not hangs.
HUNG_FLOOR_S = 5.0


def deadline_s(slo_s: float, alone_s: float, epsilon: float) -> float:
    """Latency budget of one event, seconds from its start."""
    if epsilon == math.inf:
        return slo_s
    return lesser((1.0 + epsilon) * alone_s, slo_s)


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
            slack = lesser(slack, of_engine.phantom(grant).each_s)
        if pulse.in_flight or of_engine.unseen or of_engine.unseen_step_ns:
            events = events_slack_s(pulse, grant, of_engine, epsilon=grant.epsilon, now_ns=now_ns)
            slack = lesser(slack, events)
    return slack if phantom_of is not None else -math.inf


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
        # Decodes share its step; without any, a NaN in their times still leaves no slack.
        decode_s = bool(terms.decoding) * model.decode_s(terms.decoding)
        waited_s = max(0.0, (now_ns - pulse.oldest_waiting_arrival_ns) * 1e-9)
        for prompt_tokens in (0, pulse.largest_waiting_prompt_tokens):
            alone_s = model.prefill_s(prompt_tokens) + decode_s
            event = deadline_s(grant.ttft_slo_s, alone_s, epsilon) - waited_s - alone_s
            slack = lesser(slack, event)
    if pulse.decoding > 0:
        event = _decode_slack_s(pulse.last_step_end_ns, grant, terms, epsilon, now_ns)
        slack = lesser(slack, event)
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
        slack = lesser(slack, event)
    return slack


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
