"""The data path between an RL job, the gateway and rollout engines: ids in, ids and log-probs out.

The shapes follow vLLM's `/inference/v1/generate`, so that a job can point at one stock engine or at
a fleet. What RoseMux adds: a version pin and, in each reply, spans that say which version, engine
and numerics made which tokens.
"""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import EngineId, WeightVersion

MAX_PROMPT_TOKENS = 1 << 20
MAX_OUTPUT_TOKENS = 1 << 17

TRAJECTORY_ARGUMENT = "rosemux_trajectory"
"""Key in vLLM's `extra_args`: the trajectory of a request's turn, so that a guest expects its
return."""


EMITTED_ARGUMENT = "rosemux_emitted_tokens"
"""Key in vLLM's `extra_args`: output of the turn so far, which an engine goes on from as its own."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class VersionPin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exact: WeightVersion | None = None
    minimum: WeightVersion | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    stream: bool = False
    weight_version: VersionPin = VersionPin()
    priority: int = 0
    model: str | None = None
    """Checked against the job's model; None names none."""


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


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...] = ()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs = Logprobs()
    finish_reason: FinishReason | None = None
    spans: tuple[Span, ...] = ()
    fault: str = ""
    """Why the turn ended early, where it was not the job's wish."""


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    choices: tuple[Choice, ...]


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
