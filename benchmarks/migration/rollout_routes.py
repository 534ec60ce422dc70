"""The gateway's routes for a turn, and a turn in each route's own words. Pure.

A turn is written down in the words of the gateway's own route, whichever it was sent by.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

JOB = "job"
"""The one job of the run."""


class RolloutRoute(StrEnum):
    """Paths of the gateway."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    SGLANG = "/generate"
    TINKER = "/api/v1/asample"
    """Begins a sample, whose promise is then waited for (tinker_client.py)."""

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
    RolloutRoute.TINKER: frozenset(
        (
            *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens"),
            *("structured_outputs", "thinking_token_budget", "logit_bias"),
        )
    ),
}
"""Settings that a route cannot carry."""
KEPT_ANSWERS = frozenset((RolloutRoute.GENERATE, RolloutRoute.TINKER))
"""Routes whose answers are kept for clients that ask for the same again."""
_CHAT_FIELDS = frozenset(
    ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
)
_PIN_FIELDS = ("weight_version", "equal_numerics")
_TEXT_TURN = re.compile(r"(?:chat)?cmpl-(?P<request>.+)-[0-9a-f]{32}-0(?P<sample>\.\d+)?")
"""The gateway's names of the turns of a text request with one prompt."""


def sent(route: RolloutRoute, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body that the route takes; `messages` and what goes with them are those of a chat."""
    sampling: Mapping[str, Any] = body["sampling_params"]
    kept = {name: body[name] for name in ("stream", *_PIN_FIELDS) if name in body}
    if route is RolloutRoute.GENERATE:
        return {name: value for name, value in body.items() if name not in _CHAT_FIELDS}
    if route is RolloutRoute.TINKER:
        return _sent_to_tinker(body)
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
    own = {name: value for name, value in sampling.items() if name not in route_made(body)}
    return own | kept | named | scored | {n: body[n] for n in _CHAT_FIELDS if n in body}


def route_made(body: Mapping[str, Any]) -> frozenset[str]:
    """Settings that vLLM's renderer makes itself of the request: the grammar of calls that must
    come. The turn's own word for it is what the judge holds the text to."""
    requires = body.get("tool_choice") == "required"
    return frozenset(("structured_outputs",)) if requires else frozenset()


def _sent_to_tinker(body: Mapping[str, Any]) -> dict[str, Any]:
    sampling: Mapping[str, Any] = body["sampling_params"]
    sampler, _, number = body["request_id"].rpartition(".")
    names = ("max_tokens", "temperature", "seed", "top_k", "top_p")
    own = {name: sampling[name] for name in names if name in sampling}
    return {
        "sampling_session_id": sampler,
        "seq_id": int(number),
        "num_samples": sampling.get("n", 1),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": body["token_ids"]}]},
        "sampling_params": own | {"stop": sampling.get("stop") or sampling["stop_token_ids"]},
        "type": "sample",
    }


def choice_name(turn: str) -> str:
    """The client's name of a turn that the gateway named for an engine: the request's id, and the
    sample's number where the request has several."""
    found = _TEXT_TURN.fullmatch(turn)
    return turn if found is None else found["request"] + (found["sample"] or "")
