"""From a change in production to the grant page: `page`, of a pulse page; `metrics`, of the scraped
endpoint.

The change is a restart of production, its counters begin anew: the grant says so and is closed.
"""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.agent.agent_child import AgentChild, StandInChild, clock, wait_for
from benchmarks.agent.evidence import GrantLog
from benchmarks.testbed.page_beats import PageBeats
from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.page import PageDirectory, Pulse

PAGE_TRIALS, METRICS_TRIALS = 300, 60
_POLICY = {"cooldown_s": 0.1, "proof": {"share_ratio": 0}, "quarantine_losses": 1_000_000}
_SAYS = "backwards"
_LATE_S = 5.0


@dataclass
class Restarts:
    """An idle engine's pulse, whose counters a restart sets back."""

    base: int = 0

    def __call__(self, step: int) -> Pulse:
        return Pulse(model_samples=1000, steps_total=step - self.base)


@dataclass
class ReactionTimer:
    log: GrantLog
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def reactions_ms(
        self, change: Callable[[], None], *, trials: int, pause_s: float
    ) -> list[float]:
        """Each change comes at a random time in the agent's beat."""
        found = []
        for _ in range(trials):
            wait_for(lambda: False, seconds=pause_s * self.rng.uniform(1.0, 1.5), every_s=0.01)
            at_s = clock.now()
            change()
            seen_s = wait_for(lambda at_s=at_s: self._seen_s(at_s), seconds=_LATE_S, every_s=1e-3)  # type: ignore[misc]
            found.append((seen_s - at_s if seen_s else _LATE_S) * 1e3)
        return sorted(found)

    def _seen_s(self, since_s: float) -> float | None:
        seen = self.log.latest("slot0")
        if seen is not None and seen.seen_s > since_s and _SAYS in seen.grant.reason:
            return seen.seen_s
        return None


def reaction(*, share: float = 1.0) -> dict[str, Any]:
    """`share` of the trials."""
    found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    with TemporaryDirectory(dir="/dev/shm") as directory:
        found |= _figures("page", _of_page(Path(directory), trials=round(PAGE_TRIALS * share)))
    with TemporaryDirectory(dir="/dev/shm") as directory:
        trials = max(2, round(METRICS_TRIALS * share))
        found |= _figures("metrics", _of_metrics(Path(directory), trials=trials))
    return found


def _of_page(root: Path, *, trials: int) -> list[float]:
    pages = PageDirectory.create(root / "pages" / "slot0")
    pulse = Restarts()
    config = {
        "lease_ttl_s": 300.0,
        "slots": [{"name": "slot0", "policy": _POLICY}],
    }
    agent = AgentChild(root, config)
    with ExitStack() as stack:
        beats = PageBeats([pages], pulse=pulse)
        stack.callback(beats.stop)
        stack.callback(agent.end)
        agent.start()
        agent.lease_all(duration_s=300.0)
        log = GrantLog([pages.path], every_s=5e-4)
        stack.callback(log.stop)

        def restart() -> None:
            pulse.base = beats.step
            beats.write()

        return ReactionTimer(log).reactions_ms(restart, trials=trials, pause_s=0.4)


def _of_metrics(root: Path, *, trials: int) -> list[float]:
    pages = PageDirectory.create(root / "pages" / "slot0")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/metrics"
    slot = {"name": "slot0", "metrics_url": url, "policy": _POLICY}
    agent = AgentChild(root, {"slots": [slot]})
    with ExitStack() as stack:
        log = root / "production.log"
        production = StandInChild("production", pages.path, log, metrics=port)
        stack.callback(production.end)
        stack.callback(agent.end)
        agent.start()
        grants = GrantLog([pages.path], every_s=5e-4)
        stack.callback(grants.stop)
        restart = lambda: production.word("restarted")  # noqa: E731
        return ReactionTimer(grants).reactions_ms(restart, trials=trials, pause_s=2.2)


def _figures(level: str, times_ms: list[float]) -> dict[str, float]:
    return {
        f"{level}_p50": round(times_ms[len(times_ms) // 2], 1),
        f"{level}_p99": round(times_ms[int(0.99 * len(times_ms))], 1),
        f"{level}_trials": len(times_ms),
    }
