"""Did a reply keep to its pin of versions, and may a pin excuse that there is none? Pure.

The gateway may refuse an exact pin: with 409, to be asked again, if no engine came to serve the
version within the client's patience, and with 410 if a newer one has taken its place. Then it may
also end a turn that has tokens and lost its engine, which Tinker's route answers as a refusal. It
may do none of this otherwise.

A `max_lag` is a least version, from the newest when the turn arrived: at least what the gateway had
answered for by then, or what an engine had made tokens with. All tokens of a turn with
`equal_numerics` are made by engines of one label.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from benchmarks.migration.records import AttemptRecord, HeldRecord, RequestRecord
from benchmarks.migration.replies import Reply


@dataclass(frozen=True, slots=True)
class Announcement:
    """The trainer's word to the gateway that a version is published."""

    sent_s: float
    answered_s: float = inf
    """Every dedicated engine serves it by then."""


class PinExcuse(StrEnum):
    REFUSED = "refused: 409"
    GONE = "gone: 410"
    CUT = "cut with its tokens"


def excuse(
    asked: Sequence[RequestRecord], reply: Reply, announced: Mapping[int, Announcement]
) -> PinExcuse | None:
    """The excuse that the request's exact pin gives for a turn without its whole answer. `asked`:
    the request as often as it was sent; a turn's patience counts from the first time."""
    request = asked[-1]
    exact, refusal = request.pin.get("exact"), request.refusal
    if exact is None or reply.finish_reasons[-1:] not in ([], ["abort"]):
        return None
    newer = (one.sent_s for version, one in announced.items() if version > exact)
    is_past = any(sent_s <= request.ended_s for sent_s in newer)
    if reply.finish_reasons:
        return PinExcuse.CUT if reply.token_ids and reply.fault and is_past else None
    if "ended early" in request.tinker_error.get("error", "") and is_past:
        return PinExcuse.GONE
    if refusal == 409:
        waited = request.ended_s - asked[0].sent_s >= request.pin["wait_s"]
        own = announced.get(exact)
        served = own is not None and own.answered_s <= asked[0].sent_s
        # A stream and Tinker's reply have no header of their own.
        tells_when = bool(request.retry_after) or request.status == 200
        return PinExcuse.REFUSED if waited and tells_when and not served else None
    return PinExcuse.GONE if refusal == 410 and is_past else None


def breaks_pin(pin: Mapping[str, Any], version: int, *, newest: int) -> bool:
    """`newest`: the least version that was surely published when the turn arrived."""
    least, exact = int(pin.get("minimum", 0)), int(pin.get("exact", version))
    if "max_lag" in pin:
        least = max(least, newest - int(pin["max_lag"]))
    return version < least or version != exact


def known_since(
    announced: Mapping[int, Announcement],
    attempts: Iterable[AttemptRecord],
    held: Iterable[HeldRecord],
) -> dict[int, float]:
    """The time by which each version had been published to the gateway for sure."""
    since = {version: one.answered_s for version, one in announced.items()}
    versions = {one.identity: one.version for one in held}
    for attempt in attempts:
        version = versions.get(attempt.identity)
        if version in since and attempt.passed:
            since[version] = min(since[version], attempt.passed[0][0])
    return since


def other_numerics(
    required: bool | str, engines: Iterable[str], labels: Mapping[str, str]
) -> list[str]:
    """Labels that the engines of a turn's tokens had beside the one that they may have: that of the
    first, or the one that is asked for."""
    found = list(dict.fromkeys(labels.get(engine, "") for engine in engines))
    if not required or not found:
        return []
    own = required if isinstance(required, str) else found[0]
    return [each for each in found if each != own]
