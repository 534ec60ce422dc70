"""Terms of each pulse: alone, among its engine's processes, beside another engine."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from coserve.law.engine_terms import terms_of
from coserve.law.gate import GuestLoad, slack_law
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import EngineCore, Grant, ProductionModel, Pulse

MakeGrant = Callable[..., Grant]

NOW_NS = 1_000_000_000_000
SMALL = ProductionModel(
    prefill_base_s=0.01, prefill_s_per_token=0.0, decode_base_s=0.01, decode_s_per_request=0.001
)
LARGE = ProductionModel(
    prefill_base_s=0.1, prefill_s_per_token=0.0, decode_base_s=0.1, decode_s_per_request=0.01
)
GUEST = GuestLoad(StepTimeModel(), 0, 0, 0.0, 512)


def pulse_of(model: ProductionModel, **fields: Any) -> Pulse:
    return msgspec.structs.replace(Pulse(model=model, last_step_end_ns=NOW_NS), **fields)


def slack(pulses: list[Pulse], grant: Grant) -> float:
    return slack_law(pulses, grant, GUEST, terms=terms_of(pulses, grant), now_ns=NOW_NS).slack_s


def test_the_processes_of_one_engine_decode_together(make_grant: MakeGrant) -> None:
    grant = make_grant(pulses=("pulse.a.0", "pulse.a.1", "pulse.b.0"))
    terms = terms_of([Pulse(decoding=2), Pulse(decoding=3), Pulse(decoding=4)], grant)
    assert [each.decoding for each in terms] == [5, 5, 4]
    assert [each.model for each in terms] == [grant.production] * 3


def test_a_decode_of_one_process_takes_as_long_as_the_engines_whole_batch(
    make_grant: MakeGrant,
) -> None:
    grant = make_grant(
        pulses=("pulse.a.0", "pulse.a.1"), production=SMALL, itl_slo_s=0.02, ttft_slo_s=10.0
    )
    alone = [pulse_of(SMALL, in_flight=1, decoding=1), Pulse()]
    assert slack(alone, grant) == pytest.approx(0.02 - 0.011)
    beside = [alone[0], pulse_of(SMALL, in_flight=7, decoding=7)]
    assert slack(beside, grant) == pytest.approx(0.02 - 0.018)


def test_a_fast_engine_spares_a_share_of_its_own_step_and_not_of_a_slow_ones(
    make_grant: MakeGrant,
) -> None:
    """A twentieth of the large engine's decode would be half of the small engine's."""
    pulses = [pulse_of(SMALL, in_flight=1, decoding=1), pulse_of(LARGE)]
    names = ("pulse.small.0", "pulse.large.0")
    own = make_grant(
        pulses=names, own_models=True, epsilon=0.05, phantom_prompt_tokens=0, production=LARGE
    )
    assert slack(pulses, own) == pytest.approx(0.05 * 0.010)
    shared = make_grant(pulses=names, epsilon=0.05, production=LARGE)
    assert slack(pulses, shared) == pytest.approx(0.05 * 0.10)


def test_an_engine_of_several_processes_is_as_slow_as_any_of_them_learned(
    make_grant: MakeGrant,
) -> None:
    grant = make_grant(
        pulses=("pulse.a.0", "pulse.a.1", "pulse.b.0"), own_models=True, phantom_prompt_tokens=0
    )
    pulses = [
        pulse_of(SMALL, prompt_tokens_p99=10, prompt_tokens_quantiles=(1, 10)),
        pulse_of(LARGE, prompt_tokens_p99=90, prompt_tokens_quantiles=(5, 90)),
        pulse_of(SMALL, prompt_tokens_p99=20),
    ]
    terms = terms_of(pulses, grant)
    assert [each.model for each in terms] == [LARGE, LARGE, SMALL]
    assert [each.prompts for each in terms] == [(1, 10, 5, 90), (1, 10, 5, 90), ()]
    assert [each.longest_prompt for each in terms] == [90, 90, 20]


def test_decodes_of_data_parallel_ranks_may_be_one_batch_or_spread(make_grant: MakeGrant) -> None:
    grant = make_grant(production=SMALL, itl_slo_s=1.0, ttft_slo_s=10.0)
    ranks = (EngineCore(rank=0), EngineCore(rank=1))
    pulse = msgspec.structs.replace(pulse_of(SMALL, in_flight=8, decoding=8), cores=ranks)
    one_batch = make_grant(production=SMALL, itl_slo_s=0.02, ttft_slo_s=10.0)
    assert slack([pulse], one_batch) == pytest.approx(0.02 - 0.018)
    # The share epsilon is that of the smallest batch that either may be.
    share = msgspec.structs.replace(grant, epsilon=0.5)
    phantom_s = 0.5 * 0.01
    assert slack([pulse], share) == pytest.approx(min(phantom_s, 0.5 * 0.014))
