"""Production's load: stretches of a trace, at a rate and of a size that keep production as busy as
asked.

Both follow from the step times that were measured on this machine. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.testbed.calibration import (
    TARGET_BUSY_SHARE,
    MeasuredReplay,
    measured_ratio,
    rate_for,
)
from benchmarks.testbed.excerpt import Excerpt, TokenScale, excerpts_of
from benchmarks.testbed.trace import Trace
from harvester.contracts.page import ProductionModel

REQUESTS_MIN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    trace: Trace
    sizes: TokenScale
    """Scale from the trace's token counts to the sent ones."""
    rate: float
    """Requests per second."""

    def excerpts(self, seconds: float, *, count: int) -> tuple[Excerpt, ...]:
        excerpts = excerpts_of(self.trace, count=count, duration_s=seconds, rate=self.rate)
        return tuple(excerpt.sized(self.sizes) for excerpt in excerpts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The run that a load is for: `rounds` excerpts of `slice_s` seconds."""

    scales: Sequence[TokenScale]
    """Scales from the largest requests to the smallest."""
    slice_s: float
    rounds: int
    step_tokens: int
    """Production's budget for one step."""
    requests_min: int = REQUESTS_MIN
    busy_share: float = TARGET_BUSY_SHARE
    """Busy share of production alone."""

    def load(
        self, before: Load, model: ProductionModel, *, replays: Sequence[MeasuredReplay] = ()
    ) -> Load:
        """The load that keeps production so busy, at the largest scale with enough requests.

        `model` is production's; `replays` measure the deviation of its steps.
        """
        ratio = measured_ratio(replays, model, step_tokens=self.step_tokens)
        load = before
        for sizes in self.scales:
            load = self._as_busy(replace(before, sizes=sizes), model, ratio)
            excerpts = load.excerpts(self.slice_s, count=self.rounds)
            if sum(len(excerpt.arrivals) for excerpt in excerpts) >= self.requests_min:
                break
        return load

    def _as_busy(self, load: Load, model: ProductionModel, ratio: float) -> Load:
        rate = rate_for(
            lambda rate: replace(load, rate=rate).excerpts(self.slice_s, count=self.rounds),
            model,
            measured_ratio=ratio,
            target=self.busy_share,
            step_tokens=self.step_tokens,
        )
        return replace(load, rate=rate)
