"""Spans of replies whose route tells none, as the engines' taps saw them. Pure.

A token belongs to the last attempt that had it, and its version is what that engine's workers held.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from benchmarks.migration.records import AttemptRecord, HeldRecord, RequestRecord
from benchmarks.migration.replies import replies
from benchmarks.migration.rollout_routes import RolloutRoute, choice_name

UNTOLD = -1
"""The version of an engine that was gone before its workers reported what they held."""


def with_tap_spans(
    requests: Iterable[RequestRecord],
    attempts: Iterable[AttemptRecord],
    held: Iterable[HeldRecord],
) -> list[RequestRecord]:
    """The requests, those of Tinker's route with spans for each of their choices."""
    own: dict[str, list[AttemptRecord]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda one: (one.began_s, one.number)):
        own[choice_name(attempt.request_id)].append(attempt)
    versions = {each.identity: each.version for each in held}
    return [
        msgspec.structs.replace(
            request,
            tap_spans={
                index: _spans(
                    request, len(reply.token_ids), own[request.choice_name(index)], versions
                )
                for index, reply in replies(request).items()
            },
        )
        if request.route is RolloutRoute.TINKER
        else request
        for request in requests
    ]


def _spans(
    request: RequestRecord,
    tokens: int,
    attempts: Sequence[AttemptRecord],
    versions: dict[str, int],
) -> list[dict[str, Any]]:
    prompt = len(request.body["token_ids"])
    # The last one has the rest, if no engine sent it too.
    makers: dict[int, AttemptRecord] = {}
    for attempt in attempts:
        makers |= dict.fromkeys(range(max(0, len(attempt.context) - prompt), tokens), attempt)
    spans = []
    for _, places in groupby(sorted(makers), key=lambda at: makers[at].number):
        first, *_, last = [*(own := list(places)), own[-1]]
        maker = makers[first]
        version = versions.get(maker.identity, request.pin.get("exact", UNTOLD))
        span = {"start": first, "end": last + 1, "engine": maker.engine, "version": version}
        spans.append(span)
    return spans
