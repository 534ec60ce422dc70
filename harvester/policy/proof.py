"""Randomised slices of time without a grant, and the impact of harvesting that they show.

Whether a slice is withheld is a function of the seed and the slice's number alone, so it depends on
no load and a replay withholds the same slices. A slice is the unit of the interval: samples within
one are not independent. This module closes no gate; it reports `withheld` and `harmful`.
"""

from statistics import NormalDist

import msgspec
import xxhash

from harvester.policy.settings import ProofSettings


class SliceSum(msgspec.Struct, kw_only=True):
    """Sums over slices of a kind: n samples of sum x, and products for the variance."""

    slices: int = 0
    n: float = 0.0
    x: float = 0.0
    nn: float = 0.0
    nx: float = 0.0
    xx: float = 0.0

    def add(self, *, n: float, x: float, sign: int = 1) -> None:
        self.slices += sign
        self.n += sign * n
        self.x += sign * x
        self.nn += sign * n * n
        self.nx += sign * n * x
        self.xx += sign * x * x

    @property
    def mean(self) -> float:
        return self.x / self.n

    @property
    def variance(self) -> float:
        """Variance of the ratio estimator x/n over slices (Cochran, Sampling Techniques, 6.4)."""
        residual = self.xx - 2 * self.mean * self.nx + self.mean**2 * self.nn
        correction = self.slices / (self.slices - 1)
        return max(0.0, residual) * correction / self.n**2


class FinishedSlice(msgspec.Struct, kw_only=True):
    withheld: bool
    n: float
    x: float


class ProofState(msgspec.Struct, kw_only=True):
    index: int | None = None
    n: float = 0.0
    x: float = 0.0
    eligible: bool = True
    finished: list[FinishedSlice] = []
    oldest: int = 0
    """Index of the slice in the full ring that is overwritten next."""
    granted: SliceSum = msgspec.field(default_factory=SliceSum)
    withheld: SliceSum = msgspec.field(default_factory=SliceSum)
    stopped_at_s: float | None = None


class Impact(msgspec.Struct, frozen=True, kw_only=True):
    """Latency beside the guest over latency alone, minus 1, with its confidence interval."""

    ratio: float
    low: float
    high: float
    slices_granted: int
    slices_withheld: int


class ProofSlices:
    def __init__(self, settings: ProofSettings, state: ProofState | None = None) -> None:
        self._settings = settings
        self.state = state or ProofState()

    @property
    def harmful(self) -> bool:
        return self.state.stopped_at_s is not None

    def withheld(self, *, now: float) -> bool:
        return self._withheld(int(now // self._settings.slice_s))

    def observe(self, *, latencies_s: tuple[float, ...], eligible: bool, now: float) -> None:
        """Fold in the latency samples (s) of a beat.

        `eligible` is whether the grant would be open if no slice were withheld: a slice counts for
        either kind only if all of it was eligible, so that both kinds see the same production.
        """
        state, slice_s = self.state, self._settings.slice_s
        index = int(now // slice_s)
        if index != state.index:
            self._finish(now)
            state.index, state.n, state.x, state.eligible = index, 0.0, 0.0, True
        state.eligible = state.eligible and eligible
        # A latency that began before the slice overlaps both kinds, so it counts for neither.
        inside = [x for x in latencies_s if x <= now - index * slice_s]
        state.n += len(inside)
        state.x += sum(inside)

    def impact(self) -> Impact | None:
        """The impact; None below the minimum of slices of either kind."""
        granted, withheld = self.state.granted, self.state.withheld
        if min(granted.slices, withheld.slices) < self._settings.minimum_slices:
            return None
        if granted.x <= 0 or withheld.x <= 0:
            return None
        ratio = granted.mean / withheld.mean
        relative = granted.variance / granted.mean**2 + withheld.variance / withheld.mean**2
        z = NormalDist().inv_cdf((1 + self._settings.confidence_ratio) / 2)
        half = z * ratio * relative**0.5
        return Impact(
            ratio=ratio - 1,
            low=ratio - half - 1,
            high=ratio + half - 1,
            slices_granted=granted.slices,
            slices_withheld=withheld.slices,
        )

    def _finish(self, now: float) -> None:
        state = self.state
        if state.index is not None and state.eligible and state.n > 0:
            kind = self._withheld(state.index)
            self._keep(FinishedSlice(withheld=kind, n=state.n, x=state.x))
        if state.stopped_at_s is None:
            impact = self.impact()
            if impact is not None and impact.low > self._settings.limit_ratio:
                state.stopped_at_s = now
        elif now - state.stopped_at_s >= self._settings.hold_s:
            # The evidence that caused the stop is spent: harvesting must prove itself anew.
            self.state = ProofState()

    def _keep(self, done: FinishedSlice) -> None:
        state = self.state
        if len(state.finished) < self._settings.window_slices:
            state.finished.append(done)
        else:
            old = state.finished[state.oldest]
            self._sum(old.withheld).add(n=old.n, x=old.x, sign=-1)
            state.finished[state.oldest] = done
            state.oldest = (state.oldest + 1) % self._settings.window_slices
        self._sum(done.withheld).add(n=done.n, x=done.x)

    def _sum(self, withheld: bool) -> SliceSum:
        return self.state.withheld if withheld else self.state.granted

    def _withheld(self, index: int) -> bool:
        draw = xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), seed=self._settings.seed)
        return draw / 2**64 < self._settings.share_ratio
