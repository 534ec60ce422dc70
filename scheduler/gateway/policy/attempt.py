"""One request to an engine that continues a turn, and which of its fields are about output."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.gateway.policy.prompts import Prompt

_SEED_MASK = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Request to an engine whose output continues the accepted tokens."""

    number: int
    job: JobId
    trajectory: TrajectoryId
    engine: EngineId
    version: WeightVersion
    token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    cache_salt: str | None = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's renderer about reasoning, passed on."""
    emitted: tuple[int, ...] = ()
    """The turn's output so far, for an engine that continues it like its own; () if `token_ids`
    ends with it."""
    prompt: Prompt

    @property
    def tokens_left(self) -> int:
        """Tokens that the engine may make."""
        return self.sampling_params.max_tokens - len(self.emitted)

    @property
    def encoded_ids(self) -> msgspec.Raw | tuple[int, ...]:
        """`token_ids` for an encoder, once for all turns of the prompt where they are its ids."""
        alone = len(self.token_ids) == len(self.prompt.token_ids)
        return self.prompt.encoded if alone else self.token_ids


def output_fields(sampling: SamplingParams) -> tuple[str, ...]:
    """Set fields by which the next token depends on which tokens before it are output, or on their
    text.

    A turn with any of them can move only between engines that take the output as output.
    """
    given = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "bad_words": sampling.bad_words,
        "stop": sampling.stop,
        "structured_outputs": sampling.structured_outputs,
        "thinking_token_budget": sampling.thinking_token_budget is not None,
        "repetition_detection": sampling.repetition_detection,
        "extra_args": sampling.extra_args,
    }
    return tuple(name for name, value in given.items() if value)


def reasoning_fields(request: GenerateRequest) -> dict[str, Any]:
    given = {
        "reasoning_ended": request.reasoning_ended,
        "reasoning_parser_kwargs": request.reasoning_parser_kwargs,
    }
    return {name: value for name, value in given.items() if value is not None}


def continued_seed(seed: int | None, offset: int) -> int | None:
    """Seed of a continuation after `offset` output tokens.

    The engine's generator would start again from the first draw: with the same seed the rest of the
    turn would be correlated with its earlier output. Before the first token the seed is kept.
    """
    if seed is None or offset == 0:
        return seed
    return xxhash.xxh3_64_intdigest(f"{seed}:{offset}".encode()) & _SEED_MASK
