"""Base path of a job, /jobs/NAME: every route again, for clients that can send no header.

A name selects one of the configured jobs, and nothing else: it is no path of a file.
"""

from collections.abc import Iterable

from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId, checked_name
from harvester.contracts.wire.leases import JOB_HEADER

JOB_BASE = "/jobs/{base_job}"


def with_base_paths(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The routes, and each of them again under the base path of a job."""
    plain = list(routes)
    based = [
        web.RouteDef(each.method, JOB_BASE + each.path, each.handler, each.kwargs) for each in plain
    ]
    return plain + based


def route_of(request: web.Request) -> str:
    """The route's template without the base path of a job; a path that is no route as it is."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical.removeprefix(JOB_BASE)


def job_named(request: web.Request) -> JobId | None:
    """The job that the path names, else the header; None where neither does.

    Raises PeerProtocolError where the route and its base path name different jobs.
    """
    matched = request.match_info
    named = {matched[each] for each in ("job", "base_job") if each in matched}
    if len(named) > 1:
        raise PeerProtocolError("the path names two jobs; leave the base path out")
    given = next(iter(named), request.headers.get(JOB_HEADER))
    return None if given is None else JobId(checked_name(given, what="job"))
