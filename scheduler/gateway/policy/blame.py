"""Decides whether a request is at fault when engines fail under it.

    an engine dies, or answers a request with a failure     each request on it is a suspect
    no engine has died for QUIET_S                          a suspect goes on: on trial, no second
                                                            one on that engine
    it makes CLEARED_TOKENS there, or ends                  the suspicion is dropped
    the engine of its trial dies in its first step,         quarantined: two engines failed under it
    before a token of it, or answers it with a failure
    that engine dies later                                  a suspect as before
    an engine goes silent                                   its requests are suspects as well; it
                                                            counts once its death is proven, and
                                                            never if it proves alive
    neither is known after HELD_S                           those without a trial are no suspects
                                                            any more

A request that kills at one position of its content fails in the first step of its trial, because
the trial continues from the tokens already generated; it costs two engines. A later death counts as
a stopped engine. Requests that fail before their first token are merged by prompt, so a group of
samples also costs two engines, not two each. A request is excused once if another engine dies
within COMMON_CAUSE_S without it: that is a restart. Two requests that kill at the same time may
cost three engines each.
Opens no connection and reads no clock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from harvester.contracts.ids import EngineId

CLEARED_TOKENS = 4
"""Engines schedule a step or two ahead, so the first tokens of a trial may still come."""

KILLS_WITHIN_S = 0.5
"""Least bound on a first step, in which a poisonous request kills an engine."""

FIRST_STEPS = 2.0
"""Bound on a first step in usual first-token times: on a slow or busy engine it begins later and
takes longer, and its victims would pass for clear of the death."""

QUIET_S = 1.0
"""Engines that are stopped together die within this time, and no trial is among them."""

HELD_S = 5.0
"""A request waits this long for its verdict: another engine may die without it, and a silent one
may prove dead or alive. After this time without a verdict the request is tried again."""

COMMON_CAUSE_S = 60.0
"""Deaths this close together may have one cause."""

QUARANTINE_S = 60.0
"""A client that resends the request within this time gets the reason at once."""

_REMEMBERED = 4096
_DEATHS = 256

_T = TypeVar("_T")


@dataclass(slots=True)
class _Strike:
    engine: EngineId
    reason: str
    proven: bool = True
    """Whether that engine is known to have failed; a silent one may yet prove alive."""


@dataclass(slots=True)
class _Suspect:
    strikes: list[_Strike]
    """Engines that failed under it: one, or two until its verdict."""
    since_s: float
    trial: EngineId | None = None
    excused: bool = False
    tried: bool = False
    """Whether an engine failed in its trial."""
    verdict_s: float | None = None

    @property
    def doubted_only(self) -> bool:
        """Whether it is suspected for one silence that nothing has explained."""
        known = self.tried or self.trial is not None
        return not known and not any(strike.proven for strike in self.strikes)

    def spare(self, *, excused: bool = False) -> None:
        """Tries it again. The strike that stays is a proven one, if there is any."""
        self.verdict_s, self.excused = None, self.excused or excused
        self.strikes = sorted(self.strikes, key=lambda strike: not strike.proven)[:1]


@dataclass(frozen=True, slots=True)
class _Death:
    at_s: float
    requests: frozenset[str]


@dataclass(frozen=True, slots=True)
class RequestOnEngine:
    """A request that was on an engine when it died."""

    request: str
    age_s: float
    """Time since it came to that engine, in s."""
    tokens: int
    """Tokens generated on that engine."""
    usual_first_token_s: float = 0.0

    @property
    def just_begun(self) -> bool:
        first_step_s = max(KILLS_WITHIN_S, FIRST_STEPS * self.usual_first_token_s)
        return not self.tokens and self.age_s <= first_step_s


@dataclass(frozen=True, slots=True)
class _Quarantined:
    reason: str
    until_s: float


class BlamePolicy:
    """A suspect's `request` names a prompt, or a turn with the tokens generated so far."""

    def __init__(self, *, quiet_s: float = QUIET_S, held_s: float = HELD_S) -> None:
        self._quiet_s = quiet_s
        self._held_s = held_s
        self._lost_s = float("-inf")
        """Time of the latest death, proven or not."""
        self._deaths: deque[_Death] = deque(maxlen=_DEATHS)
        self._doubted: dict[EngineId, _Death] = {}
        """Possible deaths of silent engines, until each is proved or disproved."""
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._quarantined: OrderedDict[str, _Quarantined] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether no request is suspected or quarantined, so that no lookup is needed."""
        return not (self._suspects or self._quarantined)

    def suspected(self, request: str, *, now: float) -> bool:
        suspect = self._suspects.get(request)
        if suspect is None:
            return False
        if suspect.doubted_only and now >= suspect.since_s + self._held_s:
            # No verdict rests on such a silence, and one by one its turns would wait for minutes.
            del self._suspects[request]
            return False
        return True

    def quarantined(self, request: str, *, now: float) -> str:
        """The reason; empty where the request may run."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.verdict_s is not None and now >= suspect.verdict_s:
            if all(strike.proven for strike in suspect.strikes):
                self._quarantine(request, suspect, now)
            else:
                suspect.spare()
        held = self._quarantined.get(request)
        if held is not None and now >= held.until_s:
            del self._quarantined[request]
            held = None
        return held.reason if held else ""

    def trial_in_s(self, request: str, *, now: float) -> float:
        """Time until its trial may begin, in s."""
        suspect = self._suspects.get(request)
        if suspect is None:
            return 0.0
        return max(0.0, self._lost_s + self._quiet_s - now, (suspect.verdict_s or now) - now)

    def shunned(self, request: str, *, now: float) -> dict[EngineId, float]:
        """The engine that failed under it, and until when: it may be that engine's own fault."""
        suspect = self._suspects.get(request)
        until_s = suspect.since_s + self._held_s if suspect else now
        return {suspect.strikes[0].engine: until_s} if suspect and now < until_s else {}

    def placed(self, request: str, engine: EngineId) -> None:
        """A suspect goes on there: its trial."""
        suspect = self._suspects.get(request)
        if suspect is not None:
            suspect.trial = engine

    def served(self, request: str, engine: EngineId) -> None:
        """Clears the suspect: it ended there, or made CLEARED_TOKENS."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.trial == engine:
            del self._suspects[request]

    def left(self, request: str, engine: EngineId) -> None:
        """Ends the trial without a verdict on a healthy engine; the next place is a trial."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.trial == engine:
            suspect.trial = None

    def died(
        self,
        engine: EngineId,
        ran: Iterable[RequestOnEngine],
        *,
        reason: str,
        now: float,
        proven: bool = True,
    ) -> None:
        """The engine died with requests `ran` on it. Not `proven`: it is silent until `proved`."""
        ran = tuple(ran)
        if not ran:
            return
        believed: list[str] = []
        self._lost_s = now
        death = _Death(now, frozenset(one.request for one in ran))
        if proven:
            self._count(death)
        else:
            self._doubt(engine, death)
        for one in ran:
            suspect = self._suspects.get(one.request)
            if one.just_begun and suspect is not None and suspect.trial == engine:
                self._strike(one.request, suspect, _Strike(engine, reason, proven), now)
            elif one.just_begun or one.request not in self._suspects:
                # A request without a token in all that time did not kill the engine.
                if one.just_begun or one.tokens:
                    believed.append(one.request)
            elif one.tokens:
                self.left(one.request, engine)
            else:
                self.served(one.request, engine)
        self._fail(_Strike(engine, reason, proven), believed, now)

    def proved(self, engine: EngineId, *, dead: bool, now: float) -> None:
        """A silent engine has died, or it lives and its silence was no death."""
        death = self._doubted.pop(engine, None)
        if death is None:
            return
        if dead:
            self._count(death)
        for request in sorted(death.requests & self._suspects.keys()):
            suspect = self._suspects[request]
            struck = [each for each in suspect.strikes if each.engine == engine and not each.proven]
            for strike in struck:
                strike.proven = dead
                if not dead:
                    suspect.strikes.remove(strike)
            if struck and not suspect.strikes:
                del self._suspects[request]
            elif struck and len(suspect.strikes) == 1:
                suspect.verdict_s = None
            elif struck:
                self._excuse(request, suspect, now)

    def failed(self, engine: EngineId, requests: Iterable[str], *, reason: str, now: float) -> None:
        """Records that the engine failed while these requests ran; each is a suspect."""
        self._fail(_Strike(engine, reason), requests, now)

    def _fail(self, strike: _Strike, requests: Iterable[str], now: float) -> None:
        for request in sorted(set(requests)):
            suspect = self._suspects.get(request)
            if suspect is None:
                _remember(self._suspects, request, _Suspect([replace(strike)], now))
            elif suspect.trial == strike.engine:
                suspect.trial, suspect.tried, suspect.verdict_s = None, True, now + self._held_s
                suspect.strikes.append(replace(strike))
                if all(each.proven for each in suspect.strikes):
                    self._quarantine(request, suspect, now)

    def _strike(self, request: str, suspect: _Suspect, strike: _Strike, now: float) -> None:
        suspect.trial, suspect.tried, suspect.verdict_s = None, True, now + self._held_s
        suspect.strikes.append(strike)
        if strike.proven:
            self._excuse(request, suspect, now)

    def _excuse(self, request: str, suspect: _Suspect, now: float) -> None:
        """Excuses the suspect once if an engine without it died within COMMON_CAUSE_S."""
        recent = (each.requests for each in self._deaths if now - each.at_s <= COMMON_CAUSE_S)
        if not suspect.excused and any(request not in requests for requests in recent):
            suspect.spare(excused=True)

    def _count(self, death: _Death) -> None:
        for request, suspect in self._suspects.items():
            pending = suspect.verdict_s is not None and not suspect.excused
            if pending and request not in death.requests:
                suspect.spare(excused=True)
        self._deaths.append(death)

    def _doubt(self, engine: EngineId, death: _Death) -> None:
        for other, earlier in tuple(self._doubted.items()):
            if other == engine or death.at_s - earlier.at_s > COMMON_CAUSE_S:
                # No proof of this death can come any more.
                self.proved(other, dead=False, now=death.at_s)
        self._doubted[engine] = death

    def _quarantine(self, request: str, suspect: _Suspect, now: float) -> None:
        first, second = suspect.strikes
        reason = (
            f"engines failed twice under this request: {first.engine} ({first.reason}), then "
            f"{second.engine} ({second.reason}); it is not tried again"
        )
        del self._suspects[request]
        _remember(self._quarantined, request, _Quarantined(reason, now + QUARANTINE_S))


def _remember(held: OrderedDict[str, _T], request: str, what: _T) -> None:
    held[request] = what
    if len(held) > _REMEMBERED:
        held.popitem(last=False)
