"""The judge of benchmarks.migration.faults sees each fault of a tampered record, and only it."""

import json
import math
from collections.abc import Callable
from copy import deepcopy

import pytest

from benchmarks.migration.evidence import TokenTruth
from benchmarks.migration.judge import IN_FLIGHT_S
from benchmarks.migration.records import HeldRecord, RequestRecord
from tests.unit.benchmarks.migration_case import (
    LOGPROB,
    OUTPUT,
    PROMPT,
    SPANS,
    Case,
    attempt,
    body,
    choice,
    sampling,
    span,
)


def test_a_turn_that_moved_well_is_acquitted_and_was_looked_at() -> None:
    verdict = Case().verdict()
    assert Case().counted() == {}
    assert verdict.findings == []
    assert (verdict.turns, verdict.moved_turns, verdict.moves) == (1, 1, 1)
    assert (verdict.judged_spans, verdict.judged_tokens) == (2, len(OUTPUT))
    assert verdict.unknown_weights_spans == 0


def dropped_token(case: Case) -> None:
    case.say(OUTPUT[:4] + OUTPUT[5:], [SPANS[0], span(3, len(OUTPUT) - 1, "e1", 2)])
    sampling(case, max_tokens=len(OUTPUT) - 1)


def doubled_token(case: Case) -> None:
    case.say([*OUTPUT[:4], OUTPUT[3], *OUTPUT[4:]], [SPANS[0], span(3, len(OUTPUT) + 1, "e1", 2)])
    sampling(case, max_tokens=len(OUTPUT) + 1)


def error_status(case: Case) -> None:
    case.request.status, case.request.events = 503, []


def no_reply(case: Case) -> None:
    case.request.status, case.request.events, case.request.error = 0, [], "broken"


def stream_without_end(case: Case) -> None:
    del case.request.events[-1]


def aborted_at_once(case: Case) -> None:
    case.say([], [], "abort")
    case.attempts = []


def aborted_later(case: Case) -> None:
    case.say(OUTPUT[:3], [SPANS[0]], "abort")
    del case.attempts[1]


def short_length(case: Case) -> None:
    sampling(case, max_tokens=len(OUTPUT) + 4)


def stop_without_a_stop_token(case: Case) -> None:
    case.say(OUTPUT, SPANS, "stop")


def went_on_behind_the_stop_token(case: Case) -> None:
    sampling(case, stop_token_ids=[OUTPUT[2]])


def went_on_behind_eos(case: Case) -> None:
    ids = [*OUTPUT[:2], 2, *OUTPUT[3:]]
    case.say(ids, SPANS)
    case.attempts[0].token_ids = ids[:3]
    case.attempts[1].context = PROMPT + ids[:3]


def two_ends(case: Case) -> None:
    case.request.events.insert(0, json.dumps({"choices": [choice([], [], "length")]}))


def two_answers(case: Case) -> None:
    first = deepcopy(case.request)
    first.events, first.broken_off = [], True
    first.events.append(json.dumps({"choices": [choice([30], [], None)]}))
    case.extra.append(first)


def served_twice(case: Case) -> None:
    case.attempts.append(attempt("t0-0", 1, "e1", [], OUTPUT))


def went_on_from_other_tokens(case: Case) -> None:
    case.attempts[1].context = [*PROMPT, 20, 21, 77]


def gap_between_spans(case: Case) -> None:
    case.say(OUTPUT, [SPANS[0], span(4, len(OUTPUT), "e1", 2)])


def tokens_without_a_span(case: Case) -> None:
    case.say(OUTPUT, SPANS[:1])


def span_of_another_engine(case: Case) -> None:
    case.say(OUTPUT, [span(0, 3, "e1", 1), SPANS[1]])


def span_of_other_weights_by_hash(case: Case) -> None:
    case.held[1] = replace_held(case.held[1], "h1")


def workers_that_disagree(case: Case) -> None:
    case.held.append(replace_held(case.held[1], "h1"))


def greedy_token_of_other_weights(case: Case) -> None:
    case.truths = [*case.truths[:4], TokenTruth(LOGPROB, 0.01), *case.truths[5:]]


def logprob_of_other_weights(case: Case) -> None:
    case.truths = [*case.truths[:4], TokenTruth(LOGPROB - 0.1, 0.0), *case.truths[5:]]


def tokens_sampled_again(case: Case) -> None:
    case.attempts[0].token_ids = [*OUTPUT[:3], 40, 41]
    case.attempts[0].passed = [(11.0, 5)]


def went_on_behind_a_stop_string_across_the_seam(case: Case) -> None:
    sampling(case, stop=["cd"])


def ended_before_its_least_tokens(case: Case) -> None:
    sampling(case, min_tokens=len(OUTPUT), stop_token_ids=[OUTPUT[2]])


def forced_end_begun_again(case: Case) -> None:
    ids = [20, 21, 70, 70, 71, 72, 26, 27]
    case.say(ids, SPANS)
    case.attempts[0].token_ids = ids[:3]
    case.attempts[1].context, case.attempts[1].token_ids = PROMPT + ids[:3], ids[3:]
    sampling(case, thinking_token_budget=2)


def grammar_begun_again(case: Case) -> None:
    sampling(case, structured_outputs={"regex": "abc(abc|def)"})


def grammar_cut_short(case: Case) -> None:
    ids = [*OUTPUT[:7], 2]
    case.say(ids, SPANS, "stop")
    case.attempts[1].token_ids = ids[3:]
    sampling(case, structured_outputs={"regex": "[a-z]{9}"})


def logprob_below_the_grammars(case: Case) -> None:
    sampling(case, structured_outputs={"regex": "[a-z]{9}"})
    case.truths = [TokenTruth(LOGPROB + 0.1, None), *case.truths[1:]]


def forced_token_with_a_chance(case: Case) -> None:
    forced_end_across_the_seam(case)
    content = json.loads(case.request.events[0])
    content["choices"][0]["logprobs"]["content"][2]["logprob"] = -30.0
    case.request.events[0] = json.dumps(content)


def version_that_the_store_has_not(case: Case) -> None:
    case.say(OUTPUT, [SPANS[0], span(3, len(OUTPUT), "e1", 999)])


def versions_without_truths(case: Case) -> None:
    case.truths = []


def tokens_without_logprobs(case: Case) -> None:
    first = json.loads(case.request.events[0])
    first["choices"][0]["logprobs"]["content"] = []
    case.request.events[0] = json.dumps(first)


def weights_that_give_no_number(case: Case) -> None:
    case.truths = [TokenTruth(math.nan, 0.0), *case.truths[1:]]


def length_behind_a_stop_token(case: Case) -> None:
    sampling(case, stop_token_ids=[OUTPUT[-1]])


def another_temperature_behind_the_seam(case: Case) -> None:
    case.attempts[1].sampling["temperature"] = 1.0


def penalty_dropped_behind_the_seam(case: Case) -> None:
    sampling(case, presence_penalty=0.5)
    del case.attempts[1].sampling["presence_penalty"]


def seed_begun_again(case: Case) -> None:
    sampling(case, seed=7)


def seed_dropped(case: Case) -> None:
    sampling(case, seed=7)
    case.attempts[0].sampling["seed"], case.attempts[1].sampling["seed"] = None, 8


def poison_answered(case: Case) -> None:
    case.poison = frozenset({"t0"})


def older_than_its_pin(case: Case) -> None:
    case.request.body["weight_version"] = {"minimum": 2}


def dropped_buffer(case: Case) -> None:
    """Tokens that waited to be read together were not read at the cut."""
    tokens_sampled_again(case)
    case.attempts[0].passed = [(11.0, 3), (case.attempts[0].ended_s - 0.09, 2)]


def replace_held(held: HeldRecord, state_hash: str) -> HeldRecord:
    return HeldRecord(
        engine=held.engine, identity=held.identity, version=held.version, state_hash=state_hash
    )


@pytest.mark.parametrize(
    ("tamper", "counts"),
    [
        (dropped_token, {"lost": 1}),
        (error_status, {"lost": 1}),
        (no_reply, {"lost": 1}),
        (stream_without_end, {"lost": 1}),
        (aborted_at_once, {"lost": 1}),
        (doubled_token, {"duplicated": 1}),
        (two_ends, {"duplicated": 1}),
        (two_answers, {"duplicated": 1}),
        (served_twice, {"duplicated": 1}),
        (went_on_from_other_tokens, {"duplicated": 1}),
        (gap_between_spans, {"wrong_span": 1}),
        (tokens_without_a_span, {"wrong_span": 1}),
        (span_of_another_engine, {"wrong_span": 1}),
        (span_of_other_weights_by_hash, {"wrong_span": 1}),
        (workers_that_disagree, {"wrong_span": 1}),
        (greedy_token_of_other_weights, {"wrong_span": 1}),
        (logprob_of_other_weights, {"wrong_span": 1}),
        (tokens_sampled_again, {"resampled_tokens": 2}),
        (aborted_later, {"truncated_by_place": 1}),
        (short_length, {"truncated_by_place": 1}),
        (stop_without_a_stop_token, {"truncated_by_place": 1}),
        (went_on_behind_the_stop_token, {"overrun": 1}),
        (went_on_behind_eos, {"overrun": 1}),
        (went_on_behind_a_stop_string_across_the_seam, {"overrun": 1}),
        (ended_before_its_least_tokens, {"broken_setting": 1, "overrun": 1}),
        (forced_end_begun_again, {"broken_setting": 1}),
        (grammar_begun_again, {"broken_setting": 1}),
        (grammar_cut_short, {"broken_setting": 1}),
        (logprob_below_the_grammars, {"wrong_span": 1}),
        (forced_token_with_a_chance, {"wrong_span": 1}),
        (version_that_the_store_has_not, {"wrong_span": 1}),
        (versions_without_truths, {"wrong_span": 1}),
        (tokens_without_logprobs, {"wrong_span": 1}),
        (weights_that_give_no_number, {"wrong_span": 1}),
        (length_behind_a_stop_token, {"truncated_by_place": 1}),
        (another_temperature_behind_the_seam, {"broken_setting": 1}),
        (penalty_dropped_behind_the_seam, {"broken_setting": 1}),
        (seed_begun_again, {"broken_setting": 1}),
        (seed_dropped, {"broken_setting": 1}),
        (poison_answered, {"poison_passed": 1}),
        (older_than_its_pin, {"pin_broken": 1}),
        (dropped_buffer, {"resampled_tokens": 2}),
    ],
)
def test_the_judge_convicts_a_tampered_record_of_just_that(
    tamper: Callable[[Case], None], counts: dict[str, int]
) -> None:
    case = Case()
    tamper(case)
    assert case.counted() == counts


def seed_derived_behind_the_seam(case: Case) -> None:
    sampling(case, seed=7)
    case.attempts[1].sampling["seed"] = 8


def within_the_grammar(case: Case) -> None:
    # Over the allowed tokens alone, a token is likelier than the weights have it.
    sampling(case, structured_outputs={"regex": "[a-z]{9}"})
    case.truths = [TokenTruth(LOGPROB - 2.0, None)] * len(OUTPUT)


def stopped_by_a_string(case: Case) -> None:
    sampling(case, stop=["gh", "zz"], max_tokens=40)
    case.say(OUTPUT, SPANS, "stop")


def forced_end_across_the_seam(case: Case) -> None:
    ids = [20, 21, 70, 71, 72, 25, 26, 27]
    case.say(ids, SPANS)
    case.attempts[0].token_ids = ids[:3]
    case.attempts[1].context, case.attempts[1].token_ids = PROMPT + ids[:3], ids[3:]
    sampling(case, thinking_token_budget=2)


@pytest.mark.parametrize(
    "settle",
    [
        within_the_grammar,
        stopped_by_a_string,
        forced_end_across_the_seam,
        seed_derived_behind_the_seam,
    ],
)
def test_a_turn_that_kept_its_setting_across_a_move_is_acquitted(
    settle: Callable[[Case], None],
) -> None:
    case = Case()
    settle(case)
    assert case.counted() == {}


def test_the_judge_tells_tokens_in_flight_apart_from_resampled_ones() -> None:
    case = Case()
    tokens_sampled_again(case)
    case.attempts[0].passed = [(11.0, 3), (case.attempts[0].ended_s - IN_FLIGHT_S / 2, 2)]
    assert case.counted() == {}
    assert case.verdict().in_flight_tokens == 2


def test_a_late_tap_may_have_seen_a_cut_too_late() -> None:
    case = Case()
    dropped_buffer(case)
    case.attempts[0].late_s = 0.05
    assert case.counted() == {}
    assert case.verdict().in_flight_tokens == 2
    assert case.verdict().worst_late_s == 0.05


def poisoned(case: Case) -> None:
    """A request that killed e1 while the turn was there."""
    request = RequestRecord(trajectory="p", body=body("p-0"), sent_s=0.0, status=422)
    bad = attempt("p-0", 1, "e1", [], [])
    bad.end, bad.began_s, bad.ended_s = "broken", 21.0, 22.0
    case.extra.append(request)
    case.attempts.append(bad)
    case.poison = frozenset({"p"})


def test_a_turn_lost_beside_a_poison_request_is_lost_to_others() -> None:
    case = Case()
    poisoned(case)
    error_status(case)
    assert case.counted() == {"lost": 1, "lost_to_others": 1}


def test_a_turn_blamed_for_the_poison_is_lost_to_others() -> None:
    case = Case()
    poisoned(case)
    case.attempts = case.attempts[:1]
    case.request.status, case.request.events = 422, []
    assert case.counted() == {"lost": 1, "lost_to_others": 1}


def test_a_turn_that_survived_the_poison_is_not_and_the_poison_is_judged_apart() -> None:
    case = Case()
    poisoned(case)
    assert case.counted() == {}
    assert case.verdict().poison == {"422": 1}
    assert case.verdict().turns == 1
