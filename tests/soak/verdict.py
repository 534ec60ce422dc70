"""The judge's counters and what it looked at, over all pieces of a soak."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_FINDINGS = 60
CONVICTING = (
    "production_failed",
    "production_ended",
    "production_touched",
    "lost_turns",
    "undocumented_refusals",
    "broken_replies",
    "answered_twice",
    "broken_continuations",
    "wrong_versions",
    "not_served",
    "unleased_grants",
    "stopped_grants",
    "stale_grants",
    "not_recovered",
    "fault_demands",
    "parts_ended",
    "left_behind",
    "memory_grows",
    "unbounded",
)
"""Counters that must be 0."""


@dataclass(slots=True)
class SoakVerdict:
    counters: Counter[str] = field(default_factory=Counter)
    figures: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def note(self, counter: str, what: str) -> None:
        assert counter in CONVICTING, counter
        self.counters[counter] += 1
        if len(self.findings) < _FINDINGS:
            self.findings.append(f"{counter}: {what}")

    @property
    def violations(self) -> int:
        return sum(self.counters.values())

    def plain(self) -> dict[str, Any]:
        return {
            "violations": {name: self.counters[name] for name in CONVICTING},
            "findings": self.findings,
            **self.figures,
        }
