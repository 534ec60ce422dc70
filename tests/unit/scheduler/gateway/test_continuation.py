"""An attempt sends the output before it; which turns may be moved where."""

import msgspec
import pytest

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    EMITTED_ARGUMENT,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
)
from scheduler.gateway.engines.generate_body import generate_body
from scheduler.gateway.policy.attempt import output_fields
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger


def turn(**sampling) -> Turn:
    params = SamplingParams(max_tokens=10, **sampling)
    request = GenerateRequest(request_id="r", token_ids=(7, 8), sampling_params=params)
    opened = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
    assert opened is not None
    return opened


def moved(turn: Turn, *, resumes: bool):
    """The second attempt of a turn that has made tokens 1, 2, 3 elsewhere."""
    first = turn.begin(engine=EngineId("a"), version=WeightVersion(0), numerics="n")
    turn.accept(first, [1, 2, 3], [TokenLogprob(token, -1.0) for token in (1, 2, 3)])
    turn.lose(first)
    return turn.begin(engine=EngineId("b"), version=WeightVersion(0), numerics="n", resumes=resumes)


def test_an_engine_that_resumes_gets_output_as_output_and_the_request_s_own_bounds() -> None:
    body = generate_body(moved(turn(min_tokens=6, presence_penalty=1.0), resumes=True), "r", 0)
    sampling = body["sampling_params"]
    assert msgspec.json.decode(body["token_ids"]) == [7, 8]
    assert sampling["extra_args"][EMITTED_ARGUMENT] == (1, 2, 3)
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (10, 6)


def test_another_engine_gets_output_as_prompt_and_what_is_left_of_the_bounds() -> None:
    body = generate_body(moved(turn(min_tokens=6), resumes=False), "r", 0)
    sampling = body["sampling_params"]
    assert body["token_ids"] == (7, 8, 1, 2, 3)
    assert EMITTED_ARGUMENT not in sampling["extra_args"]
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (7, 3)


def test_the_first_attempt_brings_no_output() -> None:
    fresh = turn(stop=("end",))
    attempt = fresh.begin(
        engine=EngineId("a"), version=WeightVersion(0), numerics="n", resumes=True
    )
    sampling = generate_body(attempt, "r", 0)["sampling_params"]
    assert EMITTED_ARGUMENT not in sampling["extra_args"]
    assert sampling["detokenize"], "vLLM looks for stop strings in text"


@pytest.mark.parametrize(
    ("sampling", "counts"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 5, "min_p": 0.1, "top_p": 0.9}, False),
        ({"repetition_penalty": 1.3}, False),
        ({"logit_bias": {3: 1.0}, "stop_token_ids": (4,), "min_tokens": 2}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"stop": "x"}, True),
        ({"bad_words": ("x",)}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"thinking_token_budget": 0}, True),
        ({"extra_args": {"own_processor": 1}}, True),
    ],
)
def test_only_sampling_that_knows_output_from_prompt_binds_a_turn(sampling, counts) -> None:
    assert bool(output_fields(SamplingParams(max_tokens=4, **sampling))) is counts


def test_a_turn_that_stopped_at_a_string_teaches_no_eos() -> None:
    stopped = turn(stop=("end",))
    attempt = stopped.begin(engine=EngineId("a"), version=WeightVersion(0), numerics="n")
    stopped.accept(attempt, [5], [TokenLogprob(5, -1.0)])
    stopped.finish(attempt, "stop", "end")
    assert (stopped.stop_reason, stopped.end_tokens.known) == ("end", set())
    assert msgspec.to_builtins(stopped.choice())["stop_reason"] == "end"


def test_a_known_eos_below_min_tokens_ends_no_turn_that_is_lost() -> None:
    young = turn(min_tokens=5)
    young.end_tokens.known.add(3)
    attempt = moved(young, resumes=True)
    young.lose(attempt)
    assert not young.ended
