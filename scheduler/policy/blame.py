"""Whether a request is at fault when engines fail under it.

    an engine dies, or answers a request with a failure     each request on it is a suspect
    a suspect goes on                                       on trial: no second one on that engine
    it makes CLEARED_TOKENS there, or ends                  it is none any more
    an engine fails under a request on trial                quarantined: two engines failed under it

A request that kills at some place of its content fails in the first step of its trial, because it
goes on from the tokens that it has, so it costs two engines. A bystander is cleared within a few
steps, whatever the engine that it was on died of. Requests that fail before their first token are
one request where their prompts are: a group of samples costs two engines as well, and not two each.
Opens no connection and reads no clock.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from harvester.contracts.ids import EngineId

CLEARED_TOKENS = 4
"""Engines schedule a step or two ahead, so the first tokens of a trial may still come."""

QUARANTINE_S = 600.0
"""A client that sends the request again for this long is told the reason at once."""

_REMEMBERED = 4096

_T = TypeVar("_T")


@dataclass(slots=True)
class _Suspect:
    engine: EngineId
    reason: str
    trial: EngineId | None = None


@dataclass(frozen=True, slots=True)
class _Quarantined:
    reason: str
    until_s: float


class BlamePolicy:
    """`request` names what is suspected: a prompt, or a turn with the tokens that it has."""

    def __init__(self) -> None:
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
        held = self._quarantined.get(request)
        if held is not None and now >= held.until_s:
            del self._quarantined[request]
            held = None
        return held.reason if held else ""

    def placed(self, request: str, engine: EngineId) -> None:
        """A suspect goes on there: its trial."""
        suspect = self._suspects.get(request)
        if suspect is not None:
            suspect.trial = engine

    def served(self, request: str, engine: EngineId) -> None:
        """It ended there, or made CLEARED_TOKENS."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.trial == engine:
            del self._suspects[request]

    def left(self, request: str, engine: EngineId) -> None:
        """It left a healthy engine before it was cleared: its next place is its trial."""
        suspect = self._suspects.get(request)
        if suspect is not None and suspect.trial == engine:
            suspect.trial = None

    def failed(self, engine: EngineId, requests: Iterable[str], *, reason: str, now: float) -> None:
        """The engine died with these on it, or lives and failed this one alone."""
        for request in sorted(set(requests)):
            suspect = self._suspects.get(request)
            if suspect is not None and suspect.trial == engine:
                del self._suspects[request]
                told = (
                    f"engines failed twice under this request: {suspect.engine} "
                    f"({suspect.reason}), then {engine} ({reason}); it is not tried again"
                )
                _remember(self._quarantined, request, _Quarantined(told, now + QUARANTINE_S))
            elif suspect is None:
                _remember(self._suspects, request, _Suspect(engine, reason))


def _remember(held: OrderedDict[str, _T], request: str, what: _T) -> None:
    held[request] = what
    if len(held) > _REMEMBERED:
        held.popitem(last=False)
