"""Validates the generate request, every field, before anything is queued.

Each field of vLLM's generate request is honoured or refused by name. A refused field may be sent
with its neutral value, since clients send their defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import TrajectoryId
from harvester.contracts.wire.rollouts import (
    EMITTED_ARGUMENT,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    TRAJECTORY_ARGUMENT,
    GenerateRequest,
    SamplingParams,
)

UNKNOWN_VOCABULARY_TOKENS = 1 << 19
"""Bound while no engine has reported its vocabulary: twice the largest one published."""

MAX_SAMPLES = 1024
MAX_LOGPROBS = 20
"""Candidates at each token; vLLM's own default bound."""
_RESERVED_ARGUMENTS = frozenset(
    (EMITTED_ARGUMENT, TRAJECTORY_ARGUMENT, "kv_transfer_params", "ec_transfer_params")
)

_MAX_ID_CHARS = 200
_MAX_STOP_TOKENS = 256
_MAX_STRING_CHARS = 1024
_NEUTRAL_BYTES = 64


@dataclass(frozen=True, slots=True)
class RefusedField:
    may_be: tuple[Any, ...]
    """Values that change nothing and are taken."""
    instead: str


_MEDIA = "media is not routed; send a prompt of token ids alone"
_ROUTED = "the gateway chooses the engine; leave it out"
_NO_TEXT = "replies are token ids; it changes nothing"
_ONLY_SAMPLED = "only the sampled tokens' log-probabilities are returned; leave it out"
_INTERNAL = "vLLM sets it itself; leave it out"
_NOT_OFFERED = "not offered; leave it out"

REFUSED_FIELDS: Mapping[str, RefusedField] = {
    "assistant_tokens_mask": RefusedField((None,), _NOT_OFFERED),
    "content_parts": RefusedField((None, []), _MEDIA),
    "ec_transfer_params": RefusedField((None,), _ROUTED),
    "features": RefusedField((None,), _MEDIA),
    "kv_transfer_params": RefusedField((None,), _ROUTED),
    "output_mode": RefusedField(("tokens",), "replies are token ids; detokenize in the job"),
    "token_offsets": RefusedField((None,), _NOT_OFFERED),
}
"""Fields of vLLM's request (0.24 to 0.32) that are not honoured."""

REFUSED_SAMPLING_FIELDS: Mapping[str, RefusedField] = {
    "detokenize": RefusedField((True, False), _NO_TEXT),
    "flat_logprobs": RefusedField((False,), _ONLY_SAMPLED),
    "logprob_token_ids": RefusedField((None, []), _ONLY_SAMPLED),
    "output_kind": RefusedField((0, 1, 2), "set by 'stream', so it changes nothing"),
    "output_text_buffer_length": RefusedField((0,), _INTERNAL),
    "prompt_logprob_start": RefusedField((None,), _ONLY_SAMPLED),
    "prompt_logprob_token_ids": RefusedField((None,), _ONLY_SAMPLED),
    "prompt_logprobs": RefusedField((None,), _ONLY_SAMPLED),
    "routed_experts_prompt_start": RefusedField((0,), _NOT_OFFERED),
    "skip_clone": RefusedField((False,), _INTERNAL),
    "skip_reading_prefix_cache": RefusedField((None, False), _ROUTED),
    "spaces_between_special_tokens": RefusedField((True, False), _NO_TEXT),
    "stream_interval": RefusedField((None, 1), "every token is passed on as it comes"),
    "trace_decode_token_ids": RefusedField((None,), _NOT_OFFERED),
    "watermarking": RefusedField((None, False), _NOT_OFFERED),
}
"""Fields of vLLM's sampling parameters (0.24 to 0.32) that are not honoured."""


class _Sampling(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


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
    except (msgspec.MsgspecError, RecursionError):
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
        (-1 <= sampling.top_k < 1 << 31, "top_k: 0 or -1 for all, or a number of tokens"),
        (0 <= sampling.min_p <= 1, "min_p: between 0 and 1"),
        *(
            (-2 <= value <= 2, f"{name}: between -2 and 2")
            for name, value in (
                ("presence_penalty", sampling.presence_penalty),
                ("frequency_penalty", sampling.frequency_penalty),
            )
        ),
        (
            math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
            "repetition_penalty: above 0",
        ),
        (1 <= sampling.n <= MAX_SAMPLES, f"n: between 1 and {MAX_SAMPLES}"),
        (
            0 <= sampling.min_tokens <= sampling.max_tokens,
            "min_tokens: between 0 and max_tokens",
        ),
        (
            sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS,
            f"logprobs: between 0 and {MAX_LOGPROBS}",
        ),
        (
            len(stop_strings(sampling)) <= _MAX_STOP_TOKENS and all(stop_strings(sampling)),
            f"stop: at most {_MAX_STOP_TOKENS} strings, none of them empty",
        ),
        (
            _short_texts(stop_strings(sampling)) and _short_texts(sampling.bad_words or ()),
            f"stop, bad_words: at most {_MAX_STOP_TOKENS} texts of {_MAX_STRING_CHARS} characters",
        ),
        (
            len(sampling.logit_bias or ()) <= bound
            and len(sampling.allowed_token_ids or ()) <= bound,
            "logit_bias, allowed_token_ids: more ids than the vocabulary has",
        ),
        (
            not _RESERVED_ARGUMENTS.intersection(sampling.extra_args or {}),
            f"extra_args: {', '.join(sorted(_RESERVED_ARGUMENTS))} are the gateway's own",
        ),
        (
            sampling.seed is None or 0 <= sampling.seed < 1 << 63,
            "seed: null, or between 0 and 2^63 - 1",
        ),
        (len(stops) <= _MAX_STOP_TOKENS, f"stop_token_ids: at most {_MAX_STOP_TOKENS}"),
        (_all_below(bound, stops), f"stop_token_ids: {ids}"),
        (
            request.cache_salt is None or 0 < len(request.cache_salt) <= 1024,
            "cache_salt: 1 to 1024 characters",
        ),
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


def stop_strings(sampling: SamplingParams) -> tuple[str, ...]:
    return (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop or ()


def _short_texts(texts: tuple[str, ...]) -> bool:
    return len(texts) <= _MAX_STOP_TOKENS and all(len(text) <= _MAX_STRING_CHARS for text in texts)


def _all_below(bound: int, token_ids: tuple[int, ...]) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < bound)
