"""Chats of the plan: messages, tools and thinking, and the settings that go with them. Pure."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from benchmarks.migration.model import BOS_ID, END_THINK_ID, PAD_ID, THINK_ID

WORDS = ["why", "does", "a", "turn", "move", "to", "another", "engine", "and", "go", "on", "there"]
"""Chats are of these."""
TOOL = "weather"
CALL = (
    f'<tool_call>\n?[{{]"name": "{TOOL}", "arguments": [{{]"city": ?"(Paris|Rome)"[}}][}}]'
    "\n?</tool_call>"
)
"""A call as the model writes it for vLLM's `hermes` parser."""
_ROLES = ("system", "user", "assistant", "user")
_SEVERAL_MESSAGES = 0.5
_TOOL_CHOICES = {"none": 0.12, "auto": 0.2, "required": 0.2}
"""Shares of chats."""
_THINKING = 0.6
_BUDGET_TOKENS = 12
_CALL_TOKENS = 96
"""Enough for thoughts, their end and a call of one character a token."""
_BANNED = -100.0


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, str]]
    tool_choice: str = ""
    """Empty: no tools."""
    thinks: bool = False
    """The prompt ends with the start of thinking."""

    @property
    def kinds(self) -> list[str]:
        several = ["chat of several messages"] if len(self.messages) > 1 else []
        tools = [f"chat with tools: {self.tool_choice}"] if self.tool_choice else []
        return [*several, *tools, *(["thinking chat"] if self.thinks else [])]

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request."""
        given: dict[str, Any] = {"messages": self.messages}
        if self.tool_choice:
            given |= {"tools": [_tool(self.tool_choice)], "tool_choice": self.tool_choice}
        if self.tool_choice == "required":
            given["parallel_tool_calls"] = False
        if self.thinks:
            given["chat_template_kwargs"] = {"thinking": True}
        return given


def drawn_chat(
    random: Random, sampling: Mapping[str, Any], *, words: int, blanks: Sequence[int]
) -> tuple[Chat, dict[str, Any]]:
    """A chat of so many words, and its settings. `blanks`: tokens of white space."""
    given = dict(sampling)
    # vLLM's parsers read a second start of thinking in a stream otherwise than in a whole text,
    # and with tools special tokens are text.
    bias = dict.fromkeys((str(each) for each in (PAD_ID, BOS_ID, THINK_ID)), _BANNED)
    at, tool_choice = random.random(), ""
    for each, share in _TOOL_CHOICES.items():
        if not tool_choice and at < share:
            tool_choice = each
        at -= share
    calls = tool_choice == "required" or (tool_choice == "auto" and random.random() < 0.6)
    if tool_choice:
        # A stop string may stand in a call.
        given.pop("stop", None)
    if calls:
        given = {n: each for n, each in given.items() if n not in ("min_tokens", "stop_token_ids")}
        given |= {"structured_outputs": {"regex": CALL}, "max_tokens": _CALL_TOKENS}
        bias |= dict.fromkeys(map(str, blanks), _BANNED)
    # A grammar rules behind the end of thinking alone.
    thinks = "structured_outputs" in given or random.random() < _THINKING
    if "structured_outputs" in given:
        # Behind an end that the model chose, vLLM forces another one at the budget where its text
        # is longer, which the grammar refuses: the request fails on every engine.
        bias[str(END_THINK_ID)] = _BANNED
    given["logit_bias"] = given.get("logit_bias", {}) | bias
    if thinks:
        given.setdefault("thinking_token_budget", random.randint(0, _BUDGET_TOKENS))
        if "min_tokens" in given:
            # A forced end heeds no `min_tokens`, and may begin with a stop token.
            given.pop("stop_token_ids", None)
    else:
        given.pop("thinking_token_budget", None)
    roles = _ROLES if random.random() < _SEVERAL_MESSAGES else ("user",)
    each_words = max(2, words // len(roles))
    messages = [
        {"role": role, "content": " ".join(random.choices(WORDS, k=each_words))} for role in roles
    ]
    return Chat(messages=messages, tool_choice=tool_choice, thinks=thinks), given


def _tool(choice: str) -> dict[str, Any]:
    """vLLM constrains the calls of a strict tool itself, also where it may choose not to call."""
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": TOOL, "parameters": parameters, "strict": choice == "required"}
    return {"type": "function", "function": function}
