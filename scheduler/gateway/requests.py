"""Validates the generate request, every field, before anything is queued.

Each field of vLLM's generate request is honoured or refused by name. A refused field may be sent
with its neutral value, since clients send their defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import TrajectoryId
from harvester.contracts.wire.rollouts import (
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    GenerateRequest,
    SamplingParams,
)

UNKNOWN_VOCABULARY_TOKENS = 1 << 19
"""Bound while no engine has reported its vocabulary: twice the largest one published."""

_MAX_ID_CHARS = 200
_MAX_STOP_TOKENS = 256
_NEUTRAL_BYTES = 64


@dataclass(frozen=True, slots=True)
class RefusedField:
    may_be: tuple[Any, ...]
    """Values that change nothing and are taken."""
    instead: str


_MEDIA = "media is not routed; send a prompt of token ids alone"
_ROUTED = "the gateway chooses the engine; leave it out"
_NO_TEXT = "no text is made, so it changes nothing"
_CONTINUED = "a turn that goes on elsewhere would count from there; leave it out"
_ONLY_SAMPLED = "only the sampled tokens' log-probabilities are returned; leave it out"
_INTERNAL = "vLLM sets it itself; leave it out"
_NOT_OFFERED = "not offered; leave it out"

REFUSED_FIELDS: Mapping[str, RefusedField] = {
    "assistant_tokens_mask": RefusedField((None,), _NOT_OFFERED),
    "cache_salt": RefusedField((None,), "the gateway salts by job, version and adapter itself"),
    "content_parts": RefusedField((None, []), _MEDIA),
    "ec_transfer_params": RefusedField((None,), _ROUTED),
    "features": RefusedField((None,), _MEDIA),
    "kv_transfer_params": RefusedField((None,), _ROUTED),
    "output_mode": RefusedField(("tokens",), "replies are token ids; detokenize in the job"),
    "reasoning_ended": RefusedField((None,), _NOT_OFFERED),
    "reasoning_parser_kwargs": RefusedField((None,), _NOT_OFFERED),
    "return_token_ids": RefusedField((None, False), "the prompt is not sent back; leave it out"),
    "stream_options": RefusedField((None,), "usage is not reported; count token_ids"),
    "token_offsets": RefusedField((None,), _NOT_OFFERED),
}
"""Fields of vLLM's request (0.24 to 0.32) that are not honoured."""

REFUSED_SAMPLING_FIELDS: Mapping[str, RefusedField] = {
    "allowed_token_ids": RefusedField((None, []), _NOT_OFFERED),
    "bad_words": RefusedField((None, []), _NOT_OFFERED),
    "detokenize": RefusedField((False,), "replies are token ids; detokenize in the job"),
    "extra_args": RefusedField((None, {}), _NOT_OFFERED),
    "flat_logprobs": RefusedField((False,), _ONLY_SAMPLED),
    "frequency_penalty": RefusedField((0,), _CONTINUED),
    "ignore_eos": RefusedField((False,), "EOS ends a turn; leave it out"),
    "include_stop_str_in_output": RefusedField((False, True), _NO_TEXT),
    "logit_bias": RefusedField((None, {}), _NOT_OFFERED),
    "logprob_token_ids": RefusedField((None, []), _ONLY_SAMPLED),
    "logprobs": RefusedField((0, 1), _ONLY_SAMPLED),
    "min_p": RefusedField((0,), "not offered; use top_p"),
    "min_tokens": RefusedField((0,), _CONTINUED),
    "n": RefusedField((1,), "send one request for each sample"),
    "output_kind": RefusedField((0, 1, 2), "set by 'stream', so it changes nothing"),
    "output_text_buffer_length": RefusedField((0,), _INTERNAL),
    "presence_penalty": RefusedField((0,), _CONTINUED),
    "prompt_logprob_start": RefusedField((None,), _ONLY_SAMPLED),
    "prompt_logprob_token_ids": RefusedField((None,), _ONLY_SAMPLED),
    "prompt_logprobs": RefusedField((None,), _ONLY_SAMPLED),
    "repetition_detection": RefusedField((None,), _NOT_OFFERED),
    "repetition_penalty": RefusedField((1,), _CONTINUED),
    "routed_experts_prompt_start": RefusedField((0,), _NOT_OFFERED),
    "skip_clone": RefusedField((False,), _INTERNAL),
    "skip_reading_prefix_cache": RefusedField((None, False), _ROUTED),
    "skip_special_tokens": RefusedField((True, False), _NO_TEXT),
    "spaces_between_special_tokens": RefusedField((True, False), _NO_TEXT),
    "stop": RefusedField((None, []), "no text is made; use stop_token_ids"),
    "stream_interval": RefusedField((None, 1), "every token is passed on as it comes"),
    "structured_outputs": RefusedField((None,), _NOT_OFFERED),
    "thinking_token_budget": RefusedField((None,), _CONTINUED),
    "top_k": RefusedField((0, -1), "not offered; use top_p"),
    "trace_decode_token_ids": RefusedField((None,), _NOT_OFFERED),
    "watermarking": RefusedField((None, False), _NOT_OFFERED),
}
"""Fields of vLLM's sampling parameters (0.24 to 0.32) that are not honoured."""


class _Sampling(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters with one fixed value may be sent with that value."""

    n: Literal[1] = 1
    logprobs: Literal[0, 1] = 1
    detokenize: Literal[False] = False


class _Request(GenerateRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sampling_params: _Sampling


_DECODER = msgspec.json.Decoder(_Request)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_generate(body: bytes, *, vocabulary_tokens: int | None = None) -> GenerateRequest:
    """Raises PeerProtocolError, naming the field, for anything that no engine should see.

    `vocabulary_tokens`: token ids lie below it; None while it is not known.
    """
    try:
        request = _DECODER.decode(body)
    except msgspec.MsgspecError:
        request = _decode_without_neutral_fields(body)
    _check(request, vocabulary_tokens)
    return request


def checked_trajectory(given: str | None, *, request_id: str) -> TrajectoryId:
    """Session header, or the request id for a trajectory of one turn."""
    name = given or request_id
    if len(name) > _MAX_ID_CHARS or not name.isprintable():
        raise PeerProtocolError(f"X-Session-ID: use at most {_MAX_ID_CHARS} printable characters")
    return TrajectoryId(name)


def _decode_without_neutral_fields(body: bytes) -> _Request:
    try:
        fields = _FIELDS.decode(body)
        request = _kept(fields, _Request, REFUSED_FIELDS, "")
        if "sampling_params" in request:
            given = _FIELDS.decode(request["sampling_params"])
            sampling = _kept(given, _Sampling, REFUSED_SAMPLING_FIELDS, "sampling_params.")
            request["sampling_params"] = msgspec.Raw(msgspec.json.encode(sampling))
        return _DECODER.decode(msgspec.json.encode(request))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerProtocolError(f"generate request: {error}") from error


def _kept(
    fields: dict[str, msgspec.Raw],
    struct: type[msgspec.Struct],
    refused: Mapping[str, RefusedField],
    where: str,
) -> dict[str, msgspec.Raw]:
    """The honoured fields. Raises PeerProtocolError for one that would silently be ignored."""
    honoured = struct.__struct_fields__
    for name, value in fields.items():
        rule = refused.get(name)
        if rule is not None and not _is_neutral(value, rule):
            raise PeerProtocolError(f"{where}{name}: {rule.instead}")
        if rule is None and name not in honoured:
            near = get_close_matches(name[:_MAX_ID_CHARS], honoured, n=1)
            known = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise PeerProtocolError(f"{where}{name[:_MAX_ID_CHARS]}: no such field; {known}")
    return {name: value for name, value in fields.items() if name not in refused}


def _is_neutral(value: msgspec.Raw, rule: RefusedField) -> bool:
    if len(bytes(value)) > _NEUTRAL_BYTES:
        return False
    given = msgspec.json.decode(value)
    # JSON's true is not 1.
    return any(
        given == taken and isinstance(given, bool) == isinstance(taken, bool)
        for taken in rule.may_be
    )


def _check(request: GenerateRequest, vocabulary_tokens: int | None) -> None:
    sampling, pin = request.sampling_params, request.weight_version
    prompt, stops = request.token_ids, sampling.stop_token_ids
    bound = vocabulary_tokens or UNKNOWN_VOCABULARY_TOKENS
    ids = f"ids lie between 0 and {bound - 1}"
    if not vocabulary_tokens:
        ids += " (no engine has reported its vocabulary yet)"
    rules = (
        (
            0 < len(request.request_id) <= _MAX_ID_CHARS and request.request_id.isprintable(),
            f"request_id: use 1 to {_MAX_ID_CHARS} printable characters",
        ),
        (
            0 < len(prompt) <= MAX_PROMPT_TOKENS,
            f"token_ids: {len(prompt)} tokens, 1 to {MAX_PROMPT_TOKENS} are possible",
        ),
        (_all_below(bound, prompt), f"token_ids: {ids}"),
        (
            0 < sampling.max_tokens <= MAX_OUTPUT_TOKENS,
            f"max_tokens: {sampling.max_tokens}, 1 to {MAX_OUTPUT_TOKENS} are possible",
        ),
        (
            math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 100,
            "temperature: between 0 and 100",
        ),
        (0 < sampling.top_p <= 1, "top_p: above 0 and at most 1"),
        (
            sampling.seed is None or 0 <= sampling.seed < 1 << 63,
            "seed: null, or between 0 and 2^63 - 1",
        ),
        (len(stops) <= _MAX_STOP_TOKENS, f"stop_token_ids: at most {_MAX_STOP_TOKENS}"),
        (_all_below(bound, stops), f"stop_token_ids: {ids}"),
        (-(1 << 63) <= request.priority < 1 << 63, "priority: between -2^63 and 2^63 - 1"),
        (
            all(version is None or version >= 0 for version in (pin.exact, pin.minimum)),
            "weight_version: versions are not negative",
        ),
        (
            pin.exact is None or pin.minimum is None or pin.exact >= pin.minimum,
            f"weight_version: exact {pin.exact} is older than minimum {pin.minimum}; send one",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise PeerProtocolError(message)


def _all_below(bound: int, token_ids: tuple[int, ...]) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < bound)
