"""The slack law: how long production can spare its accelerator from now on.

A production event (a prefill, a decode step) has the deadline `min(SLO, (1 + epsilon) * T_alone)`
counted from where its latency is counted from. Slack is what is left of it once the event's own
predicted time is taken off:

    prefill   S = t_arrival   + D_TTFT - now - T_prefill      (ROSE, section 4.1)
    decode    S = t_last_step + D_TPOT - now - T_decode

With epsilon = infinity this is ROSE's law; a finite epsilon bounds how much of the SLO harvesting
may use up. A phantom request that arrives now with the P99 prompt is always among the events, so an
idle machine has a finite slack too.

At consent level `plugin` single requests are not visible, so the law works on bounds: one last step
for all decodes, and the oldest waiting arrival with the largest waiting prompt or with none at all.
Both, because a long prompt leaves less of an SLO and a short one has the smaller share epsilon; so
with decodes that may be one batch or spread over data-parallel ranks. Requests that the engine's
cores hold and no middleware saw count as decodes since the core's last word.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from coserve.law.engine_terms import EngineTerms
from harvester.contracts.page import Grant, PulseHead

# In flight and no step for this many predicted steps: the engine hangs, its slack is unknown.
HUNG_STEPS = 20
# A step that is merely slow is no hang.
HUNG_FLOOR_S = 5.0
# However large epsilon is: so much of its time may a prompt lose that is too long for its SLO, and
# so near to the SLO must it come to count as such.
_UNKEPT_SHARE_MAX = 0.25


def deadline_s(slo_s: float, alone_s: float, epsilon: float) -> float:
    """Latency budget of one event, seconds from its start."""
    if epsilon == math.inf:
        return slo_s
    return _lesser((1.0 + epsilon) * alone_s, slo_s)


def slack_s(
    pulses: Sequence[PulseHead], grant: Grant, terms: Sequence[EngineTerms], *, now_ns: int
) -> float:
    """Least slack in seconds over all events that the pulses tell of; negative is a breach.

    `terms` has one entry for each pulse; those of one engine share theirs. What cannot be computed
    (a NaN in a model), and no pulse at all, is minus infinity: unknown is not idle.
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


def events_slack_s(
    pulse: PulseHead, grant: Grant, terms: EngineTerms, *, epsilon: float, now_ns: int
) -> float:
    """Over the requests that are there, without the phantom; infinity where there is none."""
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
    """Of a request that might arrive this moment.

    Of the prompts up to the P99 the longest is meant whose SLO bears its share epsilon. One that
    production alone would serve too late, or hardly in time, has no SLO that could be kept:
    counted, an SLO at the P99, where many are set, would shut an idle machine for ever, and a
    shorter phantom leave less slack than a longer one. Its own share is not taken either, since the
    request that comes is likely shorter: after a single prompt of 16k tokens a twentieth of its
    time may be more than all of a short one's SLO.
    """
    if epsilon == math.inf:
        return slo_s - alone_s
    share = min(epsilon, _UNKEPT_SHARE_MAX)
    room_s = share * slo_s / max(1.0 + share, 1.0)  # An epsilon below 0 shuts.
    if alone_s > slo_s - room_s:
        return room_s
    return deadline_s(slo_s, alone_s, epsilon) - alone_s


def _lesser(one_s: float, other_s: float) -> float:
    """Minus infinity where one of them is no number."""
    if one_s <= other_s:
        return one_s
    return other_s if other_s < one_s else -math.inf


def hung(pulse: PulseHead, terms: EngineTerms, *, now_ns: int) -> bool:
    """Requests in flight and no step for several predicted steps. An open WebSocket is none."""
    if pulse.in_flight <= pulse.sockets:
        return False
    last_ns = max(pulse.last_step_end_ns, pulse.oldest_waiting_arrival_ns)
    since_s = (now_ns - last_ns) * 1e-9
    # Asked before every step, and nearly always of a step that has just been.
    if last_ns == 0 or since_s <= HUNG_FLOOR_S:
        return False
    expected_s = terms.model.prefill_s(pulse.largest_waiting_prompt_tokens)
    expected_s += terms.model.decode_s(terms.decoding)
    return since_s > max(HUNG_FLOOR_S, HUNG_STEPS * expected_s)
