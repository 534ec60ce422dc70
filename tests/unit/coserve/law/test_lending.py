"""The loan of the shipped settings, by isolation, prompts and step times; and why there is none."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coserve.guest.isolation import IDLE_CLASS, IDLE_GROUP, NO_ISOLATION, TIME_SLICING, Isolation
from coserve.law.gate import GuestLoad, decide
from coserve.law.lending import lending
from coserve.law.phantom import quantiles_of
from coserve.law.step_time import StepTimeModel
from harvester.config_file import load_agent_config
from harvester.contracts.isolation import (
    IDLE_GROUP_PREEMPTION_S,
    PREEMPTION_S,
    IsolationBackend,
)
from harvester.contracts.page import Grant, GrantMode, Law, Lending, ProductionModel, Pulse, Reading
from harvester.policy.settings import AUTO, SlotSettings

MakeGrant = Callable[..., Grant]

ROOT = Path(__file__).parents[4]
SHIPPED = (ROOT / "deploy/systemd/agent.yaml", ROOT / "examples/agent.yaml")
LIMIT = 2048
# An 8B and a 32B model on GPUs of the Hopper kind, about, and the first prediction of any guest.
ON_GPU = ProductionModel(
    prefill_base_s=0.008, prefill_s_per_token=8e-5, decode_base_s=0.009, decode_s_per_request=5e-5
)
ON_GPUS = ProductionModel(
    prefill_base_s=0.016, prefill_s_per_token=1e-4, decode_base_s=0.016, decode_s_per_request=8e-5
)
GUESTS = {
    "8B": StepTimeModel(base_s=0.009, decode_s=4e-5, prefill_s=8e-5, factor=1.1),
    "32B": StepTimeModel(base_s=0.016, decode_s=8e-5, prefill_s=1e-4, factor=1.1),
    "not known yet": StepTimeModel(),
}


def pulse(*prompts: int) -> Pulse:
    ordered = sorted(prompts)
    return Pulse(
        prompt_tokens_quantiles=quantiles_of(ordered),
        prompt_tokens_p99=ordered[-1] if ordered else 0,
    )


PROMPTS = {
    "of which none is known": pulse(),
    "with a P99 of 1k": pulse(*range(50, 1050, 10)),
    "with a P99 of 8k": pulse(*[200] * 50, *range(200, 8200, 160)),
    "longer than the SLO": pulse(*[16_000] * 100),
}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.parent.name)
@pytest.mark.parametrize("isolation", [IDLE_GROUP, IDLE_CLASS, TIME_SLICING, NO_ISOLATION])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("production", [ON_GPU, ON_GPUS], ids=["8B", "32B"])
def test_the_shipped_settings_lend_on_every_backend(
    file: Path,
    isolation: Isolation,
    prompts: str,
    guest: str,
    production: ProductionModel,
    make_grant: MakeGrant,
) -> None:
    (slot,) = load_agent_config(file, environment={}).slots
    policy: SlotSettings = slot.policy
    assert (policy.epsilon, policy.preemption_s) == (0.05, AUTO), "the promise of docs/slo.md"
    grouped = isolation.backend is IsolationBackend.IDLE_GROUP
    grant = make_grant(
        ttft_slo_s=policy.ttft_slo_s,
        itl_slo_s=policy.itl_slo_s,
        epsilon=policy.epsilon,
        step_tokens_cap=policy.step_tokens_max,
        phantom_prompt_tokens=policy.phantom_prompt_tokens,
        preemption_s=IDLE_GROUP_PREEMPTION_S if grouped else PREEMPTION_S,
        blocking_ratio=isolation.blocking_ratio,
        production=production,
    )
    model = GUESTS[guest]
    lent = lending([PROMPTS[prompts]], grant, model, token_limit=LIMIT)
    longest_s = production.prefill_s(PROMPTS[prompts].prompt_tokens_p99)
    late = longest_s > policy.ttft_slo_s and isolation.blocking_ratio == 1.0
    if late and guest != "8B" and not lent.tokens:
        assert "SLO bears steps of 11.9 ms" in lent.reason, "production alone misses its SLO"
        return
    assert lent.tokens > 0
    assert lent.share_ratio > 0.01
    load = GuestLoad(model, decodes=0, context_tokens=0, launched_s=0.0, cap=LIMIT)
    found = decide(
        Reading(grant, None),
        [Reading(PROMPTS[prompts], None)],
        load,
        may_probe=False,
        now_ns=10**12,
    )
    assert found.tokens == lent.tokens, "the gate opens for what is stated"
    assert (found.mean_wait_s is None) == (lent.share_ratio == 1.0)


def test_a_guest_that_is_too_slow_for_the_slo_is_lent_nothing_with_a_reason(
    make_grant: MakeGrant,
) -> None:
    slow = StepTimeModel(base_s=0.3, decode_s=0.001, prefill_s=0.001, factor=1.0)
    grant = make_grant(epsilon=0.05, ttft_slo_s=0.25, production=ON_GPU)
    lent = lending([PROMPTS["with a P99 of 1k"]], grant, slow, token_limit=LIMIT)
    assert (lent.tokens, lent.share_ratio) == (0, 0.0)
    assert "shortest step takes 301 ms" in lent.reason
    assert "raise ttft_slo_s" in lent.reason
    assert lent.summary.startswith("nothing: ")
    preempted = msgspec.structs.replace(grant, blocking_ratio=0.02)
    assert lending([PROMPTS["with a P99 of 1k"]], preempted, slow, token_limit=LIMIT).tokens > 0


def test_a_guest_that_is_too_slow_for_epsilon_hears_of_epsilon(make_grant: MakeGrant) -> None:
    slow = StepTimeModel(base_s=0.0, decode_s=0.014, prefill_s=0.014, factor=1.0)
    grant = make_grant(epsilon=0.05, ttft_slo_s=0.25, production=ON_GPU)
    lent = lending([PROMPTS["of which none is known"]], grant, slow, token_limit=LIMIT)
    assert lent.tokens == 0
    assert "step takes 14 ms, and production's epsilon bears steps of 4.8 ms" in lent.reason
    assert lent.reason.endswith("raise epsilon")


def test_a_guest_without_a_fixed_cost_is_lent_what_fits(make_grant: MakeGrant) -> None:
    quick = StepTimeModel(base_s=0.0, decode_s=1e-3, prefill_s=1e-3, factor=1.0)
    grant = make_grant(epsilon=0.05, ttft_slo_s=0.25, production=ON_GPU)
    lent = lending([PROMPTS["of which none is known"]], grant, quick, token_limit=LIMIT)
    assert (lent.tokens, lent.reason) == (4, ""), "a step of 4.8 ms and a rest"


def test_an_ungated_guest_is_bound_by_no_law(make_grant: MakeGrant) -> None:
    grant = make_grant(epsilon=0.05, mode=GrantMode.UNGATED, production=ON_GPU)
    assert lending([Pulse()], grant, StepTimeModel(base_s=9.0), token_limit=LIMIT) == Lending()


def test_unknown_step_times_lend_nothing_and_say_so(make_grant: MakeGrant) -> None:
    grant = make_grant(epsilon=0.05, production=ProductionModel())
    lent = lending([Pulse()], grant, GUESTS["8B"], token_limit=LIMIT)
    assert lent.tokens == 0
    assert "rosemux profile" in lent.reason


def test_another_law_states_no_loan(make_grant: MakeGrant) -> None:
    grant = make_grant(law=Law.ROSE)
    assert lending([Pulse()], grant, GUESTS["8B"], token_limit=LIMIT) == Lending()


def test_a_loan_in_a_line() -> None:
    assert Lending().summary == ""
    summary = "steps of at most 64 tokens, 25% of production's idle time"
    assert Lending(tokens=64, share_ratio=0.25).summary == summary
