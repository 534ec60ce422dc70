"""Sequential tests of harm over randomised slices, whose false alarms do not depend on the load.

Each slice of time is withheld from the guest with a known probability. If the guest does no harm,
latencies in a slice say nothing about whether it was withheld, whatever the load does: a bet on it
wins nothing on average (Shafer, "Testing by betting", 2021; Ramdas et al., "Game-theoretic
statistics and safe anytime-valid inference", 2023). Harm makes withheld slices quicker, and the
wealth grows by

    (chance that the slice was withheld, as its latencies tell it) / (chance before)

Bets begin at any moment, as harm may begin at any time, and more is staked at the first grant and
where latencies beside the guest have just risen. Stakes are one in all within `HORIZON_S`. Whatever
the tests believe about latencies, the chance that the wealth of a harmless guest ever reaches 1/p
within the horizon is at most p (Ville): what they believe only decides how fast harm is found.
Reads no clock.
"""

import math

import msgspec

HORIZON_S = 28 * 86_400.0
_STAKE_AT_START, _STAKE_ANY_TIME, _STAKE_AT_RISES = 0.1, 0.3, 0.3
"""Shares of the stakes: at the first grant; spread over a horizon; kept for rises of latency, at
the first grant and as much again spread over a horizon."""
_STAKE_AT_RISE = 0.05
"""Share of the remaining stake that is bet at a rise."""
_LONGEST_ODDS = 4.0
"""Natural logarithm: no slice moves the odds by more."""
_LEAST_WEALTH = 1e-30
_SUSPICION_HALF_LIFE_S = 1800.0
SUSPICION, SUSPICION_OF_NEWCOMER = 30.0, 3.0
"""Times the newest bet is worth its stake when more time is withheld, to decide soon: of a guest
that has run for long without harm, and of one that is yet to prove itself. With one slice in twenty
withheld, a bet on large harm comes to ten times its stake by 47 granted slices in a row, which is a
chance of one in eleven after each withheld one; thirty times takes 67, or two quicker slices."""
_SUSPICION_AT_RISE = 1.25 * SUSPICION


class BetWealth(msgspec.Struct, kw_only=True):
    stakes: float = _STAKE_AT_START
    """Worth of all bets together."""
    reserve: float = _STAKE_AT_RISES
    """Stakes for rises to come."""
    newest: float = 1.0
    """Worth of one bet that began at the best moment; it fades, so that a suspicion which
    nothing confirms passes."""

    def bet(self, log_odds: float, *, withheld: bool, share: float, slice_s: float) -> None:
        """`log_odds`: natural logarithm of the likelihood of the slice's latencies if withheld over
        that if granted; `share`: chance with which it was withheld."""
        odds = math.exp(max(-_LONGEST_ODDS, min(_LONGEST_ODDS, log_odds)))
        chance = share * odds / (share * odds + 1.0 - share)
        factor = chance / share if withheld else (1.0 - chance) / (1.0 - share)
        part = slice_s / HORIZON_S
        self.reserve += _STAKE_AT_RISES * part
        self.stakes = max(_LEAST_WEALTH, (self.stakes + _STAKE_ANY_TIME * part) * factor)
        fade = math.exp2(-slice_s / _SUSPICION_HALF_LIFE_S)
        self.newest = max(1.0, self.newest * factor * fade)

    def suspect(self) -> None:
        """Latencies beside the guest have risen: a bet begins with the next slice."""
        stake = _STAKE_AT_RISE * self.reserve
        self.reserve -= stake
        self.stakes += stake
        self.newest = max(self.newest, _SUSPICION_AT_RISE)


def bets(count: int) -> list[BetWealth]:
    return [BetWealth() for _ in range(count)]


_RISE_STRICTER = 1.5
_RISE_EVERY_S = 12 * 3600.0


class RiseLimit(msgspec.Struct, kw_only=True):
    """Evidence that a suspicion of a rise needs, over that of the first one; common to all tests.

    It rises with each suspicion and falls with time, so that load that comes and goes is suspected
    a few times a day at most. A rise shows in one test after the other: while one test suspects it,
    the limit of that suspicion holds for the others too.
    """

    ratio: float = 1.0

    def at(self, *, suspected: bool) -> float:
        """The limit in force; `suspected`: some test suspects a rise now."""
        return max(1.0, self.ratio / _RISE_STRICTER) if suspected else self.ratio

    def observe(self, *, risen: bool, slice_s: float) -> None:
        """A slice has passed; `risen` if it showed a rise while none was suspected."""
        relaxed = self.ratio * _RISE_STRICTER ** (-slice_s / _RISE_EVERY_S)
        self.ratio = max(1.0, relaxed) * (_RISE_STRICTER if risen else 1.0)


class Rise(msgspec.Struct, kw_only=True):
    """A sum of evidence that latencies have risen (Page, "Continuous inspection schemes", 1954)."""

    sum: float = 0.0

    def found(self, evidence: float, *, limit: float) -> bool:
        """Fold a slice's evidence in, which is negative on average while nothing rises."""
        self.sum = max(0.0, self.sum + evidence)
        if self.sum < limit:
            return False
        self.sum = 0.0
        return True


SHIFTS = 0.05, 0.2, 0.6
"""Natural logarithms by which a withheld slice's quantile may be the lower one."""
_VARIANCE, _VARIANCE_GAIN = 0.02, 0.02
_LEAST_VARIANCE = 1e-5
_LEVEL_GAIN = 0.1
_OUTLIER = 3.0
"""Standard deviations; a larger error counts as this much."""
_RISE_BEYOND, _RISE_SUM = 1.0, 4.0
"""Standard deviations; errors beyond the first add up to the second."""
_LEAST_RISE = 0.1
"""Natural logarithm: two standard deviations are no less than this."""


class QuantileTest(msgspec.Struct, kw_only=True):
    """Whether slices beside the guest have a higher median, or another quantile; a Gaussian model
    of its logarithms."""

    wealths: list[BetWealth] = msgspec.field(default_factory=lambda: bets(len(SHIFTS)))
    """Wealth for each shift: harm that has just begun is as likely to be of any size."""
    level: float | None = None
    """Recent logarithm of a granted slice's quantile, in s."""
    variance: float = _VARIANCE
    """Variance of such logarithms around `level`."""
    rise: Rise = msgspec.field(default_factory=Rise)

    def observe(
        self, quantile_s: float, *, withheld: bool, share: float, slice_s: float, rise_limit: float
    ) -> bool:
        """Whether the slice shows a rise."""
        value = math.log(quantile_s)
        if self.level is None:
            self.level = value
            return False
        for shift, wealth in zip(SHIFTS, self.wealths, strict=True):
            log_odds = shift * (self.level - shift / 2 - value) / self.variance
            wealth.bet(log_odds, withheld=withheld, share=share, slice_s=slice_s)
        return not withheld and self._follow(value, self.level, rise_limit=rise_limit)

    def _follow(self, value: float, level: float, *, rise_limit: float) -> bool:
        error, spread = value - level, math.sqrt(self.variance)
        evidence = min(error / max(spread, _LEAST_RISE / 2), _OUTLIER) - _RISE_BEYOND
        if risen := self.rise.found(evidence, limit=rise_limit * _RISE_SUM):
            self.level = value
            for wealth in self.wealths:
                wealth.suspect()
        else:
            self.level = level + _LEVEL_GAIN * error
        # One jump of the level must not blind the test for an hour.
        squared = min(error * error, _OUTLIER**2 * self.variance)
        self.variance += _VARIANCE_GAIN * (squared - self.variance)
        self.variance = max(_LEAST_VARIANCE, self.variance)
        return risen


THRESHOLD_BETS = (1.0, 2.0), (3.0, 3.0), (10.0, 10.0)
"""Granted requests' rate over the rate of the past, and over that of withheld requests: for harm
that has lasted, and for harm that has just begun."""
_PRIOR_REQUESTS = 100.0
_DISPERSION_GAIN, _DISPERSION_EVENTS = 0.02, 3.0
_NEWER_GAIN = 0.1
_RISE_LOG_ODDS = 4.0
"""Natural logarithm: that the rate of granted requests has doubled."""
_MEMORY = 0.999
_LEAST_RATE, _MOST_RATE = 1e-4, 0.5


class SideCounts(msgspec.Struct, kw_only=True):
    """Requests, and those above the threshold; older ones fade."""

    requests: float = 0.0
    above: float = 0.0

    def add(self, *, requests: float, above: float) -> None:
        self.requests = _MEMORY * self.requests + requests
        self.above = _MEMORY * self.above + above


class ThresholdTest(msgspec.Struct, kw_only=True):
    """Whether more requests beside the guest exceed a threshold that was fixed before the slice."""

    wealths: list[BetWealth] = msgspec.field(default_factory=lambda: bets(len(THRESHOLD_BETS)))
    past: SideCounts = msgspec.field(default_factory=SideCounts)
    dispersion: float = 1.0
    """Variance of a granted slice's count over that of independent requests; 1 or above."""
    newer_rate: float = 0.0
    """Share of granted requests above the threshold in the last slices; harm is not dispersion."""
    rise: Rise = msgspec.field(default_factory=Rise)

    def observe(
        self,
        *,
        requests: float,
        above: float,
        withheld: bool,
        share: float,
        slice_s: float,
        rise_limit: float,
        newcomer: bool,
    ) -> bool:
        """Whether the slice shows a rise. `newcomer`: the guest may have done harm since its first
        grant, so its past is not a baseline."""
        rate = (self.past.above + 1.0) / (self.past.requests + _PRIOR_REQUESTS)
        for (rise, ratio), wealth in zip(THRESHOLD_BETS, self.wealths, strict=True):
            high = min(_MOST_RATE, max(_LEAST_RATE, rise * rate))
            low = high / ratio
            log_odds = above * math.log(low / high)
            log_odds += (requests - above) * math.log((1 - low) / (1 - high))
            if rise > 1.0 and not newcomer and self.newer_rate < math.sqrt(low * high):
                # No rise beside the guest: quiet withheld slices alone are no evidence of harm.
                log_odds, wealth.newest = 0.0, 1.0
            wealth.bet(log_odds / self.dispersion, withheld=withheld, share=share, slice_s=slice_s)
        risen = False
        if not withheld and self.past.above > _DISPERSION_EVENTS:
            expected = requests * max(rate, self.newer_rate)
            spread = (above - expected) ** 2 / expected
            self.dispersion += _DISPERSION_GAIN * (min(spread, 25.0) - self.dispersion)
            self.dispersion = max(1.0, self.dispersion)
        if not withheld:
            self.newer_rate += _NEWER_GAIN * (above / requests - self.newer_rate)
        if not withheld and self.past.above > _DISPERSION_EVENTS:
            log_odds = (above * math.log(2.0) - requests * rate) / self.dispersion
            if risen := self.rise.found(log_odds, limit=rise_limit * _RISE_LOG_ODDS):
                for wealth in self.wealths:
                    wealth.suspect()
        self.past.add(requests=requests, above=above)
        return risen
