"""The judge's counters (judge.py defines them) and what it looked at."""

from dataclasses import dataclass, field

_FINDINGS = 40
CONVICTING = (
    "lost",
    "duplicated",
    "wrong_span",
    "resampled_tokens",
    "truncated_by_place",
    "overrun",
    "broken_setting",
    "lost_to_others",
    "poison_passed",
    "pin_broken",
)
"""Counters that must be 0."""


@dataclass(slots=True)
class MigrationVerdict:
    turns: int = 0
    trajectories: int = 0
    tokens: int = 0
    moved_turns: int = 0
    moves: int = 0
    """Attempts that went on from tokens of an earlier one."""
    lost: int = 0
    duplicated: int = 0
    wrong_span: int = 0
    resampled_tokens: int = 0
    truncated_by_place: int = 0
    overrun: int = 0
    broken_setting: int = 0
    lost_to_others: int = 0
    poison_passed: int = 0
    pin_broken: int = 0
    pins: dict[str, int] = field(default_factory=dict)
    """Turns that asked for a least version or an exact one, and what pins excused."""
    routes: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    """Turns of requests for several."""
    judged_texts: int = 0
    called_turns: int = 0
    """With calls of tools."""
    judged_tokens: int = 0
    """Compared with the weights."""
    judged_choices: int = 0
    """Tokens of greedy turns, compared with the best candidate."""
    settings: dict[str, int] = field(default_factory=dict)
    """Turns that moved, by the sampling setting, route and exact pin that they had."""
    ties: int = 0
    worst_logprob_nats: float = 0.0
    in_flight_tokens: int = 0
    """Sent by an engine, not yet read when the stream ended, and sampled anew."""
    worst_late_s: float = 0.0
    """Longest time that a tap did not run before it saw a cut."""
    spans: int = 0
    judged_spans: int = 0
    """Spans of engines whose weights were known by hash."""
    unknown_weights_spans: int = 0
    asked_twice: int = 0
    poison: dict[str, int] = field(default_factory=dict)
    attempt_ends: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def note(self, counter: str, name: str, what: str, by: int = 1) -> None:
        setattr(self, counter, getattr(self, counter) + by)
        if len(self.findings) < _FINDINGS:
            self.findings.append(f"{counter}: {name}: {what}")
