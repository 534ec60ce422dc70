"""Draws at the moves of a bias run: what was thrown away, what came first behind a move."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.migration import reference
from benchmarks.migration.bias_run import at_moves, bias_faults, drawn
from benchmarks.migration.comparison import differing
from benchmarks.migration.evidence import MoveEvidence, TokenTruth
from benchmarks.migration.faults import convicted
from benchmarks.migration.model import EOS_ID
from benchmarks.migration.records import AttemptRecord, RequestRecord

STOP = 77
PROMPT = [1, 40, 41]
SAMPLING = {"max_tokens": 64, "temperature": 1.0, "stop_token_ids": [STOP]}


def request(name: str, tokens: list[int]) -> RequestRecord:
    span = {"start": 0, "end": len(tokens), "version": 1, "engine": "e0", "numerics": ""}
    content = [{"logprob": -1.0, "token_id": each} for each in tokens]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "spans": [span],
    }
    body = {"request_id": f"{name}-0", "token_ids": PROMPT, "sampling_params": SAMPLING}
    reply = msgspec.json.encode({"choices": [choice]}).decode()
    return RequestRecord(trajectory=name, body=body, sent_s=0.0, status=200, reply=reply)


def attempt(name: str, number: int, before: list[int], tokens: list[int]) -> AttemptRecord:
    return AttemptRecord(
        engine=f"e{number}",
        request_id=f"{name}-0",
        number=number,
        context=[*PROMPT, *before],
        sampling=SAMPLING,
        began_s=float(number),
        token_ids=tokens,
    )


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> MoveEvidence:
    """A turn of each arm. The moved one's first engine sent four tokens, of which two were taken;
    the third one equals what came in its place, by chance."""

    def rated(_model: Path, weights: Any, claims: Any) -> dict[str, list[TokenTruth]]:
        assert list(weights) == [1]
        return {
            each.request_id: [TokenTruth(-1.0, None, 0.25)] * len(each.token_ids) for each in claims
        }

    monkeypatch.setattr(reference, "truths_of", rated)
    requests = [request("calm-0", [50, EOS_ID]), request("moved-0", [60, 61, 62, STOP])]
    attempts = [
        attempt("calm-0", 1, [], [50, EOS_ID]),
        attempt("moved-0", 1, [], [60, 61, 62, EOS_ID]),
        attempt("moved-0", 2, [60, 61], []),
        attempt("moved-0", 3, [60, 61], [62, STOP]),
    ]
    truths = reference.truths(Path(), {1: {}}, requests)
    return MoveEvidence(requests=requests, attempts=attempts, held=[], hashes={}, truths=truths)


def test_an_arm_s_tokens_are_its_own_and_its_ends_are_eos_and_stop_tokens(
    evidence: MoveEvidence,
) -> None:
    assert [each.is_end for each in drawn(evidence, "calm")] == [False, True]
    assert [each.is_end for each in drawn(evidence, "moved")] == [False, False, False, True]


def test_tokens_behind_the_next_attempt_s_context_were_thrown_away_whatever_came_then(
    evidence: MoveEvidence,
) -> None:
    found = at_moves(evidence, Path(), {1: {}})
    assert [each.is_end for each in found["thrown_away"]] == [False, True]
    assert [each.is_end for each in found["first_behind_a_move"]] == [False]


CLEAN = {"verdict": dict.fromkeys(
    ("lost", "duplicated", "wrong_span", "resampled_tokens", "truncated_by_place", "overrun",
     "broken_setting", "lost_to_others", "poison_passed", "pin_broken", "unknown_weights_spans"),
    0) | {"spans": 100}}  # fmt: skip


def test_a_run_of_bias_convicts_by_counters_p_value_draws_and_for_want_of_moves() -> None:
    calm = {"ends_z": 1.0, "logprob_z": -2.0}
    clean = CLEAN | {
        "bias_p_value": 0.2,
        "draws": {"moved": calm},
        "moved_turns": {"moved": 9},
        "power_against": {"dropping_moved": 1.0, "losing_ends": 0.1},
        "power_of_draws": {"losing_ends": 0.9},
    }
    assert bias_faults(clean) == {}
    for change in (
        {"bias_p_value": 0.0005},
        {"draws": {"moved": calm, "thrown_away": {"ends_z": -4.5, "logprob_z": 0.0}}},
        {"moved_turns": {"moved": 0}},
        {"power_against": {"dropping_moved": 0.5}},
        {"power_of_draws": {"losing_ends": 0.5}},
        {"verdict": CLEAN["verdict"] | {"lost": 1}},
    ):
        assert len(bias_faults(clean | change)) == 1


def test_forced_moves_convict_by_a_difference_that_is_no_tie_and_for_want_of_moves() -> None:
    tie = {"setting": "EOS", "tie": True}
    seeded = {"turns": 9, "equal_to_each_other": 9, "equal_up_to_the_move": 9}
    other, good = (
        tie | {"tie": False},
        {
            "turns": 5,
            "turns_each": 10,
            "moves": 9,
            "planned_moves": 10,
            "differing": [tie],
            "unlike_base": 5,
            "seeded": seeded,
        },
    )
    assert differing(good | {"lora": good}) == {}
    few = ({"differing": [tie, other]}, {"turns": 0, "differing": []}, {"moves": 4})
    for bad in (*few, {"unlike_base": 0}):
        assert differing(good | {"lora": good | bad})
    for bad in few:
        assert differing(good | bad | {"lora": good})
    for change in ({"turns": 0}, {"equal_to_each_other": 8}, {"equal_up_to_the_move": 8}):
        assert differing(good | {"lora": good, "seeded": seeded | change})


def test_a_judge_that_convicts_too_little_of_other_weights_convicts_the_run() -> None:
    clean: dict[str, Any] = {
        "verdict": CLEAN["verdict"] | {"exchanged_weights": [91, 100]},
        "unstruck": {},
        "unasked": {},
        "guests_ended": [1, 1],
    }
    assert convicted(clean) == {}
    for change in ({"exchanged_weights": [0, 100]}, {"unknown_weights_spans": 6}):
        blind = clean | {"verdict": clean["verdict"] | change}
        assert len(convicted(blind)) == 1
    for change in (
        {"unstruck": {"kill": [0, 2]}},
        {"unasked": {"sglang": [1, 90]}},
        {"guests_ended": [2, 1]},
    ):
        assert convicted(clean | change) == change
