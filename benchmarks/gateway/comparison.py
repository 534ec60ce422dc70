"""The arms beside each other: added latency, requests per core, streams held. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gateway.figures import Interval, Outside, added, mean_ratio
from benchmarks.gateway.load import Exchange
from benchmarks.gateway.routers import ARMS, RouterArm

PERCENTS = {"p50": 50.0, "p99": 99.0}
_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWindow:
    """One window of the closed loop."""

    requests: int
    core_s: float
    """Core time of the router; 0 without one."""
    wall_s: float

    @property
    def per_core_s(self) -> float:
        return self.requests / self.core_s


@dataclass(slots=True)
class Rounds:
    outside: dict[tuple[RouterArm, bool], list[Outside]] = field(default_factory=dict)
    """A window for each round, by arm and whether streamed."""
    served: dict[tuple[RouterArm, str], list[LoopWindow]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Streams:
    """Streams held open on one router."""

    router: str
    at_s: float = 0.0
    """Time at which they are counted."""
    held: int = 0
    faults: int = 0
    """Streams with a token lost, doubled or out of order, or without an end."""
    rss_mb: float = 0.0
    idle_rss_mb: float = 0.0
    core_share: float = 0.0
    first_token_p99_ms: float = 0.0
    """Outside the engine."""

    def count(
        self, exchanges: Sequence[Exchange], check: Callable[[Exchange], None], outside: Outside
    ) -> None:
        at_ns = self.at_s * _NS
        self.held = sum(0 < each.first_ns <= at_ns < each.last_ns for each in exchanges)
        self.faults = sum(_is_faulty(each, check) for each in exchanges)
        if outside.first_ms.size:
            self.first_token_p99_ms = float(np.percentile(outside.first_ms, 99))


def _is_faulty(exchange: Exchange, check: Callable[[Exchange], None]) -> bool:
    try:
        check(exchange)
    except ValueError:
        return True
    return False


def compared(rounds: Rounds, streams: Sequence[Streams]) -> dict[str, Any]:
    """The result. Latencies are in ms, intervals 95 % over rounds."""
    return {
        "arms": {arm.name: _arm(rounds, arm) for arm in ARMS},
        "direct": {
            arm.name: {kind: _req_s(rounds.served[arm, kind]) for kind in _kinds(rounds)}
            for arm in dict.fromkeys(arm.direct for arm in ARMS)
        },
        "per_core_ratio": _ratios(rounds),
        "streams": {
            each.router: {
                name: round(getattr(each, name), 3)
                for name in (
                    *("held", "faults", "rss_mb", "idle_rss_mb", "core_share"),
                    "first_token_p99_ms",
                )
            }
            for each in streams
        },
    }


def _kinds(rounds: Rounds) -> list[str]:
    return list(dict.fromkeys(kind for _, kind in rounds.served))


def _arm(rounds: Rounds, arm: RouterArm) -> dict[str, Any]:
    def over_direct(part: str, *, stream: bool) -> dict[str, dict[str, float]]:
        own = [getattr(each, part) for each in rounds.outside[arm, stream]]
        direct = [getattr(each, part) for each in rounds.outside[arm.direct, stream]]
        return {
            name: added(own, direct, percent=percent).rounded()
            for name, percent in PERCENTS.items()
        }

    return {
        "added_ms": over_direct("whole_ms", stream=False),
        "first_token_added_ms": over_direct("first_ms", stream=True),
        "stream_end_added_ms": over_direct("whole_ms", stream=True),
        "req_s_per_core": {
            kind: Interval.over([each.per_core_s for each in windows]).rounded()
            | {
                "core_share": round(
                    sum(w.core_s for w in windows) / sum(w.wall_s for w in windows), 3
                )
            }
            for kind in _kinds(rounds)
            for windows in (rounds.served[arm, kind],)
        },
    }


def _req_s(windows: Sequence[LoopWindow]) -> float:
    return round(sum(each.requests for each in windows) / sum(each.wall_s for each in windows))


def _ratios(rounds: Rounds) -> dict[str, Any]:
    """Requests per core of ours over each other router's, on the same route."""
    ours = {arm.route: arm for arm in ARMS if arm.router == "rosemux"}
    return {
        arm.name: {
            kind: mean_ratio(
                [each.per_core_s for each in rounds.served[ours[arm.route], kind]],
                [each.per_core_s for each in rounds.served[arm, kind]],
            ).rounded()
            for kind in _kinds(rounds)
        }
        for arm in ARMS
        if arm.router != "rosemux"
    }
