"""Keeps whole answers for a while: a client whose connection broke gets the same one again.

    kept       turns that ended with stop or length, by request
    for        keep_s after the request's last client left, or after it was given again
    evicted    beyond a bound: the oldest request of the tenant that holds most

Holds the turns themselves, so that an answer is given again in any form. Reads no clock.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from harvester.contracts.ids import JobId, TenantId
from harvester.contracts.wire.rollouts import GenerateRequest
from scheduler.gateway.policy.turn import Turn, turn_key

_ID_BYTES = 40
"""Memory of a token id in a tuple, in bytes."""
_PROMPT_ID_BYTES = _ID_BYTES + 8
"""Memory of a prompt's token id, as a tuple item and as JSON, in bytes."""
_JSON_BYTES = 16
"""Memory of one byte of JSON once decoded to maps or lists, in bytes."""
_TOKEN_BYTES = 200
"""Memory of a generated token with its log-probability, or of one candidate, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBounds:
    keep_s: float
    turns: int
    size_bytes: int


@dataclass(slots=True)
class _Answer:
    """One request's turns by key."""

    turns: dict[str, Turn] = field(default_factory=dict)
    size_bytes: int = 0
    until_s: float = math.inf


@dataclass(slots=True)
class _Shelf:
    """One tenant's answers by request, the oldest first."""

    answers: OrderedDict[str, _Answer] = field(default_factory=OrderedDict)
    turns: int = 0
    size_bytes: int = 0


class AnsweredTurns:
    def __init__(self, bounds: AnswerBounds) -> None:
        self._bounds = bounds
        self._shelves: dict[TenantId, _Shelf] = {}
        self._requests: dict[str, tuple[TenantId, str]] = {}
        """Request of each turn, by the turn's key."""

    def reconfigure(self, bounds: AnswerBounds) -> None:
        """Answers beyond these bounds go with the next one that is kept."""
        self._bounds = bounds

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the kept answers, in bytes."""
        return sum(shelf.size_bytes for shelf in self._shelves.values())

    def __contains__(self, turn: str) -> bool:
        return turn in self._requests

    def keep(self, turn: Turn, *, tenant: TenantId, request: str) -> None:
        """A turn of the request has ended whole. `request`: unique over all jobs."""
        if not self._bounds.keep_s:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf())
        answer = shelf.answers.setdefault(request, _Answer())
        # Samples of one request share its content.
        size_bytes = size_of(turn) + (0 if answer.turns else _size_of_request(turn.request))
        answer.turns[turn.key], answer.until_s = turn, math.inf
        answer.size_bytes += size_bytes
        shelf.answers.move_to_end(request)
        shelf.turns += 1
        shelf.size_bytes += size_bytes
        self._requests[turn.key] = tenant, request
        while len(self._requests) > self._bounds.turns:
            self._evict(max(self._shelves, key=lambda each: self._shelves[each].turns))
        while self.size_bytes > self._bounds.size_bytes:
            self._evict(max(self._shelves, key=lambda each: self._shelves[each].size_bytes))

    def left(self, tenant: TenantId, request: str, *, now: float) -> None:
        """No client waits for a turn of the request any more."""
        shelf = self._shelves.get(tenant)
        if shelf is not None and request in shelf.answers:
            shelf.answers[request].until_s = now + self._bounds.keep_s
            shelf.answers.move_to_end(request)

    def find(self, turn: str, *, now: float) -> tuple[Turn, str] | None:
        """The answered turn with this key, and the request that it is a part of."""
        self.expire(now=now)
        if turn not in self._requests:
            return None
        tenant, request = self._requests[turn]
        return self._shelves[tenant].answers[request].turns[turn], request

    def given_again(self, turn: str, *, now: float) -> None:
        """Extends the time for which the turn found is kept."""
        tenant, request = self._requests[turn]
        if self._shelves[tenant].answers[request].until_s < math.inf:
            self.left(tenant, request, now=now)

    def expire(self, *, now: float) -> None:
        for tenant, shelf in tuple(self._shelves.items()):
            due = []
            for request, answer in shelf.answers.items():
                if now < answer.until_s < math.inf:
                    # Answers with a finite `until_s` are sorted by it.
                    break
                if answer.until_s <= now:
                    due.append(request)
            for request in due:
                self._drop(tenant, request)

    def forget(self, job: JobId) -> None:
        """Drops the job's answers, and no other's."""
        for tenant, shelf in tuple(self._shelves.items()):
            for request in [each for each in shelf.answers if each.startswith(turn_key(job, ""))]:
                self._drop(tenant, request)

    def _evict(self, tenant: TenantId) -> None:
        self._drop(tenant, next(iter(self._shelves[tenant].answers)))

    def _drop(self, tenant: TenantId, request: str) -> None:
        shelf = self._shelves[tenant]
        answer = shelf.answers.pop(request)
        shelf.turns -= len(answer.turns)
        shelf.size_bytes -= answer.size_bytes
        for turn in answer.turns:
            del self._requests[turn]
        if not shelf.answers:
            del self._shelves[tenant]


def _size_of_request(request: GenerateRequest) -> int:
    fields = msgspec.json.encode(msgspec.structs.replace(request, token_ids=()))
    return len(request.token_ids) * _PROMPT_ID_BYTES + len(fields) * _JSON_BYTES


def size_of(turn: Turn) -> int:
    """Approximate memory of an ended turn without its request, in bytes."""
    sampling, scores = turn.request.sampling_params, turn.scores
    candidates = (sampling.logprobs or 0) + len(sampling.logprob_token_ids or ())
    scored = len(bytes(scores.prompt_logprobs or b"")) if scores else 0
    return (
        len(turn.token_ids) * _TOKEN_BYTES * (1 + candidates)
        + len(turn.routed_experts or "")
        + len(str(turn.stop_reason))
        + turn.masked_ids * _ID_BYTES
        + scored
        + _TOKEN_BYTES
    )
