"""Log-probabilities in the forms of text dialects: of renderers, by ids, of prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from harvester.contracts.errors import UNDECODABLE, Exhausted
from harvester.contracts.wire.rollouts import Choice, Logprobs, TokenLogprob
from scheduler.gateway.dialects.renderer import RendererFault
from scheduler.gateway.dialects.text_dialect import Body
from scheduler.gateway.engines.engine_output import NO_LOGPROB
from scheduler.gateway.loop_share import in_shares
from scheduler.gateway.requests import MAX_LOGPROBS


class PromptLogprob(msgspec.Struct):
    logprob: float


_PROMPT_LOGPROBS = msgspec.json.Decoder(dict[int, PromptLogprob] | None)
"""Decodes one token's log-probabilities: all of a long prompt take a second."""
_ENCODER = msgspec.json.Encoder()
MOST_LIKELIEST = MAX_LOGPROBS - 1
NAMED_AT_ONCE = 32
"""Tokens of a choice that are named in one piece: with 128 candidates each, about 4 ms."""


def renderer_logprob(logprob: TokenLogprob) -> Body:
    """A log-probability for renderers: vLLM 0.32 reads `token_id`, older versions read `token`."""
    return {
        "token_id": logprob.token_id,
        "token": token_name(logprob),
        "logprob": logprob.logprob,
        "top_logprobs": [renderer_logprob(each) for each in logprob.top_logprobs],
    }


async def prompt_logprobs(
    scores: Body, token_ids: Sequence[int]
) -> list[dict[int, PromptLogprob] | None]:
    """Each prompt token's log-probabilities by token id, of `Samples.prompt_scores`; the first
    token has none. Raises Exhausted where an engine scored another prompt."""
    try:
        rows = msgspec.json.decode(scores["prompt_logprobs"], type=list[msgspec.Raw])
        scored = await in_shares(map(_PROMPT_LOGPROBS.decode, rows))
    except UNDECODABLE as error:
        raise Exhausted(f"cannot read the engine's scores of the prompt: {error}") from error
    pairs = zip(token_ids[1:], scored[1:], strict=False)
    if len(scored) != len(token_ids) or any(one not in (each or ()) for one, each in pairs):
        raise Exhausted("the engine's scores belong to another prompt")
    return scored


def of_prompt(token_id: int, scores: dict[int, PromptLogprob] | None) -> TokenLogprob:
    """The log-probability of a prompt token in the form of a sampled token's."""
    if scores is None:
        return TokenLogprob(token_id, NO_LOGPROB)
    candidates = [TokenLogprob(each, scores[each].logprob) for each in scores]
    return TokenLogprob(token_id, scores[token_id].logprob, tuple(candidates))


def likeliest(logprob: TokenLogprob, count: int) -> list[TokenLogprob]:
    """The likeliest of a sampled token's candidates, of which it has one more than `count`."""
    return sorted(logprob.top_logprobs, key=lambda each: -each.logprob)[:count]


def likeliest_of_prompt(
    scores: dict[int, PromptLogprob] | None, count: int
) -> list[tuple[int, float]]:
    """The likeliest candidates of a prompt's token, each with its log-probability."""
    ranked = sorted((scores or {}).items(), key=lambda item: -item[1].logprob)
    return [(token_id, each.logprob) for token_id, each in ranked[:count]]


def token_name(logprob: TokenLogprob) -> str:
    """The token's text with vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{logprob.token_id}"


def named(choice: Choice) -> Choice:
    """The choice with a name for each token; clients of vLLM before 0.32 compare it with the id."""
    content = tuple(map(_named, choice.logprobs.content))
    return msgspec.structs.replace(choice, logprobs=Logprobs(content))


async def named_in_parts(choice: Choice) -> Choice:
    """Does what `named` does, in parts for a long choice: other tasks get the event loop."""
    if len(choice.token_ids) <= NAMED_AT_ONCE:
        return named(choice)
    entries: Iterable[Any] = map(_named, choice.logprobs.content)
    entries = await in_shares(msgspec.Raw(_ENCODER.encode(each)) for each in entries)
    return msgspec.structs.replace(choice, logprobs=Logprobs(tuple(entries)))


def _named(logprob: TokenLogprob) -> TokenLogprob:
    candidates = tuple(map(_named, logprob.top_logprobs))
    return TokenLogprob(logprob.token_id, logprob.logprob, candidates, token_name(logprob))


def name_by_id(logprobs: Body, content: Sequence[TokenLogprob]) -> None:
    """Replaces texts by ids in a reply's log-probabilities: vLLM's renderer decodes tokens whatever
    the request says."""
    if "tokens" in logprobs:
        logprobs["tokens"] = [token_name(each) for each in content]
        logprobs["top_logprobs"] = [
            {token_name(one): one.logprob for one in each.top_logprobs} or None for each in content
        ]
        return
    try:
        for entry, each in zip(logprobs["content"] or (), content, strict=True):
            entry["token"] = token_name(each)
            for candidate, one in zip(entry["top_logprobs"], each.top_logprobs, strict=True):
                candidate["token"] = token_name(one)
    except ValueError as error:
        raise RendererFault(f"a renderer's log-probabilities: {error}") from error
