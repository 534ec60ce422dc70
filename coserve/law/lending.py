"""The slack law's loan while production is idle; apart from the gate, which never reads it.

Touches no page and no clock. It decides nothing: the gate decides each step by the same functions.
"""

from collections.abc import Sequence

from coserve.law.engine_terms import terms_of
from coserve.law.gate import GuestLoad, idle_step, waits_of
from coserve.law.phantom import step_budget_s
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Grant, GrantMode, Law, Lending, PulseHead


def lending(
    pulses: Sequence[PulseHead], grant: Grant, step_time: StepTimeModel, *, token_limit: int
) -> Lending:
    """`pulses`: the pulses that the grant names. Laws other than `slack` have no bound that could
    be stated, and an ungated guest has none: all fields are unknown."""
    if grant.law is not Law.SLACK or grant.mode is GrantMode.UNGATED:
        return Lending()
    waits = waits_of(terms_of(pulses, grant), grant)
    cap = min(grant.step_tokens_cap or token_limit, token_limit)
    guest = GuestLoad(step_time, decodes=0, context_tokens=0, launched_s=0.0, cap=cap)
    step = idle_step(waits, grant, guest)
    if step.tokens > 0:
        return Lending(tokens=step.tokens, share_ratio=step.share_ratio)
    if not waits.mean_s > 0.0:
        return Lending(
            reason="production's step times are not known, or epsilon is 0: give the slot a "
            "profile (rosemux profile) or wait until they are learned"
        )
    shortest_s = step_time.predict_s(decodes=0, prefill_tokens=1, context_tokens=0)
    by_slo = step.longest_s >= step_budget_s(waits.longest_s, grant)
    bound, setting = ("SLO", "ttft_slo_s") if by_slo else ("epsilon", "epsilon")
    return Lending(
        reason=f"the guest's shortest step takes {shortest_s * 1e3:.3g} ms, and production's "
        f"{bound} bears steps of {max(0.0, step.longest_s) * 1e3:.3g} ms: isolate the guest "
        f"(idle-group), take a faster guest, or raise {setting}"
    )
