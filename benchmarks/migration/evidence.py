"""All that a run is judged by: what was written down, and what the weights say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.migration.pin_judge import Announcement
from benchmarks.migration.records import AttemptRecord, HeldRecord, RequestRecord
from benchmarks.migration.rollout_plan import ENDS
from benchmarks.migration.settings_judge import Text

EDGE_NATS = 1e-3
"""A candidate so near to the edge of `top_k`, `top_p` or `min_p` may be in or out."""


@dataclass(frozen=True, slots=True)
class TokenTruth:
    """One token in its context, as the weights of a version rate it."""

    logprob: float
    """After penalties, `min_tokens` and `logit_bias`."""
    gap_nats: float | None
    """Between the best candidate and this token; 0 for the best, None where something else, as a
    grammar, may decide or exclude candidates."""
    end_probability: float = 0.0
    """The chance of EOS and the turn's stop tokens together, at this place."""
    expected_logprob: float = 0.0
    """Mean of the log-probability over draws at this place: minus the entropy."""
    logprob_variance: float = 0.0
    edge_logprobs: tuple[float, ...] = ()
    """The log-probability with all candidates at the edge of `top_k`, `top_p` or `min_p`, which
    rounding takes in or leaves out, and with none."""


@dataclass(slots=True, kw_only=True)
class MoveEvidence:
    requests: Sequence[RequestRecord]
    """With the taps' spans, where their route tells none (tap_spans.py)."""
    attempts: Sequence[AttemptRecord]
    held: Sequence[HeldRecord]
    hashes: Mapping[int, str]
    """The store's state hash of each version."""
    truths: Mapping[str, Sequence[TokenTruth]]
    """Truths of each answered turn's tokens, at the versions that its spans claim."""
    announced: Mapping[int, Announcement] = field(default_factory=dict)
    """The announcement of each version to the gateway."""
    poison: frozenset[str] = frozenset()
    """Trajectories."""
    ends: frozenset[int] = ENDS
    forced_end: Sequence[int] = ()
    """Tokens that end thinking at its budget."""
    text: Text = str
    parses_chats: bool = True
    """Whether the engines' parsers part chats."""
    numerics: Mapping[str, str] = field(default_factory=dict)
    """Label of each engine."""
