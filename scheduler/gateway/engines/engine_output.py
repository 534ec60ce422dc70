"""Output of an engine for a turn, checked before it counts."""

import math
from collections.abc import Sequence

from harvester.contracts.wire.rollouts import TokenLogprob
from scheduler.gateway.engines.engine_faults import EngineLost
from scheduler.gateway.engines.stream import EngineChoice
from scheduler.gateway.policy.attempt import Attempt
from scheduler.gateway.policy.turn import FINISHED, Turn

_UNFINISHED = frozenset(("abort", "error"))
"""Finish reasons of an attempt whose turn goes on."""
_REASON_CHARS = 40
_ROUNDED_LOGPROB = 1e-3
"""Largest log-probability of an engine: certainty, which rounding may put above 0."""
NO_LOGPROB = -9999.0
"""vLLM's for minus infinity and NaN, where a number must be."""


def check_finish(choice: EngineChoice, *, tokens_before: int) -> None:
    """Raises EngineLost for an end that vLLM (0.24 to 0.33) does not send: with another reason, or
    without a token of the attempt, whose empty answer would be trained on."""
    reason = choice.finish_reason
    if not (reason is None or reason in FINISHED or reason in _UNFINISHED):
        raise EngineLost(f"protocol: finish reason {reason[:_REASON_CHARS]!r}")
    if reason == "stop" and not (tokens_before or choice.token_ids):
        raise EngineLost("protocol: the engine stopped before the first token")


def check_tokens(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], vocabulary_tokens: float = math.inf
) -> None:
    """Raises ValueError where a chunk contradicts itself or the vocabulary: a wrong log-probability
    must not reach training."""
    if logprobs and (named := [each.token_id for each in logprobs]) != token_ids:
        raise ValueError(f"log-probabilities of {named[:8]}, tokens {token_ids[:8]}")
    if token_ids and (max(token_ids) >= vocabulary_tokens or min(token_ids) < 0):
        raise ValueError(f"tokens {token_ids[:8]} not below {vocabulary_tokens}")
    for each in logprobs:
        if not NO_LOGPROB < each.logprob <= _ROUNDED_LOGPROB:
            what = "no log-probability of a sampled token"
            if each.logprob > 0:
                what = "a log-probability above 0; run vLLM with --logprobs-mode processed_logprobs"
            raise ValueError(f"{each.logprob:g} for token {each.token_id}: {what}")


def accepted(
    turn: Turn, attempt: Attempt, choice: EngineChoice, vocabulary_tokens: float = math.inf
) -> int:
    """Adds a chunk's tokens; how many. Raises EngineLost as `check_tokens` and `Turn.accept` do."""
    token_ids = choice.token_ids or []
    logprobs = (choice.logprobs and choice.logprobs.content) or []
    try:
        check_tokens(token_ids, logprobs, vocabulary_tokens)
        if not turn.request.sampling_params.lists_candidates:
            # vLLM lists the sampled token among its own candidates.
            logprobs = [TokenLogprob(each.token_id, each.logprob) for each in logprobs]
        taken = turn.accept(attempt, token_ids, logprobs, choice.sampling_mask)
    except ValueError as error:
        raise EngineLost(f"protocol: {error}") from error
    return len(token_ids) if taken else 0
