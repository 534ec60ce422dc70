"""The job that a request names: by its path, its header, or the model of its body.

The base path /jobs/NAME has every route again, for clients that can send no header. A name selects
one of the configured jobs, and nothing else: it is no path of a file.
"""

from collections.abc import Collection
from typing import Any, Final

import msgspec
from aiohttp import web

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.ids import JobId, checked_name
from harvester.contracts.wire.leases import JOB_HEADER

JOB_BASE = "/jobs/{base_job}"
JOB_OF_MODEL: Final = web.RequestKey("job_of_model", JobId)
"""The job whose name the body has as its model."""
SHOWN_CHARS = 200
"""Bound on a name, or a list of names, in a message."""


class _Body(msgspec.Struct, frozen=True):
    model: Any = None


_BODY = msgspec.json.Decoder(_Body)


def route_of(request: web.Request) -> str:
    """The route's template without the base path of a job; a path that is no route as it is."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical.removeprefix(JOB_BASE)


def job_named(request: web.Request) -> JobId | None:
    """The job named by the path, else by the header, else by the body's model; None without a name.

    Raises PeerProtocolError where the route and its base path name different jobs.
    """
    matched = request.match_info
    named = {matched[each] for each in ("job", "base_job") if each in matched}
    if len(named) > 1:
        raise PeerProtocolError("the path names two jobs; leave the base path out")
    given = next(iter(named), request.headers.get(JOB_HEADER, request.get(JOB_OF_MODEL)))
    return None if given is None else JobId(checked_name(given, what="job"))


def job_of_model(body: bytes, jobs: Collection[JobId], models: Collection[str]) -> JobId | None:
    """The job of `jobs` that the body names as its model. `models`: names that models have.

    Raises PeerProtocolError where a model has the job's name, where neither a job nor a model has
    the body's, and for a body that is no JSON object.
    """
    try:
        model = _BODY.decode(body).model
    except UNDECODABLE as error:
        raise PeerProtocolError(f"body: {error}") from error
    if model not in jobs:
        if isinstance(model, str) and model not in models:
            raise PeerProtocolError(
                f"model: {model[:SHOWN_CHARS]!r} is neither a job of this caller nor a served "
                f"model; this caller has several jobs: {', '.join(jobs)[:SHOWN_CHARS]}"
            )
        return None
    if model in models:
        raise PeerProtocolError(
            f"model: {model} is a served model and a job; name the job by the header {JOB_HEADER}, "
            "or by the base path /jobs/NAME"
        )
    return JobId(model)
