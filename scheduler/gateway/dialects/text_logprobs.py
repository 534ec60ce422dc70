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
_ANOTHER_PROMPT = "the engine's scores belong to another prompt"
MOST_LIKELIEST = MAX_LOGPROBS - 1
_NAMED_AT_ONCE = 32
"""Tokens of a choice that are named in one piece: with 128 candidates each, about 4 ms."""


def renderer_logprob(logprob: TokenLogprob) -> Body:
    """A log-probability for renderers: vLLM 0.32 reads `token_id`, older versions read `token`."""
    return {
        "token_id": logprob.token_id,
        "token": token_name(logprob),
        "logprob": logprob.logprob,
        "top_logprobs": [renderer_logprob(each) for each in logprob.top_logprobs],
    }


async def prompt_logprobs(scores: Body, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Each prompt token's log-probability with its candidates, of `Samples.prompt_scores`; the
    first token has none. Raises Exhausted where an engine scored another prompt."""
    try:
        rows = msgspec.json.decode(scores["prompt_logprobs"], type=list[msgspec.Raw])
        scored = await in_shares(map(_of_prompt, token_ids[1:], rows[1:]))
    except UNDECODABLE as error:
        raise Exhausted(f"cannot read the engine's scores of the prompt: {error}") from error
    if len(rows) != len(token_ids):
        raise Exhausted(_ANOTHER_PROMPT)
    return [TokenLogprob(token_ids[0], NO_LOGPROB), *scored]


def _of_prompt(token_id: int, row: msgspec.Raw) -> TokenLogprob:
    scores = _PROMPT_LOGPROBS.decode(row) or {}
    if token_id not in scores:
        raise Exhausted(_ANOTHER_PROMPT)
    candidates = tuple(TokenLogprob(each, scores[each].logprob) for each in scores)
    return TokenLogprob(token_id, scores[token_id].logprob, candidates)


def likeliest(logprob: TokenLogprob, count: int) -> list[TokenLogprob]:
    """The likeliest of a token's candidates; of a sampled one's there is one more than `count`."""
    return sorted(logprob.top_logprobs, key=lambda each: -each.logprob)[:count]


def token_name(logprob: TokenLogprob) -> str:
    """The token's text with vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{logprob.token_id}"


async def named_in_parts(choice: Choice) -> Choice:
    """The choice with a name for each token, which clients of vLLM before 0.32 compare with the id;
    a long one is named in parts: other tasks get the event loop."""
    entries: Iterable[Any] = map(_named, choice.logprobs.content)
    if len(choice.token_ids) > _NAMED_AT_ONCE:
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
