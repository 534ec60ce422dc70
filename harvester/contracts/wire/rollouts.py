"""The data path between an RL job, the gateway and rollout engines: ids in, ids and log-probs out.

The shapes follow vLLM's `/inference/v1/generate`, so that a job can point at one stock engine or at
a fleet. What RoseMux adds: a version pin and, in each reply, spans that say which version, engine
and numerics made which tokens.
"""

from enum import StrEnum
from typing import Any

import msgspec

from harvester.contracts.ids import EngineId, WeightVersion

MAX_PROMPT_TOKENS = 1 << 20
MAX_OUTPUT_TOKENS = 1 << 17

TRAJECTORY_ARGUMENT = "rosemux_trajectory"
"""Key in vLLM's `extra_args`: the trajectory of a request's turn, so that a guest expects its
return."""


EMITTED_ARGUMENT = "rosemux_emitted_tokens"
"""Key in vLLM's `extra_args`: the turn's output so far, from which an engine goes on."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names, meanings and defaults are vLLM's; left out is its default, but for the
    log-probabilities, which every reply has."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    """Samples of the prompt, each a turn of its own."""
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    stop: tuple[str, ...] | str | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = 1
    """Candidates at each token, beside the sampled one."""
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    """Applies to the text in which the engine looks for stop strings."""
    extra_args: dict[str, Any] | None = None
    """vLLM's `vllm_xargs`, for its plugins."""


class VersionPin(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    exact: WeightVersion | None = None
    minimum: WeightVersion | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str
    token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    stream: bool = False
    weight_version: VersionPin = VersionPin()
    priority: int = 0
    model: str | None = None
    """Checked against the job's model; None names none."""
    cache_salt: str | None = None
    """Prefixes are shared between turns of one salt only, within job and version."""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Both as vLLM's renderer gives them: where a grammar begins beside a reasoning parser."""
    return_token_ids: bool | None = None
    """Send the prompt's ids back."""
    stream_options: dict[str, Any] | None = None
    """`include_usage`: the stream ends with a chunk that has `usage` and no choice."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start` to `end` (exclusive) of the output came from this version and engine."""

    start: int
    end: int
    version: WeightVersion
    engine: EngineId
    numerics: str


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    token_id: int
    logprob: float
    top_logprobs: tuple["TokenLogprob", ...] = ()
    """Candidates, the sampled token first, where more than one was asked for."""


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...] = ()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs = Logprobs()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or string that ended it; None on EOS and on any other end."""
    spans: tuple[Span, ...] = ()
    fault: str = ""
    """Why the turn ended early, where it was not the job's wish."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str
    choices: tuple[Choice, ...]
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class PublishedVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: WeightVersion
    store: str
    cut_open_turns: bool = False
    """End turns that are pinned to exactly the version before, with partial output, instead of
    waiting for them. Turns whose pin admits the new version go on at it either way."""


class SwitchState(StrEnum):
    SWITCHED = "switched"
    CATCHING_UP = "catching_up"


class VersionSwitched(msgspec.Struct, frozen=True, kw_only=True):
    version: WeightVersion
    engines: dict[EngineId, SwitchState]
