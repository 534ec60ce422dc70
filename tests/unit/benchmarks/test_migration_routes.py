"""Turns of several samples and of other routes before the judge of benchmarks.migration.faults."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest

from benchmarks.migration.records import RequestRecord
from benchmarks.migration.replies import Reply, replies
from benchmarks.migration.rollout_plan import rollout_plan
from benchmarks.migration.rollout_routes import RolloutRoute, choice_name, sent
from benchmarks.migration.settings_judge import wrong_text
from scheduler.gateway.dialects.text_fields import CHAT_FIELDS, COMPLETION_FIELDS, OWN_FIELDS
from tests.unit.benchmarks.migration_case import (
    LOGPROB,
    OUTPUT,
    SPANS,
    Case,
    body,
    letters,
    sampling,
)

TINKER_FIELDS = {"max_tokens", "temperature", "top_k", "top_p", "seed", "stop"}
"""Fields of its client's `SamplingParams`, of which the plan's turns may be."""
UNIQUE = "0123456789abcdef" * 2
OTHERS = (RolloutRoute.COMPLETIONS, RolloutRoute.CHAT, RolloutRoute.SGLANG)


def of_openai(ids: list[int], finish: str | None, *, chat: bool, stream: bool) -> dict[str, Any]:
    text = letters(ids)
    told: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": finish}
    told["spans"] = SPANS if finish else []
    if chat:
        told["logprobs"] = {"content": [{"token": "?", "logprob": LOGPROB}] * len(ids)}
        told["delta" if stream else "message"] = {"content": text}
    else:
        told["logprobs"] = {"token_logprobs": [LOGPROB] * len(ids)}
        told["text"] = text
    return {"choices": [told]}


def of_sglang(ids: list[int], finish: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": letters(ids),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish and {"type": finish, "length": len(ids)},
            "completion_tokens": len(ids),
            "output_token_logprobs": [[LOGPROB, one, None] for one in ids],
            "spans": SPANS if finish else [],
        },
    }


def answered(case: Case, route: RolloutRoute, *, stream: bool = True) -> None:
    """The same answer in the form of another route, in two events if streamed."""
    case.request.route, case.request.events = route, []
    sampling(case, logprobs=1)
    if route is RolloutRoute.SGLANG:
        parts = [of_sglang(OUTPUT[:4], None), of_sglang(OUTPUT, "length")]
    else:
        chat = route is RolloutRoute.CHAT
        prefix = "chatcmpl" if chat else "cmpl"
        for one in case.attempts:
            one.request_id = f"{prefix}-t0-0-{UNIQUE}-0"
        ids = (OUTPUT[:4], OUTPUT[4:]) if stream else (OUTPUT,)
        ends = (None, "length")[-len(ids) :]
        parts = [
            of_openai(each, end, chat=chat, stream=stream)
            for each, end in zip(ids, ends, strict=True)
        ]
    if stream:
        case.request.events = [*map(json.dumps, parts), "[DONE]"]
    else:
        case.request.reply = json.dumps(parts[-1])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", OTHERS)
def test_a_turn_of_another_route_that_moved_well_is_acquitted(
    route: RolloutRoute, stream: bool
) -> None:
    case = Case()
    answered(case, route, stream=stream)
    assert case.counted() == {}
    verdict = case.verdict()
    assert (verdict.moves, verdict.judged_tokens, verdict.judged_texts) == (1, len(OUTPUT), 1)
    assert verdict.routes == {route.label: 1}
    assert verdict.settings[route.label] == 1


def in_two_samples(case: Case) -> None:
    """Both moved as one turn did; the second one's seed counts up."""
    sampling(case, n=2, seed=7)
    case.attempts[1].sampling["seed"] = 123
    second = deepcopy(case.attempts)
    for index, attempts in enumerate((case.attempts, second)):
        for one in attempts:
            one.request_id = f"t0-0.{index}"
    second[0].sampling["seed"] = 8
    case.attempts = [*case.attempts, *second]
    other = [json.loads(each) for each in case.request.events[:-1]]
    for each in other:
        each["choices"][0]["index"] = 1
    case.request.events = [*map(json.dumps, other), *case.request.events]


def test_each_sample_of_a_request_is_judged_as_a_turn_of_its_own() -> None:
    case = Case()
    in_two_samples(case)
    assert case.counted() == {}
    verdict = case.verdict()
    assert (verdict.turns, verdict.moved_turns, verdict.samples) == (2, 2, 2)
    assert verdict.judged_tokens == 2 * len(OUTPUT)


def a_sample_missing(case: Case) -> None:
    in_two_samples(case)
    del case.request.events[:2]


def a_sample_cut_short(case: Case) -> None:
    in_two_samples(case)
    del case.request.events[1]


def a_sample_too_many(case: Case) -> None:
    in_two_samples(case)
    more = json.loads(case.request.events[1])
    more["choices"][0]["index"] = 2
    case.request.events.insert(0, json.dumps(more))


def a_sample_twice(case: Case) -> None:
    """The second one is a copy of the first, and not what its engines sent."""
    in_two_samples(case)
    for one in case.attempts[2:]:
        one.context = [each + 40 * (each in OUTPUT) for each in one.context]
        one.token_ids = [each + 40 for each in one.token_ids]


def samples_of_one_seed(case: Case) -> None:
    in_two_samples(case)
    case.attempts[2].sampling["seed"] = 7


def a_sample_of_another_setting(case: Case) -> None:
    in_two_samples(case)
    case.attempts[2].sampling["temperature"] = 1.0


def a_token_without_a_logprob(case: Case) -> None:
    answered(case, RolloutRoute.COMPLETIONS)
    first = json.loads(case.request.events[0])
    del first["choices"][0]["logprobs"]["token_logprobs"][0]
    case.request.events[0] = json.dumps(first)


def logprobs_of_other_tokens(case: Case) -> None:
    answered(case, RolloutRoute.SGLANG)
    last = json.loads(case.request.events[1])
    last["meta_info"]["output_token_logprobs"][2][1] = 77
    case.request.events[1] = json.dumps(last)


def tokens_taken_back(case: Case) -> None:
    answered(case, RolloutRoute.SGLANG)
    case.request.events[0] = json.dumps(of_sglang([*OUTPUT[:3], 77], None))


def tokens_miscounted(case: Case) -> None:
    answered(case, RolloutRoute.SGLANG, stream=False)
    reply = json.loads(case.request.reply)
    reply["meta_info"]["completion_tokens"] += 1
    case.request.reply = json.dumps(reply)


def text_of_other_tokens(case: Case) -> None:
    answered(case, RolloutRoute.CHAT)
    first = json.loads(case.request.events[0])
    first["choices"][0]["delta"]["content"] = "abdd"
    case.request.events[0] = json.dumps(first)


def text_behind_its_stop_string(case: Case) -> None:
    answered(case, RolloutRoute.COMPLETIONS, stream=False)
    sampling(case, stop=["gh"])
    reply = json.loads(case.request.reply)
    reply["choices"][0]["finish_reason"] = "stop"
    case.request.reply = json.dumps(reply)


def another_setting_by_another_route(case: Case) -> None:
    answered(case, RolloutRoute.SGLANG)
    case.request.body["sampling_params"]["min_tokens"] = 2


def stream_without_its_end(case: Case) -> None:
    answered(case, RolloutRoute.SGLANG)
    del case.request.events[-1]


def fault_in_the_stream(case: Case) -> None:
    answered(case, RolloutRoute.COMPLETIONS)
    case.request.events[1] = json.dumps({"error": {"message": "no renderer", "code": 503}})


@pytest.mark.parametrize(
    ("tamper", "counts"),
    [
        (a_sample_missing, {"lost": 1}),
        (a_sample_cut_short, {"lost": 1}),
        (a_sample_too_many, {"duplicated": 1}),
        (a_sample_twice, {"duplicated": 1}),
        (samples_of_one_seed, {"broken_setting": 1}),
        (a_sample_of_another_setting, {"broken_setting": 1}),
        (a_token_without_a_logprob, {"wrong_span": 1}),
        (logprobs_of_other_tokens, {"duplicated": 1}),
        (tokens_taken_back, {"duplicated": 1}),
        (tokens_miscounted, {"duplicated": 1}),
        (text_of_other_tokens, {"broken_setting": 1}),
        (text_behind_its_stop_string, {"broken_setting": 1}),
        (another_setting_by_another_route, {"broken_setting": 2}),
        (stream_without_its_end, {"lost": 1}),
        (fault_in_the_stream, {"lost": 1}),
    ],
)
def test_the_judge_convicts_a_tampered_sample_or_route_of_just_that(
    tamper: Callable[[Case], None], counts: dict[str, int]
) -> None:
    case = Case()
    tamper(case)
    assert case.counted() == counts


def test_a_stream_may_end_without_the_text_of_tokens_that_end_within_a_character() -> None:
    def text(ids: Sequence[int]) -> str:
        return letters(ids[:7]) + " \ufffd" * (len(ids) > 7)

    request = RequestRecord(trajectory="t0", body=body("t0-0"), sent_s=0.0)
    for said, is_right in (("abcdefg", True), ("abcdefg \ufffd", True), ("abcdef", False)):
        broken = wrong_text(request, OUTPUT, Reply(text=said), ends=frozenset(), text=text)
        assert (broken == "") == is_right


def test_names_of_turns_give_back_their_request_and_sample() -> None:
    assert choice_name("t5-1") == "t5-1"
    assert choice_name("t5-1.2") == "t5-1.2"
    assert choice_name(f"cmpl-t5-1-again2-{UNIQUE}-0") == "t5-1-again2"
    assert choice_name(f"chatcmpl-t5-1-{UNIQUE}-0.2") == "t5-1.2"


def test_a_whole_reply_of_sglang_lists_its_samples() -> None:
    case = Case()
    answered(case, RolloutRoute.SGLANG, stream=False)
    sampling(case, n=2)
    case.request.reply = json.dumps([of_sglang(OUTPUT, "length"), of_sglang(OUTPUT[:2], "stop")])
    found = replies(case.request)
    assert [found[index].token_ids for index in (0, 1)] == [OUTPUT, OUTPUT[:2]]
    assert [found[index].finish_reasons for index in (0, 1)] == [["length"], ["stop"]]


def test_every_planned_turn_is_sent_in_words_that_its_route_knows() -> None:
    known = {
        RolloutRoute.COMPLETIONS: COMPLETION_FIELDS | OWN_FIELDS,
        RolloutRoute.CHAT: CHAT_FIELDS | OWN_FIELDS,
    }
    plan = rollout_plan(0, 300, contexts=(256, 512), chat=lambda chat: [1] * len(chat.messages))
    seen = set()
    for turn in (turn for planned in plan for turn in planned.turns):
        native = {**body("s.1..0"), "sampling_params": turn.sampling, "stream": turn.stream}
        told = sent(turn.route, native | (turn.chat.fields if turn.chat else {}))
        assert told.keys() <= known.get(turn.route, told.keys())
        seen.add(turn.route)
        if turn.route is RolloutRoute.TINKER:
            assert told["sampling_params"].keys() <= TINKER_FIELDS
        if turn.route is RolloutRoute.SGLANG:
            assert told["sampling_params"]["max_new_tokens"] == turn.sampling["max_tokens"]
            assert ("regex" in told["sampling_params"]) == ("structured_outputs" in turn.sampling)
    assert seen == set(RolloutRoute)
