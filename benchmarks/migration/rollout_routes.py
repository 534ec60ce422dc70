"""The gateway's routes for a turn, and a turn in each route's own words. Pure.

A turn is written down in the words of the gateway's own route, whichever it was sent by.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class RolloutRoute(StrEnum):
    """Paths of the gateway."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    SGLANG = "/generate"

    @property
    def label(self) -> str:
        return self.name.lower()


_SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_SGLANG_ELSEWHERE = frozenset(("logprobs", "structured_outputs"))
UNCARRIED: Mapping[RolloutRoute, frozenset[str]] = {
    RolloutRoute.SGLANG: frozenset(("thinking_token_budget",)),
    # The template decides where a chat's prompt ends: not with the start of thinking.
    RolloutRoute.CHAT: frozenset(("thinking_token_budget",)),
}
"""Settings that a route cannot carry, or that mean nothing there."""
_TEXT_TURN = re.compile(r"(?:chat)?cmpl-(?P<request>.+)-[0-9a-f]{32}-0(?P<sample>\.\d+)?")
"""The gateway's names of the turns of a text request with one prompt."""


def sent(route: RolloutRoute, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body that the route takes; `messages` are those of a chat."""
    sampling: Mapping[str, Any] = body["sampling_params"]
    kept = {name: body[name] for name in ("stream", "weight_version") if name in body}
    if route is RolloutRoute.GENERATE:
        return {name: value for name, value in body.items() if name != "messages"}
    if route is RolloutRoute.SGLANG:
        own = {
            _SGLANG_NAMES.get(name, name): value
            for name, value in sampling.items()
            if name not in _SGLANG_ELSEWHERE
        }
        return kept | {
            "rid": body["request_id"],
            "input_ids": body["token_ids"],
            "sampling_params": own | sampling.get("structured_outputs", {}),
            "return_logprob": True,
        }
    named = {"request_id": body["request_id"], "return_token_ids": True}
    if route is RolloutRoute.COMPLETIONS:
        return {**sampling, **kept, **named, "prompt": body["token_ids"]}
    scored = {"logprobs": True, "top_logprobs": sampling["logprobs"]}
    return {**sampling, **kept, **named, **scored, "messages": body["messages"]}


def choice_name(turn: str) -> str:
    """The client's name of a turn that the gateway named for an engine: the request's id, and the
    sample's number where the request has several."""
    found = _TEXT_TURN.fullmatch(turn)
    return turn if found is None else found["request"] + (found["sample"] or "")
