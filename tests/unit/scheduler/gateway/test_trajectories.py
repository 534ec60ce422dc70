"""The turn ledger: for any engines, a turn's tokens are exactly the accepted chunks, once."""

from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    VersionPin,
)
from scheduler.gateway.policy.attempt import continued_seed
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger

JOB = JobId("job")


def _open(
    ledger: TurnLedger, *, max_tokens: int = 100, seed: int | None = 7, stops: tuple[int, ...] = ()
) -> Turn:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stops)
    request = GenerateRequest(request_id="r", token_ids=(1, 2, 3), sampling_params=sampling)
    turn = ledger.open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    return turn


def _logprobs(token_ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id=token, logprob=-0.5) for token in token_ids]


def _begin(turn: Turn, engine: str, version: int = 1):
    return turn.begin(engine=EngineId(engine), version=WeightVersion(version), numerics="n")


chunks = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), max_size=5)
attempts = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 3), chunks, st.booleans()),
    min_size=1,
    max_size=8,
)


@given(plan=attempts)
def test_delivers_exactly_the_accepted_chunks_whatever_engines_die(plan) -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger)
    delivered: list[int] = []
    made_by: list[tuple[str, int]] = []
    earlier = []
    for engine, version, said, speaks_late in plan:
        if turn.ended:
            break
        attempt = _begin(turn, engine, version)
        assert attempt.token_ids == (1, 2, 3, *delivered)
        assert attempt.sampling_params.max_tokens == 100 - len(delivered)
        for chunk in said:
            if len(chunk) > turn.remaining_tokens:
                break
            assert turn.accept(attempt, chunk, _logprobs(chunk))
            delivered += chunk
            made_by += [(engine, version)] * len(chunk)
        for late in earlier if speaks_late else ():
            assert not turn.accept(late, [99], _logprobs([99]))
        turn.lose(attempt)
        earlier.append(attempt)
    if not turn.ended:
        turn.end(FinishReason.ABORT)
    ledger.close(turn)

    choice = turn.choice()
    assert list(choice.token_ids) == delivered
    assert [logprob.token_id for logprob in choice.logprobs.content] == delivered
    named = [(s.engine, s.version) for s in choice.spans for _ in range(s.start, s.end)]
    assert named == made_by
    counters = ledger.counters
    assert counters.completed + counters.aborted + counters.lost == counters.started == 1
    assert counters.duplicated == 0
    assert len(ledger) == 0


def test_a_turn_ends_once_and_a_second_end_is_counted_not_taken() -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger)
    assert turn.end(FinishReason.STOP)
    assert not turn.end(FinishReason.LENGTH)
    assert turn.finish_reason is FinishReason.STOP
    assert (ledger.counters.completed, ledger.counters.duplicated) == (1, 1)


@pytest.mark.parametrize(
    ("said", "ended"), [([4, 9], FinishReason.STOP), ([4, 5, 6, 7], FinishReason.LENGTH)]
)
def test_an_engine_lost_after_the_last_token_costs_nothing(said, ended) -> None:
    turn = _open(TurnLedger(JOB), max_tokens=4, stops=(9,))
    attempt = _begin(turn, "a")
    turn.accept(attempt, said, _logprobs(said))
    turn.lose(attempt)
    assert turn.finish_reason is ended


def test_a_continuation_never_draws_the_same_random_numbers_again() -> None:
    assert continued_seed(7, 0) == 7
    assert continued_seed(None, 5) is None
    seeds = [continued_seed(7, offset) for offset in range(200)]
    assert len(set(seeds)) == 200
    assert seeds == [continued_seed(7, offset) for offset in range(200)]


def test_adjacent_spans_of_one_engine_and_version_are_one() -> None:
    turn = _open(TurnLedger(JOB))
    for engine in ("a", "a", "b"):
        attempt = _begin(turn, engine)
        turn.accept(attempt, [5], _logprobs([5]))
        turn.lose(attempt)
    assert [(span.start, span.end, span.engine) for span in turn.choice().spans] == [
        (0, 2, "a"),
        (2, 3, "b"),
    ]


def test_refuses_tokens_without_logprobs_and_more_tokens_than_requested() -> None:
    turn = _open(TurnLedger(JOB), max_tokens=2)
    attempt = _begin(turn, "a")
    with pytest.raises(ValueError, match="log-probs"):
        turn.accept(attempt, [1], [])
    with pytest.raises(ValueError, match="room for 2"):
        turn.accept(attempt, [1, 2, 3], _logprobs([1, 2, 3]))
    assert turn.token_ids == []


def test_counts_a_move_with_tokens_as_migration_and_one_without_as_retry_only() -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger)
    turn.lose(_begin(turn, "a"))
    attempt = _begin(turn, "b")
    turn.accept(attempt, [1], _logprobs([1]))
    turn.lose(attempt)
    _begin(turn, "c")
    assert (ledger.counters.retried, ledger.counters.migrated) == (2, 1)


def test_one_request_id_is_open_once_and_free_again_after_its_end() -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger)
    assert ledger.open(turn.request, trajectory=TrajectoryId("t")) is None
    ledger.close(turn)
    assert ledger.open(turn.request, trajectory=TrajectoryId("t")) is not None


def test_a_refused_turn_with_tokens_ends_as_aborted_and_keeps_them() -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger)
    attempt = _begin(turn, "a")
    turn.accept(attempt, [1], _logprobs([1]))
    turn.lose(attempt)
    turn.refuse()
    assert (turn.outcome, turn.choice().token_ids) == ("abort", (1,))
    ledger.close(turn)
    other = _open(ledger)
    other.refuse()
    assert other.outcome == "refused"
    assert (ledger.counters.aborted, ledger.counters.refused) == (1, 1)


def test_a_finish_is_final_whatever_becomes_of_the_attempt() -> None:
    turn = _open(TurnLedger(JOB), max_tokens=9)
    attempt = _begin(turn, "a")
    turn.accept(attempt, [4, 7], _logprobs([4, 7]))
    turn.finish(attempt, "stop")
    turn.lose(attempt)
    assert not turn.accept(attempt, [8], _logprobs([8]))
    assert (turn.finish_reason, turn.token_ids) == (FinishReason.STOP, [4, 7])
    with pytest.raises(ValueError, match="has ended"):
        _begin(turn, "b")


def test_a_late_attempt_finishes_nothing() -> None:
    turn = _open(TurnLedger(JOB), max_tokens=9)
    late = _begin(turn, "a")
    _begin(turn, "b")
    turn.finish(late, "stop")
    assert not turn.ended


def test_an_eos_that_ended_one_turn_ends_the_next_though_its_reason_never_came() -> None:
    ledger = TurnLedger(JOB)
    for engine in "ab":
        _end_by_stop(ledger, engine)
    turn = _open(ledger, max_tokens=9)
    attempt = _begin(turn, "a")
    turn.accept(attempt, [7, 4], _logprobs([7, 4]))
    turn.lose(attempt)
    assert not turn.ended, "EOS ends a turn as its last token"
    attempt = _begin(turn, "b")
    turn.accept(attempt, [7], _logprobs([7]))
    turn.lose(attempt)
    assert turn.finish_reason is FinishReason.STOP


def _end_by_stop(ledger: TurnLedger, engine: str) -> None:
    turn = _open(ledger, max_tokens=9)
    attempt = _begin(turn, engine)
    turn.accept(attempt, [4, 7], _logprobs([4, 7]))
    turn.finish(attempt, "stop")
    ledger.close(turn)


def test_one_engines_false_stop_ends_no_turn_of_others() -> None:
    ledger = TurnLedger(JOB)
    for _ in range(3):
        _end_by_stop(ledger, "broken")
        turn = _open(ledger, max_tokens=9)
        attempt = _begin(turn, "a")
        turn.accept(attempt, [5, 7], _logprobs([5, 7]))
        turn.lose(attempt)
        assert not turn.ended
        ledger.close(turn)
    _end_by_stop(ledger, "broken")
    assert turn.end_tokens.known == {7}, "an engine alone is believed in time"


@pytest.mark.parametrize("said", ["length", "repetition"])
def test_no_other_finish_teaches_an_eos(said: str) -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger, max_tokens=2)
    attempt = _begin(turn, "a")
    turn.accept(attempt, [4, 7], _logprobs([4, 7]))
    turn.finish(attempt, said)
    assert turn.finish_reason == said
    assert not turn.end_tokens.known


def test_samples_of_one_prompt_have_one_content_and_others_have_their_own() -> None:
    def content(**changes) -> str:
        sampling = SamplingParams(**{"max_tokens": 4, "seed": 1, **changes})
        request = GenerateRequest(request_id="r", token_ids=(1, 2), sampling_params=sampling)
        turn = TurnLedger(JOB).open(request, trajectory=TrajectoryId("t"))
        assert turn is not None
        return turn.content

    assert content() == content(seed=2)
    assert content() != content(max_tokens=5)


def test_the_samples_of_a_prompt_hash_it_once() -> None:
    hashed = []

    class Prompt(tuple[int, ...]):
        __slots__ = ()

        def __hash__(self) -> int:
            hashed.append(self)
            return super().__hash__()

    ledger, prompt, marks = TurnLedger(JOB), Prompt((1, 2)), set()
    for name in "abc":
        sampling = SamplingParams(max_tokens=4)
        request = GenerateRequest(request_id=name, token_ids=prompt, sampling_params=sampling)
        turn = ledger.open(request, trajectory=TrajectoryId(name))
        assert turn is not None
        marks.add(turn.prompt_mark)
    assert (len(hashed), len(marks)) == (1, 1)


def test_the_turns_of_a_prompt_encode_it_once_while_one_is_open() -> None:
    ledger, prompt, turns = TurnLedger(JOB), (1, 2), []
    for name in "abc":
        sampling = SamplingParams(max_tokens=4)
        request = GenerateRequest(request_id=name, token_ids=prompt, sampling_params=sampling)
        turn = ledger.open(request, trajectory=TrajectoryId(name))
        assert turn is not None
        turns.append(turn)
    first, second, _ = attempts = [_begin(turn, "a") for turn in turns]
    assert [bytes(cast(msgspec.Raw, each.encoded_ids)) for each in attempts] == [b"[1,2]"] * 3
    assert first.encoded_ids is second.encoded_ids
    turns[0].accept(first, [7], _logprobs([7]))
    turns[0].lose(first)
    assert _begin(turns[0], "b").encoded_ids == (1, 2, 7), "output is part of this prompt"
    assert turns[0].prompt is turns[1].prompt is turns[2].prompt


def test_prompts_that_differ_in_one_id_or_in_their_job_have_marks_of_their_own() -> None:
    prompt = tuple(range(2048))

    def named(job: str, token_ids: tuple[int, ...]) -> tuple[str, str]:
        sampling = SamplingParams(max_tokens=4)
        request = GenerateRequest(request_id="r", token_ids=token_ids, sampling_params=sampling)
        turn = TurnLedger(JobId(job)).open(request, trajectory=TrajectoryId("t"))
        assert turn is not None
        return turn.prompt_mark, turn.content

    others = [(*prompt[:at], 5000, *prompt[at + 1 :]) for at in range(0, 2048, 31)]
    marks = [named("a", ids) for ids in (prompt, *others)] + [named("b", prompt)]
    assert named("a", tuple(range(2048))) == marks[0]
    for kind in zip(*marks, strict=True):
        assert len(set(kind)) == len(marks)


def test_a_failed_turn_keeps_its_tokens_and_says_why() -> None:
    ledger = TurnLedger(JOB)
    turn = _open(ledger)
    attempt = _begin(turn, "a")
    turn.accept(attempt, [1], _logprobs([1]))
    turn.fail("engines failed twice")
    choice = turn.choice()
    assert (turn.outcome, choice.token_ids, choice.fault) == (
        "failed",
        (1,),
        "engines failed twice",
    )
    assert choice.finish_reason is FinishReason.ABORT
    assert [(span.start, span.end) for span in choice.spans] == [(0, 1)]
    ledger.close(turn)
    counters = ledger.counters
    assert (counters.failed, counters.aborted, counters.output_tokens) == (1, 0, 1)


@pytest.mark.parametrize(
    ("pin", "exact", "minimum"),
    [
        ({"exact": 3}, 3, None),
        ({"min_version": None, "exact_version": 3}, 3, None),
        ({"min_version": 8, "exact_version": None}, None, 8),
        ({"max_lag": 2}, None, 7),
        ({"max_lag": 20}, None, 0),
        ({"max_lag": 2, "minimum": 8}, None, 8),
        ({"wait_s": 5.0}, None, None),
    ],
)
def test_a_pin_is_resolved_against_the_newest_version_at_the_turns_arrival(
    pin, exact, minimum
) -> None:
    resolved = VersionPin(**pin).resolved(WeightVersion(9))
    assert (resolved.exact, resolved.minimum) == (exact, minimum)


def test_an_ended_turn_lists_its_versions_as_vllm_does_whatever_engines_made_them() -> None:
    turn = _open(TurnLedger(JOB))
    for engine, version, tokens in (("a", 1, 2), ("b", 1, 3), ("b", 2, 1)):
        turn.accept(_begin(turn, engine, version), [5] * tokens, _logprobs([5] * tokens))
    assert turn.choice().weight_versions is None
    turn.end(FinishReason.ABORT)
    ranges = turn.choice().weight_versions or ()
    assert [(each.version, each.start, each.end) for each in ranges] == [("1", 0, 5), ("2", 5, 6)]


@pytest.mark.parametrize(
    ("equal", "before", "after"), [(False, "", ""), (True, "", "n"), ("m", "m", "m")]
)
def test_equal_numerics_are_those_of_the_first_token_or_of_the_label(equal, before, after) -> None:
    request = GenerateRequest(
        request_id="r",
        token_ids=(1,),
        sampling_params=SamplingParams(max_tokens=8),
        equal_numerics=equal,
    )
    turn = TurnLedger(JOB).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    attempt = _begin(turn, "a")
    assert turn.needed_numerics == before
    turn.accept(attempt, [5], _logprobs([5]))
    turn.lose(attempt)
    assert turn.needed_numerics == after
