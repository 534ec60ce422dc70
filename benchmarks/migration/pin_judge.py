"""Did a reply keep to its pin of versions, and may a pin excuse that there is none? Pure.

The gateway may refuse an exact pin: with 409, to be asked again, if no engine came to serve the
version within the client's patience, and with 410 if a newer one has taken its place. Then it may
also end a turn that has tokens and lost its engine. It may do none of this otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from benchmarks.migration.records import RequestRecord
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
    if refusal == 409:
        waited = request.ended_s - asked[0].sent_s >= request.pin["wait_s"]
        own = announced.get(exact)
        served = own is not None and own.answered_s <= asked[0].sent_s
        tells_when = bool(request.retry_after) or request.status == 200
        return PinExcuse.REFUSED if waited and tells_when and not served else None
    return PinExcuse.GONE if refusal == 410 and is_past else None


def breaks_pin(pin: Mapping[str, Any], version: int) -> bool:
    least, exact = int(pin.get("minimum", 0)), int(pin.get("exact", version))
    return version < least or version != exact
