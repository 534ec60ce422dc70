"""Duration estimates of a job's phases: learned online, one estimate per phase.

Before the first phase only the declared maximum is known (every response at its token limit), so
the mean is believed to lie between half of it and all of it. Every observed phase narrows that.
Old observations fade, so that a drifting mean is followed; the fading also keeps the doubt
from ever vanishing. A faded mean lags by as many observations as it remembers, so a significant
drift is learned too, and the mean believed is that of the next phases. The declared maximum bounds
the belief of a young job only: observations win.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Final, NamedTuple

from scheduler.model import PhaseSpec

PRIOR_MEAN_RATIO: Final = 0.75
PRIOR_SPREAD_RATIO: Final = 0.145
"""Mean and standard deviation of a mean that lies anywhere from half the maximum to all of it."""
PRIOR_CV: Final = 0.1
PRIOR_WEIGHT: Final = 4.0
"""Weight of the prior coefficient of variation, in observations."""
DRIFT_SURE: Final = 4.0
"""Standard deviations of a slope; of 1,200 jobs without drift three were ever taken to drift."""
DRIFT_AHEAD: Final = 4.0
"""Observations by which a drifting mean is extrapolated: half of what a forecast runs."""
ODD_RATIO_MAX: Final = 3.0
"""Most that one phase counts, over the believed mean or the declared maximum."""
DRIFT_RATIO_MAX: Final = 2.0
"""Most that a drift takes the mean up or down from the faded one."""


@dataclass(slots=True)
class PhaseEstimate:
    """Belief about one phase's mean and variation; `memory` is in observations."""

    max_s: float
    memory: float = 40.0
    weight: float = 0.0
    seen_s: float = 0.0
    """Faded mean of the observed durations, in s."""
    spread_s2: float = 0.0
    count: int = 0
    ago: float = 0.0
    """Faded mean of how many observations ago they were."""
    ago_spread: float = 0.0
    """Faded sum of their squares around it, as `spread_s2` is of durations."""
    ago_spread_s: float = 0.0
    """Faded mean of the products of age and duration; positive if newer phases take longer."""

    def observe(self, solo_s: float) -> None:
        """Adds one phase's duration, alone on its nodes, in seconds."""
        fading = 1.0 - 1.0 / self.memory
        self.weight = self.weight * fading + 1.0
        step = self.ago + 1.0 if self.count else 0.0
        self.ago = step - step / self.weight
        self.ago_spread = self.ago_spread * fading + step * self.ago
        gap_s = solo_s - self.seen_s
        self.seen_s += gap_s / self.weight
        self.spread_s2 = self.spread_s2 * fading + gap_s * (solo_s - self.seen_s)
        self.ago_spread_s = self.ago_spread_s * fading + step * (solo_s - self.seen_s)
        self.count += 1

    def believable(self, solo_s: float) -> float:
        """The duration, or the most that one phase teaches and earns: a phase of hours among ones
        of minutes would make forecasts useless for a day."""
        return min(solo_s, ODD_RATIO_MAX * max(self.mean_s, self.max_s))

    def recall(self, phase: PhaseSpec) -> None:
        """Adds the declared measurements, if any: durations of their mean and variation; an odd
        last one is the mean itself."""
        if phase.mean_s is None:
            return
        sides = [1.0, -1.0] * (phase.seen // 2) + [0.0] * (phase.seen % 2)
        for side in sides:
            self.observe(phase.mean_s * max(0.01, 1.0 + side * phase.cv))

    @property
    def cv(self) -> float:
        """Coefficient of variation of a single phase."""
        if self.count == 0:
            return PRIOR_CV
        return sqrt(self._cv2(self.drift_s))

    @property
    def drift_s(self) -> float:
        """Change of the mean per observation, in s; 0 if chance may explain it."""
        if self.ago_spread == 0.0:
            return 0.0
        slope_s = self.ago_spread_s / self.ago_spread
        noise_s = DRIFT_SURE * self.seen_s
        sure = slope_s**2 * self.ago_spread > noise_s**2 * self._cv2(slope_s)
        return slope_s if sure else 0.0

    def _cv2(self, drift_s: float) -> float:
        """Squared coefficient of variation of one phase, around a mean with this drift."""
        seen_cv2 = max(0.0, self.spread_s2 - drift_s * self.ago_spread_s) / self.seen_s**2
        return (seen_cv2 + PRIOR_WEIGHT * PRIOR_CV**2) / (self.weight + PRIOR_WEIGHT)

    @property
    def mean_s(self) -> float:
        return self._posterior()[0]

    @property
    def mean_spread_s(self) -> float:
        """Standard deviation of the belief about the mean."""
        return self._posterior()[1]

    def _posterior(self) -> tuple[float, float]:
        prior_s, prior_spread_s = PRIOR_MEAN_RATIO * self.max_s, PRIOR_SPREAD_RATIO * self.max_s
        if self.count == 0:
            return prior_s, prior_spread_s
        if drift_s := self.drift_s:
            return self._drifted(drift_s)
        precision = self.weight / (sqrt(self._cv2(drift_s)) * self.seen_s) ** 2
        prior_precision = 1.0 / prior_spread_s**2 if self.count < self.memory else 0.0
        mean_s = (precision * self.seen_s + prior_precision * prior_s) / (
            precision + prior_precision
        )
        return mean_s, 1.0 / sqrt(precision + prior_precision)

    def _drifted(self, drift_s: float) -> tuple[float, float]:
        """The fitted line a little beyond its end: its height and its standard error, in s."""
        ahead = self.ago + DRIFT_AHEAD
        line_s = self.seen_s + drift_s * ahead
        least_s, most_s = self.seen_s / DRIFT_RATIO_MAX, self.seen_s * DRIFT_RATIO_MAX
        doubt = sqrt(self._cv2(drift_s) * (1.0 / self.weight + ahead**2 / self.ago_spread))
        return min(max(line_s, least_s), most_s), self.seen_s * doubt


class Belief(NamedTuple):
    """A job's phases: mean, doubt about the mean, and variation of one phase around it."""

    rollout_s: float
    rollout_spread_s: float
    rollout_cv: float
    training_s: float
    training_spread_s: float
    training_cv: float
    sync_s: float = 0.0
    """Mean of a weight sync; it shares nothing with others, so its variation is not asked for."""

    @property
    def iteration_s(self) -> float:
        return self.rollout_s + self.training_s + self.sync_s

    @property
    def doubts(self) -> tuple[float, ...]:
        """Mean, doubt and variation of rollout, then of training."""
        return self[:6]


def learned(
    rollout: PhaseEstimate, training: PhaseEstimate, sync: PhaseEstimate | None = None
) -> Belief:
    return Belief(
        rollout.mean_s,
        rollout.mean_spread_s,
        rollout.cv,
        training.mean_s,
        training.mean_spread_s,
        training.cv,
        0.0 if sync is None else sync.mean_s,
    )
