"""Validates the generate request, every field, before anything is queued.

Each field of vLLM's generate request is honoured or refused by name. A refused field may be sent
with its neutral value, since clients send their defaults.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, get_args

import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.ids import TrajectoryId, WeightVersion, unknown_field
from harvester.contracts.wire.rollouts import (
    EMITTED_ARGUMENT,
    ENDED_ARGUMENT,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    TRAJECTORY_ARGUMENT,
    GenerateRequest,
    SamplingParams,
    VersionPin,
)

UNKNOWN_VOCABULARY_TOKENS = 1 << 19
"""Bound while no engine has reported its vocabulary: twice the largest one published."""

MAX_PIN_WAIT_S = 3600.0
MAX_SAMPLES = 1024
MAX_NUMERICS_CHARS = 256
MAX_LOGPROBS = 20
"""Candidates at each token; vLLM's own default bound."""
MAX_SCORED_IDS = 127
"""Bound of `logprob_token_ids`: vLLM's own less the id that engine_client.py adds."""
MAX_PROMPT_SCORES = 1 << 19
"""Log-probabilities of one prompt: some 40 MB of an engine's reply."""
MAX_ARGUMENTS = 64
MAX_ARGUMENTS_BYTES = 64 << 10
"""Extra arguments of a request, as JSON: they go with each of its attempts, to every process of an
engine. The largest known are lists of some thousand token ids."""
_RESERVED_ARGUMENTS = frozenset(
    (
        *(EMITTED_ARGUMENT, ENDED_ARGUMENT, TRAJECTORY_ARGUMENT),
        *("kv_transfer_params", "ec_transfer_params"),
    )
)

MAX_ID_CHARS = 200
_MAX_STOP_TOKENS = 256
_MAX_STRING_CHARS = 1024
_NEUTRAL_BYTES = 64


@dataclass(frozen=True, slots=True)
class RefusedField:
    may_be: tuple[Any, ...]
    """Values that change nothing and are taken; empty: every value."""
    instead: str


_MEDIA = "media is not routed; send a prompt of token ids alone"
_ROUTED = "the gateway chooses the engine; leave it out"
_NO_TEXT = "replies are token ids; it changes nothing"
_ONE_FORM = "log-probabilities are returned in one form; it changes nothing"
_INTERNAL = "vLLM sets it itself; leave it out"
_NOT_OFFERED = "not offered; leave it out"

REFUSED_FIELDS: Mapping[str, RefusedField] = {
    "assistant_tokens_mask": RefusedField((None,), _NOT_OFFERED),
    "content_parts": RefusedField((None, []), _MEDIA),
    "ec_transfer_params": RefusedField((None,), _ROUTED),
    "features": RefusedField((None,), _MEDIA),
    "kv_transfer_params": RefusedField((None,), _ROUTED),
    "output_mode": RefusedField(("tokens",), "replies are token ids; detokenize in the job"),
    "parse_context": RefusedField((), "replies are token ids; it changes nothing"),
    "token_offsets": RefusedField((None,), _NOT_OFFERED),
}
"""Fields of vLLM's request (0.24 to 0.33) that are not honoured."""

REFUSED_SAMPLING_FIELDS: Mapping[str, RefusedField] = {
    "detokenize": RefusedField((True, False), _NO_TEXT),
    "flat_logprobs": RefusedField((True, False), _ONE_FORM),
    "output_kind": RefusedField((0, 1, 2), "set by 'stream', so it changes nothing"),
    "output_text_buffer_length": RefusedField((0,), _INTERNAL),
    "skip_clone": RefusedField((False,), _INTERNAL),
    "spaces_between_special_tokens": RefusedField((True, False), _NO_TEXT),
    "trace_decode_token_ids": RefusedField((None,), _NOT_OFFERED),
    "watermarking": RefusedField((None, False), _NOT_OFFERED),
}
"""Fields of vLLM's sampling parameters (0.24 to 0.33) that are not honoured."""


class _Sampling(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int | None = None  # type: ignore[assignment]


class ContextSampling(_Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request came without `max_tokens`, which the context at its arrival gave."""


class _Request(GenerateRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sampling_params: _Sampling


_DECODER = msgspec.json.Decoder(_Request)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_generate(
    body: bytes, *, vocabulary_tokens: int | None = None, context_tokens: int = 0
) -> GenerateRequest:
    """Raises PeerProtocolError, naming the field, for anything that no engine should see.

    `vocabulary_tokens`: token ids lie below it; None if unknown. `context_tokens`: bound of a
    request without `max_tokens`, as in vLLM; 0 if unknown.
    """
    try:
        request = _DECODER.decode(body)
    except UNDECODABLE:
        request = _decode_without_neutral_fields(body)
    if request.sampling_params.max_tokens is None:
        request = _filling(request, context_tokens)
    _check(request, vocabulary_tokens)
    return request


def _filling(request: _Request, context_tokens: int) -> _Request:
    left = min(context_tokens - len(request.token_ids), MAX_OUTPUT_TOKENS)
    if left < 1:
        raise PeerProtocolError(
            f"max_tokens: send it; {len(request.token_ids)} tokens fill the context"
            if context_tokens
            else "max_tokens: send it; no context is known to fill"
        )
    given = msgspec.structs.asdict(request.sampling_params)
    sampling = ContextSampling(**given | {"max_tokens": left})
    return msgspec.structs.replace(request, sampling_params=sampling)


def checked_trajectory(given: str | None, *, request_id: str) -> TrajectoryId:
    """Session header, or the request id for a trajectory of one turn."""
    name = given or request_id
    if len(name) > MAX_ID_CHARS or not name.isprintable():
        raise PeerProtocolError(f"X-Session-ID: use at most {MAX_ID_CHARS} printable characters")
    return TrajectoryId(name)


def _decode_without_neutral_fields(body: bytes) -> _Request:
    try:
        fields = _FIELDS.decode(body)
        request = _kept(fields, _Request, REFUSED_FIELDS, "")
        if (raw := bytes(request.get("sampling_params", b""))).startswith(b"{"):
            given = _FIELDS.decode(raw)
            sampling = _kept(given, _Sampling, REFUSED_SAMPLING_FIELDS, "sampling_params.")
            request["sampling_params"] = msgspec.Raw(msgspec.json.encode(sampling))
        if "weight_version" in request:
            _check_pin(request["weight_version"])
        return _DECODER.decode(msgspec.json.encode(request))
    except UNDECODABLE as error:
        raise PeerProtocolError(f"generate request: {error}") from error


def _kept(
    fields: dict[str, msgspec.Raw],
    struct: type[msgspec.Struct],
    refused: Mapping[str, RefusedField],
    where: str,
) -> dict[str, msgspec.Raw]:
    """The honoured fields. Raises PeerProtocolError for a field that would silently be ignored."""
    honoured, nullable = struct.__struct_fields__, _nullable(struct)
    for name, value in fields.items():
        rule = refused.get(name)
        if rule is not None and not _is_neutral(value, rule):
            raise PeerProtocolError(f"{where}{name}: {rule.instead}")
        if rule is None and name not in honoured:
            if not where and name in _Sampling.__struct_fields__:
                raise PeerProtocolError(f"{name}: send it in sampling_params")
            raise no_such_field(name, honoured, where)
    # Null is omitted, since it is vLLM's default for every field, unless null has a meaning: no
    # log-probabilities differs from the default.
    return {
        name: value
        for name, value in fields.items()
        if name not in refused and (bytes(value) != b"null" or name in nullable)
    }


def _check_pin(value: msgspec.Raw) -> None:
    """Raises PeerProtocolError if the pin is no object or has an unknown field."""
    pin = msgspec.json.decode(value)
    if not isinstance(pin, dict):
        # A number alone is not taken: it may be meant as the least version too.
        number = pin if str(pin).isdecimal() and len(str(pin)) < 20 else "N"
        given = bytes(value)[:_NEUTRAL_BYTES].decode(errors="replace")
        raise PeerProtocolError(
            f'weight_version: {given} is no object; send {{"exact": {number}}} for this version '
            f'alone, {{"minimum": {number}}} for it and newer ones'
        )
    for name in pin:
        if name not in VersionPin.__struct_fields__:
            raise no_such_field(name, VersionPin.__struct_fields__, "weight_version.")


@cache
def _nullable(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields that may be null."""
    fields = msgspec.structs.fields(struct)
    return frozenset(each.name for each in fields if NoneType in get_args(each.type))


def no_such_field(name: str, offered: Collection[str], where: str = "") -> PeerProtocolError:
    """The error for a field that is not read, with the nearest name of a field that is."""
    return PeerProtocolError(f"{where}{name[:MAX_ID_CHARS]}: {unknown_field(name, offered)}")


def _is_neutral(value: msgspec.Raw, rule: RefusedField) -> bool:
    if not rule.may_be:
        return True
    if len(bytes(value)) > _NEUTRAL_BYTES:
        return False
    given = msgspec.json.decode(value)
    # JSON's true is not 1.
    return any(
        given == taken and isinstance(given, bool) == isinstance(taken, bool)
        for taken in rule.may_be
    )


_INT64 = (1 << 63) - 1
_POSITIVE = math.ulp(0.0)
_SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, MAX_OUTPUT_TOKENS),
    "min_tokens": (0, MAX_OUTPUT_TOKENS),
    "n": (1, MAX_SAMPLES),
    "temperature": (0, 100),
    "top_p": (_POSITIVE, 1),
    "top_k": (-1, (1 << 31) - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (_POSITIVE, 1 << 31),
    "seed": (0, _INT64),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprob_start": (0, MAX_PROMPT_TOKENS),
    "routed_experts_prompt_start": (0, MAX_PROMPT_TOKENS),
    "stream_interval": (1, MAX_OUTPUT_TOKENS),
}
_VERSIONS = ("exact", "exact_version", "minimum", "min_version", "max_lag")
_RANGES: Mapping[str, tuple[float, float]] = {
    "priority": (-_INT64 - 1, _INT64),
    **{f"weight_version.{name}": (0, _INT64) for name in _VERSIONS},
    "weight_version.wait_s": (0, MAX_PIN_WAIT_S),
    **{f"sampling_params.{name}": each for name, each in _SAMPLING_RANGES.items()},
}
"""Least and most of each number; null is left to the field's type."""
_NUMBERS = attrgetter(*_RANGES)


def _check(request: GenerateRequest, vocabulary_tokens: int | None) -> None:
    for (name, (least, most)), value in zip(_RANGES.items(), _NUMBERS(request), strict=True):
        if value is not None and not least <= value <= most:
            low = "above 0 and at most" if least == _POSITIVE else f"between {least:g} and"
            raise PeerProtocolError(f"{name}: {low} {most:g}, not {value}")
    if broken := next(_broken_rules(request, vocabulary_tokens), ""):
        raise PeerProtocolError(broken)


def _broken_rules(request: GenerateRequest, vocabulary_tokens: int | None) -> Iterator[str]:
    sampling, pin = request.sampling_params, request.weight_version
    prompt, numerics = request.token_ids, request.equal_numerics
    bound = vocabulary_tokens or UNKNOWN_VOCABULARY_TOKENS
    unknown = "" if vocabulary_tokens else " (no engine has reported its vocabulary yet)"
    ids = f"ids lie between 0 and {bound - 1}{unknown}, not {{}}"
    if len(request.request_id) > MAX_ID_CHARS or not request.request_id.isprintable():
        yield f"request_id: use at most {MAX_ID_CHARS} printable characters"
    if not 0 < len(prompt) <= MAX_PROMPT_TOKENS:
        yield f"token_ids: {len(prompt)} tokens, 1 to {MAX_PROMPT_TOKENS} are possible"
    if (wrong := _not_below(bound, prompt)) is not None:
        yield f"token_ids: {ids.format(wrong)}"
    if sampling.min_tokens > sampling.max_tokens:
        yield "min_tokens: between 0 and max_tokens"
    texts = (*stop_strings(sampling), *(sampling.bad_words or ()))
    if len(texts) > _MAX_STOP_TOKENS or not all(0 < len(t) <= _MAX_STRING_CHARS for t in texts):
        yield f"stop, bad_words: at most {_MAX_STOP_TOKENS}, of 1 to {_MAX_STRING_CHARS} characters"
    if max(len(sampling.logit_bias or ()), len(sampling.allowed_token_ids or ())) > bound:
        yield "logit_bias, allowed_token_ids: more ids than the vocabulary has"
    if _RESERVED_ARGUMENTS.intersection(sampling.extra_args or {}):
        yield f"extra_args: {', '.join(sorted(_RESERVED_ARGUMENTS))} are the gateway's own"
    if (arguments := sampling.extra_args) and (
        len(arguments) > MAX_ARGUMENTS or len(msgspec.json.encode(arguments)) > MAX_ARGUMENTS_BYTES
    ):
        yield f"extra_args: at most {MAX_ARGUMENTS}, of {MAX_ARGUMENTS_BYTES} bytes together"
    for name, given, most in (
        ("stop_token_ids", sampling.stop_token_ids, _MAX_STOP_TOKENS),
        ("logprob_token_ids", sampling.logprob_token_ids or (), MAX_SCORED_IDS),
    ):
        if len(given) > most:
            yield f"{name}: at most {most} ids, not {len(given)}"
        if (wrong := _not_below(bound, given)) is not None:
            yield f"{name}: {ids.format(wrong)}"
    if sampling.scores_prompt:
        scores = sampling.scores_of(len(prompt))
        if scores > MAX_PROMPT_SCORES:
            yield f"prompt_logprobs: {scores} values, at most {MAX_PROMPT_SCORES} are possible"
    if sampling.routed_experts_prompt_start > len(prompt):
        yield "routed_experts_prompt_start: at most the prompt's length"
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= 1024:
        yield "cache_salt: 1 to 1024 characters"
    if pin.exact is not None and pin.exact_version not in (None, pin.exact):
        yield "weight_version: exact and exact_version differ; send one"
    resolved = pin.resolved(WeightVersion(0))
    if resolved.exact is not None and not resolved.admits(resolved.exact):
        yield f"weight_version: exact {resolved.exact} is older than minimum {resolved.minimum}"
    if pin.max_lag is not None and resolved.exact is not None:
        yield "weight_version: max_lag goes with no exact version; send one"
    if not isinstance(numerics, bool) and not 0 < len(numerics) <= MAX_NUMERICS_CHARS:
        yield f"equal_numerics: true, false, or a label of 1 to {MAX_NUMERICS_CHARS} characters"


def stop_strings(sampling: SamplingParams) -> tuple[str, ...]:
    return (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop or ()


def _not_below(bound: int, token_ids: tuple[int, ...]) -> int | None:
    """A token id that is none of 0 to `bound` - 1."""
    extremes = (min(token_ids), max(token_ids)) if token_ids else ()
    return next((each for each in extremes if not 0 <= each < bound), None)
