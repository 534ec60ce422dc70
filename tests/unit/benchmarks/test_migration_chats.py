"""Reasoning, content and calls before the judge of benchmarks.migration.faults."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.migration.chat_judge import ChatParts, parted
from benchmarks.migration.chat_plan import CALL, Chat
from benchmarks.migration.model import END_THINK_ID, EOS_ID
from benchmarks.migration.rollout_routes import RolloutRoute
from tests.unit.benchmarks.migration_case import LOGPROB, Case, sampling, span

THOUGHT = [30, 31, 32]
WANTED = '<tool_call>{"name": "weather", "arguments": {"city":"Paris"}}</tool_call>'
SAID = {30: "ab", 31: "cd", 32: "ef", 40: "gh", 41: "ij", 42: "k", END_THINK_ID: "</think>"} | {
    100 + at: WANTED[at] for at in range(len(WANTED))
}
CALLED = sorted(one for one in SAID if one >= 100)


def spoken(ids: Sequence[int]) -> str:
    return "".join(SAID.get(one, "") for one in ids)


def chatted(case: Case, content: list[int], *, tool_choice: str = "", cut: int = 5) -> list[int]:
    """A chat that thought and then said this, and moved at the cut; its reply is made by `tell`."""
    ids = [*THOUGHT, END_THINK_ID, *content]
    case.parses_chats, case.text = True, spoken
    case.request.route = RolloutRoute.CHAT
    ended = ids[-1] == EOS_ID
    sampling(case, logprobs=1, max_tokens=len(ids) + 8 * ended)
    if tool_choice:
        case.request.body["tool_choice"] = tool_choice
    spans = [span(0, cut, "e0", 1), span(cut, len(ids), "e1", 2)]
    case.say(ids, spans, "stop" if ended else "length")
    for one in case.attempts:
        one.request_id = f"chatcmpl-t0-0-{'0123456789abcdef' * 2}-0"
    prompt = case.request.body["token_ids"]
    case.attempts[0].token_ids = ids[:cut]
    case.attempts[0].passed = [(11.0, cut)]
    case.attempts[1].context, case.attempts[1].token_ids = prompt + ids[:cut], ids[cut:]
    return ids


def tell(case: Case, *parts: dict[str, Any], finish: str = "length") -> None:
    """The chat's events: one for each part, with the ids of all in the first."""
    told = [json.loads(event)["choices"][0] for event in case.request.events[:-1]]
    ids = [one for each in told for one in each["token_ids"]]
    spans = told[-1]["spans"]
    case.request.events = []
    for place, part in enumerate(parts):
        own = [] if place else ids
        event = {
            "index": 0,
            "delta": part,
            "token_ids": own,
            "logprobs": {"content": [{"logprob": LOGPROB}] * len(own)},
        }
        if place == len(parts) - 1:
            event |= {"finish_reason": finish, "spans": spans}
        case.request.events.append(json.dumps({"choices": [event]}))
    case.request.events.append("[DONE]")


def tell_whole(case: Case, message: dict[str, Any], finish: str = "length") -> None:
    tell(case, message, finish=finish)
    event = json.loads(case.request.events[0])
    event["choices"][0]["message"] = event["choices"][0].pop("delta")
    case.request.events, case.request.reply = [], json.dumps(event)


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]}


def parted_well(case: Case) -> None:
    chatted(case, [40, 41])
    tell(case, {"reasoning": "abcd"}, {"reasoning": "ef", "content": "gh"}, {"content": "ij"})


def parted_well_whole(case: Case) -> None:
    chatted(case, [40, 41])
    tell_whole(case, {"reasoning": "abcdef", "content": "ghij"})


def thought_only(case: Case) -> None:
    chatted(case, [], cut=3)
    tell(case, {"reasoning": "abcdef"})


def stopped(case: Case) -> None:
    chatted(case, [40, 41])
    sampling(case, stop=["hij"], max_tokens=40)
    tell(case, {"reasoning": "abcdef"}, {"content": "g"}, finish="stop")


def called(case: Case, tool_choice: str = "auto") -> None:
    chatted(case, [*CALLED, EOS_ID], tool_choice=tool_choice, cut=40)
    sampling(case, structured_outputs={"regex": CALL})
    parts = (call("weather", '{"city":'), {"tool_calls": [{"index": 0, "function": _REST}]})
    tell(case, {"reasoning": "abcdef"}, *parts, finish="tool_calls")


_REST = {"arguments": '"Paris"}'}


def called_as_required(case: Case) -> None:
    """vLLM makes the grammar, in words of its own."""
    called(case, "required")
    for one in case.attempts:
        one.sampling["structured_outputs"] = {"structural_tag": "{}"}


def called_whole(case: Case) -> None:
    called(case)
    message = {"reasoning": "abcdef", "content": None} | call("weather", '{"city": "Paris"}')
    tell_whole(case, message, "tool_calls")


def may_not_call(case: Case) -> None:
    chatted(case, CALLED, tool_choice="none", cut=40)
    tell(case, {"reasoning": "abcdef"}, {"content": WANTED})


def cut_off(case: Case, *, whole: bool) -> None:
    """The limit ends a call."""
    chatted(case, [40, *CALLED[:60]], tool_choice="auto", cut=40)
    begun = WANTED[:60]
    if whole:
        tell_whole(case, {"reasoning": "abcdef", "content": "gh" + begun})
    else:
        sent = call("weather", begun.partition('"arguments": ')[2])
        tell(case, {"reasoning": "abcdef"}, {"content": "gh"}, sent)


def cut_off_in_a_stream(case: Case) -> None:
    cut_off(case, whole=False)


def cut_off_whole(case: Case) -> None:
    cut_off(case, whole=True)


def held_back(case: Case) -> None:
    """The beginning of a call, as it may be."""
    chatted(case, [40, *CALLED[:3]], tool_choice="auto")
    tell(case, {"reasoning": "abcdef"}, {"content": "gh"})


@pytest.mark.parametrize(
    ("settle", "calls"),
    [
        (parted_well, 0),
        (parted_well_whole, 0),
        (thought_only, 0),
        (stopped, 0),
        (called, 1),
        (called_as_required, 1),
        (called_whole, 1),
        (may_not_call, 0),
        (cut_off_in_a_stream, 1),
        (cut_off_whole, 0),
        (held_back, 0),
    ],
)
def test_a_chat_whose_parts_are_those_of_its_tokens_is_acquitted(
    settle: Callable[[Case], None], calls: int
) -> None:
    case = Case()
    settle(case)
    assert case.counted() == {}, case.verdict().findings
    verdict = case.verdict()
    assert (verdict.moves, verdict.judged_texts, verdict.called_turns) == (1, 1, calls)


def reasoning_begun_again(case: Case) -> None:
    """The parser forgot at the move that reasoning had ended."""
    chatted(case, [40, 41])
    tell(case, {"reasoning": "abcdef", "content": "gh"}, {"reasoning": "ij"})


def reasoning_as_content(case: Case) -> None:
    chatted(case, [40, 41])
    tell(case, {"content": "abcdef</think>ghij"})


def reasoning_twice(case: Case) -> None:
    chatted(case, [40, 41])
    tell(case, {"reasoning": "abcdef"}, {"reasoning": "ef", "content": "ghij"})


def content_missing(case: Case) -> None:
    chatted(case, [40, 41])
    tell(case, {"reasoning": "abcdef"}, {"content": "gh"})


def content_missing_whole(case: Case) -> None:
    chatted(case, [40, 41])
    tell_whole(case, {"reasoning": "abcdef", "content": None})


def call_as_content(case: Case) -> None:
    called(case)
    tell(case, {"reasoning": "abcdef"}, {"content": WANTED}, finish="stop")


def call_twice(case: Case) -> None:
    called(case)
    again = {"tool_calls": [{"index": 1, "function": {"name": "weather", "arguments": "{}"}}]}
    first = call("weather", '{"city": "Paris"}')
    tell(case, {"reasoning": "abcdef"}, first, again, finish="tool_calls")


def call_of_other_arguments(case: Case) -> None:
    called(case)
    tell(case, {"reasoning": "abcdef"}, call("weather", '{"city": "Rome"}'), finish="tool_calls")


def arguments_cut_at_the_move(case: Case) -> None:
    called(case)
    tell(case, {"reasoning": "abcdef"}, call("weather", '"Paris"}'), finish="tool_calls")


def call_that_may_not_be(case: Case) -> None:
    may_not_call(case)
    tell(case, {"reasoning": "abcdef"}, call("weather", '{"city": "Paris"}'))


def call_that_ends_as_a_stop(case: Case) -> None:
    called_whole(case)
    reply = json.loads(case.request.reply)
    reply["choices"][0]["finish_reason"] = "stop"
    case.request.reply = json.dumps(reply)


def grammar_of_calls_dropped_behind_the_seam(case: Case) -> None:
    called_as_required(case)
    del case.attempts[1].sampling["structured_outputs"]


def grammar_broken_behind_reasoning(case: Case) -> None:
    chatted(case, [40, 41])
    sampling(case, structured_outputs={"regex": "gh[0-9]+"})
    tell(case, {"reasoning": "abcdef"}, {"content": "ghij"})


@pytest.mark.parametrize(
    "tamper",
    [
        reasoning_begun_again,
        reasoning_as_content,
        reasoning_twice,
        content_missing,
        content_missing_whole,
        call_as_content,
        call_twice,
        call_of_other_arguments,
        arguments_cut_at_the_move,
        call_that_may_not_be,
        call_that_ends_as_a_stop,
        grammar_of_calls_dropped_behind_the_seam,
        grammar_broken_behind_reasoning,
    ],
)
def test_the_judge_convicts_other_parts_of_just_that(tamper: Callable[[Case], None]) -> None:
    case = Case()
    tamper(case)
    assert case.counted() == {"broken_setting": 1}, case.verdict().findings


def test_a_call_that_ends_within_its_json_is_none_yet() -> None:
    call_text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    wanted = (("f", {}),)
    assert parted("a</think>b" + call_text, may_call=True) == ChatParts("a", "b", wanted)
    assert parted("a</think>b" + call_text, may_call=False) == ChatParts("a", "b" + call_text)
    begun = parted("a</think>b" + call_text[:30], may_call=True)
    assert (begun.calls, begun.rest) == ((), call_text[11:30])


def test_a_chat_s_kinds_and_fields_tell_what_is_asked() -> None:
    said = [{"role": "user", "content": "go"}]
    chat = Chat(messages=said * 2, tool_choice="required", thinks=True)
    assert chat.kinds == [
        "chat of several messages",
        "chat with tools: required",
        "thinking chat",
    ]
    assert chat.fields["tools"][0]["function"]["strict"]
    assert Chat(messages=said).fields == {"messages": said}
