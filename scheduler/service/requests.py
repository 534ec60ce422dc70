"""What a job may ask for: the generate request, every field checked before anything is queued."""

import math
from typing import Literal

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import TrajectoryId
from harvester.contracts.wire.rollouts import (
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    GenerateRequest,
    SamplingParams,
)

_MAX_ID_CHARS = 200
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_STOP_TOKENS = 256


class _Sampling(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Refuses what would silently be sampled otherwise; what is always so may be said."""

    n: Literal[1] = 1
    logprobs: Literal[0, 1] | None = 1
    detokenize: Literal[False] = False


class _Request(GenerateRequest, frozen=True, kw_only=True):
    sampling_params: _Sampling


_DECODER = msgspec.json.Decoder(_Request)


def decode_generate(body: bytes) -> GenerateRequest:
    """Raises PeerProtocolError, naming the field, for anything that no engine should see."""
    try:
        request = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"generate request: {error}") from error
    if request.sampling_params.logprobs is None:
        raise PeerProtocolError("sampling_params.logprobs: log-probabilities are always returned")
    _check(request)
    return request


def checked_trajectory(given: str | None, *, request_id: str) -> TrajectoryId:
    """Session header, or the request id for a trajectory of one turn."""
    name = given or request_id
    if len(name) > _MAX_ID_CHARS or not name.isprintable():
        raise PeerProtocolError(f"X-Session-ID: use at most {_MAX_ID_CHARS} printable characters")
    return TrajectoryId(name)


def _check(request: GenerateRequest) -> None:
    sampling = request.sampling_params
    prompt, stops = request.token_ids, sampling.stop_token_ids
    rules = (
        (
            0 < len(request.request_id) <= _MAX_ID_CHARS and request.request_id.isprintable(),
            f"request_id: use 1 to {_MAX_ID_CHARS} printable characters",
        ),
        (
            0 < len(prompt) <= MAX_PROMPT_TOKENS,
            f"token_ids: {len(prompt)} tokens, 1 to {MAX_PROMPT_TOKENS} are possible",
        ),
        (_all_token_ids(prompt), f"token_ids: ids lie between 0 and {_MAX_TOKEN_ID}"),
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
        (not stops or _all_token_ids(stops), "stop_token_ids: no token id is negative"),
    )
    for holds, message in rules:
        if not holds:
            raise PeerProtocolError(message)


def _all_token_ids(token_ids: tuple[int, ...]) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) <= _MAX_TOKEN_ID)
