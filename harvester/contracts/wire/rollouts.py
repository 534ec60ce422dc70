"""The data path between an RL job, the gateway and rollout engines: ids in, ids and log-probs out.

The shapes follow vLLM's `/inference/v1/generate`, so that a job can point at one stock engine or at
a fleet. RoseMux adds a version pin and, in each reply, spans that say which version, engine and
numerics made which tokens.
"""

from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec

from harvester.contracts.ids import EngineId, WeightVersion

GENERATE_ROUTE = "/inference/v1/generate"
"""vLLM's token route, at engines, engine proxies and the gateway."""
MAX_PROMPT_TOKENS = 1 << 20
MAX_OUTPUT_TOKENS = 1 << 17

TRAJECTORY_ARGUMENT = "rosemux_trajectory"
"""Key in vLLM's `extra_args`: the trajectory of a request's turn, so that a guest expects its
return."""


ENDED_ARGUMENT = "rosemux_ended_trajectories"
"""Key in vLLM's `extra_args`: trajectories whose end was reported since the engine's last request;
a guest keeps their prefixes no longer."""

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
    """Number of samples of the prompt; each is a separate turn."""
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
    prompt_logprobs: int | None = None
    """Candidates at each token of the prompt, beside the prompt's own."""
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    """The candidates at each token, in place of the likeliest."""
    routed_experts_prompt_start: int = 0
    """Prompt tokens whose routing is not returned."""
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None
    """Least tokens of each streamed event but the first and the last."""
    extra_args: dict[str, Any] | None = None
    """vLLM's `vllm_xargs`, for its plugins."""

    @property
    def lists_candidates(self) -> bool:
        """Whether it asks for log-probabilities of other tokens than the sampled ones."""
        return bool(self.logprob_token_ids) or (self.logprobs or 0) > 1

    @property
    def lists_logprobs(self) -> bool:
        """Whether it asks for any, where a dialect may ask for none."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether it asks for log-probabilities of the prompt."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def scores_of(self, prompt_tokens: int) -> int:
        """Log-probabilities of a prompt that are returned, if it `scores_prompt`."""
        rows = self.prompt_logprob_token_ids or ()
        return prompt_tokens * (1 + (self.prompt_logprobs or 0)) + sum(map(len, rows))


class VersionPin(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    exact: WeightVersion | None = None
    minimum: WeightVersion | None = None
    max_lag: int | None = None
    """Versions behind the newest published one, at the turn's arrival."""
    wait_s: float | None = None
    """Longest wait for a version that is not served yet, in s; None: the gateway's."""
    exact_version: WeightVersion | None = None
    min_version: WeightVersion | None = None
    """The names in slime's, miles' and stitch's requests for `exact` and `minimum`."""

    def resolved(self, newest: WeightVersion) -> "VersionPin":
        """The pin in `exact` and `minimum` alone, for a turn that arrives while `newest` is the
        job's newest published version."""
        lag = None if self.max_lag is None else max(0, newest - self.max_lag)
        least = [each for each in (self.minimum, self.min_version, lag) if each is not None]
        return VersionPin(
            exact=self.exact_version if self.exact is None else self.exact,
            minimum=WeightVersion(max(least)) if least else None,
        )

    def admits(self, version: WeightVersion) -> bool:
        """Whether the resolved pin permits the version."""
        return self.exact in (None, version) and version >= (self.minimum or 0)


class OnInterrupt(StrEnum):
    """Rule for a turn that has tokens and loses its engine."""

    CONTINUE = "continue"
    RETURN_PARTIAL = "return_partial"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str = ""
    """Left out, the gateway gives one, and a repetition is another turn."""
    token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    stream: bool = False
    weight_version: VersionPin = VersionPin()
    equal_numerics: bool | str = False
    """All tokens by engines of one numerics label: the first engine's, or this one."""
    priority: int = 0
    model: str | None = None
    """Model name, checked against the job's model; None: no check."""
    cache_salt: str | None = None
    """Prefixes are shared between turns of one salt only, within job and version."""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Fields of vLLM's renderer: where a grammar begins beside a reasoning parser."""
    return_token_ids: bool | None = None
    """Send the prompt's ids back."""
    stream_options: dict[str, Any] | None = None
    """`include_usage`: the stream ends with a chunk that has `usage` and no choice."""
    on_interrupt: OnInterrupt | None = None
    """Overrides the job's setting; None uses the job's setting."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPETITION = "repetition"
    """vLLM's `repetition_detection` found its pattern."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start` to `end` (exclusive) of the output came from this version and engine."""

    start: int
    end: int
    version: WeightVersion
    engine: EngineId
    numerics: str


class VersionRange(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `WeightVersionSpan`: tokens `start` to `end` (exclusive), the version as a string."""

    version: str
    start: int
    end: int


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    token_id: int
    logprob: float
    top_logprobs: tuple["TokenLogprob", ...] = ()
    """Candidates, the sampled token first, where more than one was asked for."""
    token: str = ""
    """`token_id:N`, as vLLM before 0.32 names it; in replies to jobs alone."""


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
    """Why the turn ended early, where its job did not request that."""
    weight_versions: tuple[VersionRange, ...] | None = None
    """Version ranges of the whole output once it has ended, as in vLLM."""
    immovable: tuple[str, ...] = ()
    """Sampling fields for which the turn could not leave its dedicated engine; empty: it could."""
    routed_experts: str | None = None
    """vLLM's array of prompt and output, where one engine made all of it."""
    sampling_mask: tuple[tuple[int, ...], ...] | None = None
    """Token ids that could have been sampled at each token, where the engines report them."""

    @property
    def log_probs(self) -> tuple[float, ...]:
        """The sampled tokens' log-probabilities."""
        return tuple(each.logprob for each in self.logprobs.content)


class PromptScores(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a prompt, as the engine writes them."""

    prompt_logprobs: Any = None
    """A map of `{logprob, rank, decoded_token}` by token id for each token; null for the first."""
    prompt_token_id_logprobs: str | None = None
    """vLLM's array for `prompt_logprob_token_ids`."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateReply(PromptScores, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str
    choices: tuple[Choice, ...]
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    weight_version_start: WeightVersion | None = None
    weight_version_end: WeightVersion | None = None


PublishedNumber: TypeAlias = Annotated[WeightVersion, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class AnnouncedVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: PublishedNumber
    store: str
    state_hash: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Hash of its weights, where the publisher knows it: it tells two runs of a store apart."""
    cut_open_turns: bool = False
    """End turns that are pinned to exactly the version before, with partial output, instead of
    waiting for them. Turns whose pin admits the new version go on at it either way."""


class VersionSwitchState(StrEnum):
    SWITCHED = "switched"
    CATCHING_UP = "catching_up"


class VersionSwitched(msgspec.Struct, frozen=True, kw_only=True):
    version: WeightVersion
    engines: dict[EngineId, VersionSwitchState]
    active: bool = True
    """Whether the engines serve the job; if not, the version waits for its activation."""


class AnnounceState(StrEnum):
    """State of a publisher's newest version at its gateways; empty, so false, until all have it."""

    PENDING = ""
    SERVED = "served"
    """Every dedicated engine serves it."""
    NOT_ACTIVE = "announced, not active"
    """The engines of a gateway serve another job; they load the version once its job is active."""
