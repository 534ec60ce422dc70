"""Which whole answers are kept, and whose go first."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.ids import EngineId, JobId, TenantId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
)
from scheduler.gateway.policy.answered_turns import AnswerBounds, AnsweredTurns, size_of
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger

LEDGER = TurnLedger(JobId("job"))
ALICE, BOB = TenantId("alice"), TenantId("bob")


def answered(*, keep_s: float = 30.0, turns: int = 1 << 20, size_bytes: int = 1 << 40):
    return AnsweredTurns(AnswerBounds(keep_s=keep_s, turns=turns, size_bytes=size_bytes))


def turn(name: str, tokens: int = 1, *, candidates: int = 0, prompt: int = 1) -> Turn:
    sampling = SamplingParams(max_tokens=max(tokens, 1), logprobs=candidates)
    request = GenerateRequest(request_id=name, token_ids=(1,) * prompt, sampling_params=sampling)
    opened = LEDGER.open(request, trajectory=TrajectoryId(name))
    assert opened is not None
    opened.token_ids, opened.logprobs = [1] * tokens, [TokenLogprob(1, -1.0)] * tokens
    opened.end(FinishReason.LENGTH)
    LEDGER.close(opened)
    return opened


def keep(held: AnsweredTurns, one: Turn, *, tenant: TenantId = ALICE, request: str = "") -> None:
    held.keep(one, tenant=tenant, request=request or one.key)


def test_an_answer_is_kept_for_a_time_after_its_last_client_left() -> None:
    held, one = answered(keep_s=10), turn("r")
    keep(held, one)
    assert held.find(one.key, now=1000) == (one, one.key), "its client still waits"
    held.left(ALICE, one.key, now=1000)
    assert held.find(one.key, now=1009) == (one, one.key)
    held.given_again(one.key, now=1009)
    assert held.find(one.key, now=1018) == (one, one.key), (
        "for as long again after it was given again"
    )
    assert held.find(one.key, now=1028) is None
    assert (one.key in held, held.size_bytes) == (False, 0)


def test_nothing_is_kept_for_no_time() -> None:
    held, one = answered(keep_s=0), turn("r")
    keep(held, one)
    assert one.key not in held


def test_a_request_whose_client_waits_does_not_keep_others_from_expiring() -> None:
    held = answered(keep_s=10)
    waits, *others = (turn(name) for name in "abc")
    for one in (waits, *others):
        keep(held, one)
    for one in others:
        held.left(ALICE, one.key, now=0)
    held.expire(now=10)
    assert [one.key in held for one in (waits, *others)] == [True, False, False]


def test_turns_of_one_request_are_kept_and_forgotten_together() -> None:
    held = answered(keep_s=10, turns=3)
    samples = [turn(f"r.{index}", prompt=1000) for index in range(2)]
    for one in samples:
        keep(held, one, request="r")
    assert held.size_bytes < 2 * size_of(samples[0]) + 2 * 1000 * 8 * 4, "one prompt"
    keep(held, turn("x"))
    assert all(one.key in held for one in samples)
    keep(held, turn("y"))
    assert not any(one.key in held for one in samples)


@pytest.mark.parametrize("by", ["turns", "size_bytes"])
def test_a_tenant_that_keeps_much_costs_the_others_nothing(by: str) -> None:
    held = (
        answered(turns=10) if by == "turns" else answered(size_bytes=10 * size_of(turn("t", 100)))
    )
    own = [turn(f"b{index}", 100) for index in range(3)]
    for one in own:
        keep(held, one, tenant=BOB)
    many = [turn(f"a{index}", 100) for index in range(100)]
    for one in many:
        keep(held, one)
    assert all(one.key in held for one in own)
    kept = [one.key in held for one in many]
    assert kept == sorted(kept), "the oldest went first"
    assert 5 <= sum(kept) <= 7


def test_an_answer_beyond_the_bound_is_not_kept_and_takes_only_its_tenants_place() -> None:
    own = turn("own")
    held = answered(size_bytes=size_of(turn("large", 100)))
    keep(held, own, tenant=BOB)
    large = turn("r", 1000)
    keep(held, large)
    assert (large.key in held, own.key in held) == (False, True)


def test_memory_grows_with_what_an_answer_holds() -> None:
    sizes = [size_of(turn("r", 10)), size_of(turn("r", 10, candidates=5)), size_of(turn("r", 100))]
    assert sizes == sorted(set(sizes))


def test_a_request_counts_once_with_all_its_fields_and_masks_count_for_each_turn() -> None:
    held, (one, another) = answered(), (turn("r.0"), turn("r.1"))
    for each in (one, another):
        said = SamplingParams(max_tokens=1, extra_args={"x": "y" * 100_000})
        each.request = msgspec.structs.replace(each.request, sampling_params=said)
        keep(held, each, request="r")
    assert held.size_bytes > 100_000
    assert held.size_bytes < 2 * 16 * 100_000, "samples share it"
    masked = LEDGER.open(one.request, trajectory=TrajectoryId("t"))
    assert masked is not None
    attempt = masked.begin(engine=EngineId("e"), version=WeightVersion(0), numerics="")
    masked.accept(attempt, [1], [TokenLogprob(1, -1.0)], [tuple(range(10_000))])
    masked.finish(attempt, "stop", "z" * 5000)
    LEDGER.close(masked)
    assert size_of(masked) > size_of(one) + 10_000 * 8 + 5000


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 40), st.booleans()),
        max_size=60,
    )
)
def test_the_bounds_hold_whatever_comes(steps: list[tuple[int, int, int, bool]]) -> None:
    held, now = answered(keep_s=5, turns=6, size_bytes=20_000), 0.0
    for number, (tenant, request, tokens, leaves) in enumerate(steps):
        now += 1
        name, whose = f"{tenant}.{request}", TenantId(f"t{tenant}")
        keep(held, turn(f"{name}.{number}", tokens), tenant=whose, request=name)
        if leaves:
            held.left(whose, name, now=now)
        held.expire(now=now)
        assert held.size_bytes <= 20_000
        assert sum(f"job/{t}.{r}.{n}" in held for n, (t, r, _, _) in enumerate(steps)) <= 6
    for tenant in range(4):
        for request in range(6):
            held.left(TenantId(f"t{tenant}"), f"{tenant}.{request}", now=now)
    held.expire(now=now + 5)
    assert held.size_bytes == 0
