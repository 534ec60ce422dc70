"""The body of an attempt as vLLM's generate route takes it. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from harvester.contracts.wire.rollouts import (
    EMITTED_ARGUMENT,
    ENDED_ARGUMENT,
    TRAJECTORY_ARGUMENT,
    SamplingParams,
)
from scheduler.gateway.policy.attempt import Attempt


def generate_body(
    attempt: Attempt,
    request_id: str,
    priority: int,
    model: str | None = None,
    ended: Sequence[str] = (),
    *,
    state_hash: str = "",
) -> dict[str, Any]:
    """The body of the attempt for vLLM's generate route; each attempt has its own id.

    The salt is part of every prefix's hash: KV of another job, version or adapter is never hit,
    also where an engine failed to drop it. Nor is KV of an earlier run of the job, which vLLM's
    tiers on disk keep for engines to come: `state_hash` is of the weights, "" if unknown.
    """
    sampling = attempt.sampling_params
    scored = sampling.logprob_token_ids or ()
    named = {} if model is None else {"model": model}
    own: dict[str, Any] = {TRAJECTORY_ARGUMENT: f"{attempt.job}/{attempt.trajectory}"}
    if ended:
        own[ENDED_ARGUMENT] = ended
    if attempt.emitted:
        own[EMITTED_ARGUMENT] = attempt.emitted
    return (
        named
        | attempt.reasoning
        | {
            "request_id": f"{request_id}.{attempt.number}",
            "token_ids": attempt.encoded_ids,
            "cache_salt": _salt(attempt, model, state_hash),
            "stream": True,
            "priority": priority,
            "sampling_params": msgspec.to_builtins(_streamed(sampling))
            | {
                # vLLM returns as many entries as `logprobs`, the sampled token's among them, and
                # holds that number to the ids': one id twice leaves room for all of them.
                "logprobs": max(1, len(scored) + bool(scored) or sampling.logprobs or 0),
                **({"logprob_token_ids": (*scored, scored[0])} if scored else {}),
                "detokenize": bool(sampling.stop),
                "extra_args": (sampling.extra_args or {}) | own,
            },
        }
    )


def _streamed(sampling: SamplingParams) -> SamplingParams:
    """The sampling parameters without the gateway's own fields and those of a separate call."""
    return msgspec.structs.replace(
        sampling,
        stream_interval=None,
        prompt_logprobs=None,
        prompt_logprob_token_ids=None,
        prompt_logprob_start=None,
        # vLLM's own models set it beside `prompt_logprobs`.
        skip_reading_prefix_cache=None
        if sampling.scores_prompt
        else sampling.skip_reading_prefix_cache,
    )


def _salt(attempt: Attempt, model: str | None, state_hash: str) -> str:
    """A digest, because vLLM takes neither long names nor every separator."""
    named = f"{attempt.job}/{attempt.version}/{model or ''}/{state_hash}"
    if attempt.cache_salt:
        named += f"/{attempt.cache_salt}"
    return xxhash.xxh3_128_hexdigest(named.encode())
