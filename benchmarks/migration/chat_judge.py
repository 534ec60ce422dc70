"""Are a chat's reasoning, content and calls those of its tokens as a whole? Pure.

A rule of our own stands for vLLM's parsers `deepseek_r1` and `hermes`: reasoning ends at the first
`</think>`, and with tools that may be called each `<tool_call>` behind it is JSON of a call. A
parser that began anew at a move, or read a token twice, makes other parts.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.migration.model import END_THINK_ID
from benchmarks.migration.records import RequestRecord
from benchmarks.migration.replies import Reply
from benchmarks.migration.settings_judge import Text, texts_of

_END = "</think>"
_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_ARGUMENTS = '"arguments": '


@dataclass(frozen=True, slots=True)
class ChatParts:
    reasoning: str
    content: str
    calls: tuple[tuple[str, Any], ...] = ()
    """Name and arguments of each whole call."""
    rest: str | None = None
    """Text of a call that the end of the reply cut off."""


def content_of(ids: Sequence[int]) -> Sequence[int]:
    """Tokens behind the end of reasoning, which a grammar rules."""
    return ids[list(ids).index(END_THINK_ID) + 1 :] if END_THINK_ID in ids else []


def wrong_parts(
    request: RequestRecord,
    ids: Sequence[int],
    reply: Reply,
    *,
    ends: frozenset[int],
    text: Text,
) -> str:
    """The difference of a chat's parts from those of its tokens; "" for none."""
    sampling: Mapping[str, Any] = request.body["sampling_params"]
    may_call = request.body.get("tool_choice") in ("auto", "required")
    fits = [parted(each, may_call=may_call) for each in texts_of(sampling, ids, ends, text)]
    if not any(_equal(reply, each, stream=bool(request.events)) for each in fits):
        parts = (reply.reasoning, reply.text, list(reply.calls.values()))
        return f"{parts} are the parts of {fits[0]}"
    if reply.calls_at_end != bool(reply.calls) and reply.finish_reasons[-1:] == ["stop"]:
        return f"ended with calls: {reply.calls_at_end}, of {len(reply.calls)}"
    return ""


def parted(text: str, *, may_call: bool) -> ChatParts:
    reasoning, _, content = text.partition(_END)
    if not may_call or _CALL not in content:
        return ChatParts(reasoning, content)
    calls: list[tuple[str, Any]] = []
    for found in _CALLS.finditer(content):
        try:
            call = json.loads(found[1])
        except ValueError:
            return ChatParts(reasoning, content, tuple(calls), rest=found[1])
        calls.append((call["name"], call["arguments"]))
    return ChatParts(reasoning, content[: content.find(_CALL)], tuple(calls))


def _equal(reply: Reply, parts: ChatParts, *, stream: bool) -> bool:
    contents, calls = [parts.content], parts.calls
    calls_made = [reply.calls[place] for place in sorted(reply.calls)]
    if stream and parts.rest is not None:
        # A stream has sent a part of the call; a whole reply takes the text for none.
        contents = [parts.content[: parts.content.find(_CALL)]]
        _, _, begun = parts.rest.partition(_ARGUMENTS)
        # vLLM ends a call without arguments with empty ones.
        if len(calls_made) > len(calls) and (begun or "{}").startswith(calls_made[len(calls)][1]):
            del calls_made[len(calls)]
    elif parts.rest is not None:
        calls = ()
    elif stream and not calls:
        # It holds back what may begin a call, and may end with it.
        held = (n for n in range(1, len(_CALL)) if parts.content.endswith(_CALL[:n]))
        contents += [parts.content[:-n] for n in held]
    return (
        _shown(reply.reasoning) == _shown(parts.reasoning)
        and _shown(reply.text) in map(_shown, contents)
        and _parsed(calls_made) == list(calls)
    )


def _shown(text: str | None) -> str:
    """Bytes that are no character have no text of their own."""
    return (text or "").replace("\ufffd", "")


def _parsed(calls: Iterable[Sequence[str]]) -> list[tuple[str, Any]] | None:
    try:
        return [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return None
