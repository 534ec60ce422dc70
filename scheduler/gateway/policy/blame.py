"""Decides whether a request is at fault when engines fail under it.

    an engine dies, or answers a request with a failure     each request on it is a suspect
    no engine has died for QUIET_S                          a suspect goes on: on trial, no second
                                                            one on that engine
    it makes CLEARED_TOKENS there, or ends                  the suspicion is dropped
    the engine of its trial dies in its first step,         quarantined: two engines failed under it
    before a token of it, or answers it with a failure
    that engine dies later                                  a suspect as before

A request that kills at one position of its content fails in the first step of its trial, because
the trial continues from the tokens already generated; it costs two engines. A later death counts as
a stopped engine. Requests that fail before their first token are merged by prompt, so a group of
samples also costs two engines, not two each. A request is excused once if another engine dies
within WAVE_S without it: that is a restart. Two requests that kill at the same time may cost three
engines each.
Opens no connection and reads no clock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
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
"""A request waits this long for its verdict: another engine may die without it."""

WAVE_S = 60.0
"""Deaths this close together may have one cause."""

QUARANTINE_S = 60.0
"""A client that resends the request within this time gets the reason at once."""

_REMEMBERED = 4096
_DEATHS = 256

_T = TypeVar("_T")


@dataclass(slots=True)
class _Suspect:
    engine: EngineId
    reason: str
    since_s: float
    trial: EngineId | None = None
    excused: bool = False
    verdict: str = ""
    verdict_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ran:
    """A request that was on an engine when it died."""

    request: str
    age_s: float
    """Time since it came to that engine, in s."""
    tokens: int
    """Made there."""
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
    """`request` identifies the suspect: a prompt, or a turn with the tokens generated so far."""

    def __init__(self, *, quiet_s: float = QUIET_S, held_s: float = HELD_S) -> None:
        self._quiet_s = quiet_s
        self._held_s = held_s
        self._deaths: deque[tuple[float, frozenset[str]]] = deque(maxlen=_DEATHS)
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._quarantined: OrderedDict[str, _Quarantined] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Nothing is suspected or quarantined, so that nothing need be looked up."""
        return not (self._suspects or self._quarantined)

    def suspected(self, request: str) -> bool:
        return request in self._suspects

    def quarantined(self, request: str, *, now: float) -> str:
        """The reason; empty where the request may run."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.verdict and now >= suspect.verdict_s:
            self._quarantine(request, suspect.verdict, now)
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
        quiet_s = self._deaths[-1][0] + self._quiet_s if self._deaths else now
        return max(0.0, quiet_s - now, suspect.verdict_s - now if suspect.verdict else 0.0)

    def shunned(self, request: str, *, now: float) -> dict[EngineId, float]:
        """The engine that failed under it, and until when: it may be that engine's own fault."""
        suspect = self._suspects.get(request)
        until_s = suspect.since_s + self._held_s if suspect else now
        return {suspect.engine: until_s} if suspect and now < until_s else {}

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
        """Ends its trial without a verdict: it left a healthy engine, so its next place is one."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.trial == engine:
            suspect.trial = None

    def died(self, engine: EngineId, ran: Iterable[Ran], *, reason: str, now: float) -> None:
        """The engine died with these on it."""
        ran = tuple(ran)
        if not ran:
            return
        names, believed = frozenset(one.request for one in ran), []
        self._excuse_all_but(names)
        self._deaths.append((now, names))
        for one in ran:
            suspect = self._suspects.get(one.request)
            if one.just_begun and suspect is not None and suspect.trial == engine:
                self._judge_later(one.request, suspect, engine, reason, now)
            elif one.just_begun or one.request not in self._suspects:
                # Without a token in all that time, it was not what the engine died of.
                if one.just_begun or one.tokens:
                    believed.append(one.request)
            elif one.tokens:
                self.left(one.request, engine)
            else:
                self.served(one.request, engine)
        self.failed(engine, believed, reason=reason, now=now)

    def failed(self, engine: EngineId, requests: Iterable[str], *, reason: str, now: float) -> None:
        """The engine failed under these for all that is known."""
        for request in sorted(set(requests)):
            suspect = self._suspects.get(request)
            if suspect is not None and suspect.trial == engine:
                self._quarantine(request, _verdict(suspect, engine, reason), now)
            elif suspect is None:
                _remember(self._suspects, request, _Suspect(engine, reason, now))

    def _judge_later(
        self, request: str, suspect: _Suspect, engine: EngineId, reason: str, now: float
    ) -> None:
        """Excused once if engines die without it as well: they die of something else."""
        suspect.trial = None
        wave = (names for at_s, names in self._deaths if now - at_s <= WAVE_S)
        if not suspect.excused and any(request not in names for names in wave):
            suspect.excused = True
        else:
            suspect.verdict = _verdict(suspect, engine, reason)
            suspect.verdict_s = now + self._held_s

    def _excuse_all_but(self, names: frozenset[str]) -> None:
        for request, suspect in self._suspects.items():
            if suspect.verdict and not suspect.excused and request not in names:
                suspect.excused, suspect.verdict = True, ""

    def _quarantine(self, request: str, reason: str, now: float) -> None:
        del self._suspects[request]
        _remember(self._quarantined, request, _Quarantined(reason, now + QUARANTINE_S))


def _verdict(suspect: _Suspect, engine: EngineId, reason: str) -> str:
    return (
        f"engines failed twice under this request: {suspect.engine} "
        f"({suspect.reason}), then {engine} ({reason}); it is not tried again"
    )


def _remember(held: OrderedDict[str, _T], request: str, what: _T) -> None:
    held[request] = what
    if len(held) > _REMEMBERED:
        held.popitem(last=False)
