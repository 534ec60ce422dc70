"""How much of a resource the guest gets, as a share of the configured maximum.

The control law: a breach multiplies the level by `shrink_ratio` at once; after `quiet_s` without a
breach, `grow_ratio` of the maximum comes back every `grow_interval_s`.
"""

import math

import msgspec

from harvester.policy.settings import LevelSettings, MissSettings


class LevelState(msgspec.Struct, kw_only=True):
    ratio: float = 1.0
    breached_at_s: float | None = None
    shrunk_at_s: float | None = None
    grown_at_s: float | None = None


class Level:
    def __init__(self, settings: LevelSettings, state: LevelState | None = None) -> None:
        self._settings = settings
        self.state = state or LevelState()

    @property
    def ratio(self) -> float:
        return self.state.ratio

    def observe(self, *, breached: bool, now: float) -> float:
        if breached:
            self.state.breached_at_s = now
            if _elapsed(self.state.shrunk_at_s, now) >= self._settings.shrink_interval_s:
                self._shrink(now)
        elif self.state.ratio < 1.0 and self._may_grow(now):
            self.state.ratio = min(1.0, self.state.ratio + self._settings.grow_ratio)
            self.state.grown_at_s = now
        return self.state.ratio

    def _shrink(self, now: float) -> None:
        lower = self.state.ratio * self._settings.shrink_ratio
        self.state.ratio = max(self._settings.floor_ratio, lower)
        self.state.shrunk_at_s = now

    def _may_grow(self, now: float) -> bool:
        return (
            _elapsed(self.state.breached_at_s, now) >= self._settings.quiet_s
            and _elapsed(self.state.grown_at_s, now) >= self._settings.grow_interval_s
        )


_OWN_MEMORY_S = 6 * 3600.0
_OWN_PRIOR_SAMPLES = 100.0
_BELIEVABLE = 4.0
"""Standard errors of production's own misses in a window."""


class MissState(msgspec.Struct, kw_only=True):
    samples: float = 0.0
    misses: float = 0.0
    at_s: float | None = None
    own_samples: float = 0.0
    """Samples of withheld slices in the last hours, where production misses by itself."""
    own_weighed: float = 0.0
    """The same samples, weighted by the granted samples that each represents. Unweighted, one
    overload, in which more slices are withheld, would outweigh many quiet hours."""
    own_misses: float = 0.0
    """Misses among the withheld samples, with the same weights."""
    own_squares: float = 0.0
    """Squares of the misses that came in one beat: many at once spread more."""
    breached: bool = False
    """Whether there was a breach since the level was last whole."""

    def __post_init__(self) -> None:
        self.own_weighed = self.own_weighed or self.own_samples  # An older agent weighed nothing.


class MissWindow:
    """Exponentially fading counts of latency samples and of misses beside a stepping guest."""

    def __init__(self, settings: MissSettings, state: MissState | None = None) -> None:
        self._settings = settings
        self.state = state or MissState()

    def observe(
        self,
        *,
        samples: float,
        misses: float,
        own_samples: float = 0.0,
        own_misses: float = 0.0,
        own_stands_for: float = 1.0,
        now: float,
    ) -> bool:
        """Fold new counts in, `own_...` from withheld slices, of which each sample stands for so
        many granted ones; True means a breach, after which counting restarts. The counts fade when
        there is a new one."""
        if not (samples or misses or own_samples):
            return False
        state, elapsed_s = self.state, _elapsed(self.state.at_s, now)
        kept = math.exp(-elapsed_s / _OWN_MEMORY_S)
        state.own_samples = state.own_samples * kept + own_samples
        state.own_weighed = state.own_weighed * kept + own_stands_for * own_samples
        state.own_misses = state.own_misses * kept + own_stands_for * own_misses
        state.own_squares = state.own_squares * kept + own_stands_for * own_misses**2
        fade = math.exp(-elapsed_s / self._settings.window_s)
        state.samples = state.samples * fade + samples
        state.misses = state.misses * fade + misses
        state.at_s = now
        breached = (
            misses > 0
            and self._excess >= self._settings.minimum_misses
            and self._excess > self._settings.limit_ratio * state.samples
        )
        if breached:
            state.samples = state.misses = 0.0
            state.breached = True
        return breached

    @property
    def miss_ratio(self) -> float:
        """Share of recent samples that missed beyond production's own misses; 0 without samples."""
        return max(0.0, self._excess) / self.state.samples if self.state.samples else 0.0

    @property
    def _excess(self) -> float:
        state = self.state
        if not state.own_weighed:
            return state.misses
        known = state.own_samples / (state.own_samples + _OWN_PRIOR_SAMPLES)
        per = known * state.samples / state.own_weighed
        believable = _BELIEVABLE * math.sqrt(state.own_squares * per)
        return state.misses - state.own_misses * per - believable


def _elapsed(since_s: float | None, now: float) -> float:
    return math.inf if since_s is None else now - since_s
