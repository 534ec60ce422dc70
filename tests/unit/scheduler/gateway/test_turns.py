"""A running attempt's observations of its engine."""

import math

import pytest

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams, TokenLogprob
from scheduler.gateway.engines.engine_faults import EngineLost
from scheduler.gateway.engines.engine_output import accepted, check_finish
from scheduler.gateway.engines.stream import EngineChoice, _Logprobs
from scheduler.gateway.policy.prompts import Prompt
from scheduler.gateway.policy.turn import Turn, TurnCounters
from scheduler.gateway.running_attempt import RunningAttempt
from scheduler.gateway.settings import Timeouts
from scheduler.model import EngineKind


def _attempt() -> RunningAttempt:
    request = GenerateRequest(
        request_id="t-1", token_ids=(1,), sampling_params=SamplingParams(max_tokens=8)
    )
    turn = Turn(
        request=request,
        job=JobId("job"),
        trajectory=TrajectoryId("t"),
        counters=TurnCounters(),
        prompt=Prompt(JobId("job"), request.token_ids),
    )
    return RunningAttempt(turn, began_s=10.0, chunk_at_s=10.0)


def test_only_gaps_beyond_the_limit_are_pauses() -> None:
    attempt = _attempt()
    for now in (10.1, 10.2, 12.2, 12.3):
        attempt.hear(now=now, pause_s=0.5)
    assert math.isclose(attempt.paused_s, 2.0)
    assert attempt.chunk_at_s == 12.3


def test_an_engine_without_a_gate_never_pauses() -> None:
    attempt = _attempt()
    attempt.hear(now=70.0, pause_s=math.inf)
    assert attempt.paused_s == 0.0


def test_tokens_of_a_stream_wait_for_more_only_behind_the_first_and_while_they_come_fast() -> None:
    attempt = _attempt()
    attempt.turn.is_streamed = True
    attempt.hear(now=10.002, pause_s=math.inf)
    assert attempt.together_s == 0.0, "nothing waits before the first token"
    attempt.tokens = 1
    assert attempt.together_s == 0.02
    attempt.hear(now=10.023, pause_s=math.inf)
    assert attempt.together_s == 0.02
    attempt.hear(now=10.123, pause_s=math.inf)
    assert attempt.together_s == 0.0, "a token that comes alone would wait for nothing"
    attempt.hear(now=10.1231, pause_s=math.inf)
    assert attempt.together_s == 0.0, "two that a late event loop reads at once came as slowly"
    attempt.hear(now=10.126, pause_s=math.inf)
    assert attempt.together_s == 0.02
    attempt.turn.is_streamed = False
    assert attempt.together_s == 0.1


def test_a_silent_guest_loses_its_turn_sooner_when_nothing_waits_for_a_place() -> None:
    timeouts = Timeouts(stall_s=2.0, guest_stall_s=6.0, guest_tail_stall_s=0.5)
    assert timeouts.moved_after_s(EngineKind.GUEST, tail=False) == 6.0
    assert timeouts.moved_after_s(EngineKind.GUEST, tail=True) == 0.5
    assert timeouts.moved_after_s(EngineKind.DEDICATED, tail=True) == 2.0


@pytest.mark.parametrize(
    ("token_ids", "named", "vocabulary"),
    [([7, 8], [7, 9], 64), ([7, 8], [7], 64), ([64], [64], 64), ([-1], [-1], math.inf)],
)
def test_a_chunk_whose_tokens_and_log_probabilities_cannot_be_true_is_the_engines_fault(
    token_ids, named, vocabulary
) -> None:
    turn = _attempt().turn
    attempt = turn.begin(engine=EngineId("e"), version=WeightVersion(1), numerics="")
    logprobs = _Logprobs([TokenLogprob(token, -0.5) for token in named])
    with pytest.raises(EngineLost, match="protocol: "):
        accepted(turn, attempt, EngineChoice(token_ids, logprobs), vocabulary)
    assert not turn.token_ids
    good = EngineChoice([7, 63], _Logprobs([TokenLogprob(each, -0.5) for each in (7, 63)]))
    assert accepted(turn, attempt, good, 64) == 2


@pytest.mark.parametrize(
    ("logprob", "fault"),
    [
        (3.0, "3 for token 7: a log-probability above 0; run vLLM with --logprobs-mode"),
        (-9999.0, "-9999 for token 7: no log-probability of a sampled token"),
        (-math.inf, "no log-probability of a sampled token"),
        (math.nan, "no log-probability of a sampled token"),
    ],
)
def test_a_value_that_is_no_log_probability_of_a_sampled_token_is_the_engines_fault(
    logprob, fault
) -> None:
    turn = _attempt().turn
    attempt = turn.begin(engine=EngineId("e"), version=WeightVersion(1), numerics="")
    listed = [TokenLogprob(6, -0.5), TokenLogprob(7, logprob)]
    with pytest.raises(EngineLost, match=f"protocol: .*{fault}"):
        accepted(turn, attempt, EngineChoice([6, 7], _Logprobs(listed)))
    assert not turn.token_ids
    masked = TokenLogprob(7, 1e-6, (TokenLogprob(7, 1e-6), TokenLogprob(8, -9999.0)))
    assert accepted(turn, attempt, EngineChoice([7], _Logprobs([masked]))) == 1


def test_sampling_masks_that_are_not_one_for_each_token_are_the_engines_fault() -> None:
    """Else they would stand beside other tokens: three masks of two tokens, and a third token."""
    turn = _attempt().turn
    attempt = turn.begin(engine=EngineId("e"), version=WeightVersion(1), numerics="")
    logprobs = _Logprobs([TokenLogprob(each, -0.5) for each in (7, 8)])
    masks: list[tuple[int, ...]] = [(7, 1), (7, 2), (8, 3)]
    with pytest.raises(EngineLost, match="protocol: 3 sampling masks, 2 tokens"):
        accepted(turn, attempt, EngineChoice([7, 8], logprobs, sampling_mask=masks))
    assert not turn.token_ids


def test_only_a_finish_reason_of_vllm_ends_an_attempt() -> None:
    for reason in (None, "stop", "length", "repetition", "abort", "error"):
        check_finish(EngineChoice(finish_reason=reason), tokens_before=1)
    with pytest.raises(EngineLost, match="protocol: finish reason 'wat'"):
        check_finish(EngineChoice(finish_reason="wat"), tokens_before=1)


def test_a_stop_before_the_first_token_is_no_answer() -> None:
    check_finish(EngineChoice([7], finish_reason="stop"), tokens_before=0)
    with pytest.raises(EngineLost, match="protocol: the engine stopped before the first token"):
        check_finish(EngineChoice(finish_reason="stop"), tokens_before=0)
