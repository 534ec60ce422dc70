"""The phase control as a separate process, on a Unix socket that only its user may open.

rosemux phases serve --socket FILE --state FILE [--nodes FILE] [--journal DIRECTORY]
                     [--metrics-port PORT] [--tenants FILE [--group GROUP]]

With tenants a group's users may open the socket; each call then carries a token.
"""

import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from grp import getgrnam
from pathlib import Path

from aiohttp import web

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.platform.http_kit import (
    errors_as_replies,
    listen,
    run_until,
    serving,
    stop_event,
    whole_body,
)
from harvester.platform.logs import begin_log
from harvester.platform.openapi_document import serve_routes
from harvester.platform.route_table import Callers, Route, metrics_route, routes_of, several
from harvester.platform.systemd import reporting
from harvester.platform.tenants import TENANT, Tenants, tenant_required
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.planning import compile_for, make_service
from scheduler.rollmux.control.socket_transport import socket_path
from scheduler.rollmux.control.wire import CALLS, JobStatus, Reply

MAX_BODY_BYTES = 1 << 20
_ERRORS = errors_as_replies({web.HTTPException: None})
_LOOPBACK = "127.0.0.1"
_SHUTDOWN_S = 1.0
_BACKLOG = 128


def application(api: AsyncPhaseApi) -> web.Application:
    own = PhaseRoutes(api)
    metrics = metrics_route(api.service.metrics, callers=Callers.OBSERVERS)
    routes = (*routes_of(own), metrics)
    known = tenant_required(api.owners.tenants, routes)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_ERRORS, known])
    serve_routes(app, "phase control", routes)
    app.add_routes([web.post("/v1/phases/{call}", own.call)])
    return app


class PhaseRoutes:
    def __init__(self, api: AsyncPhaseApi) -> None:
        self._api = api

    @several(
        Route(f"POST /v1/phases/{name}", "A call of docs/phases.md", kind, Reply, refuses=(503,))
        for name, kind in CALLS.items()
    )
    async def call(self, request: web.Request) -> web.Response:
        name = request.match_info.get("call", request.path.rpartition("/")[2])
        sent = await whole_body(request, most_bytes=MAX_BODY_BYTES)
        body = await self._api.call(name, sent, request[TENANT])
        return web.Response(body=body, content_type="application/json")

    @Route("GET /v1/phases", "Every job's status", callers=Callers.READERS)
    async def status(self, request: web.Request) -> tuple[JobStatus, ...]:
        found, shows = self._api.service.statuses(), self._api.owners.shows
        return tuple(each for each in found if shows(each.job, request[TENANT]))

    @Route("GET /v1/journal", "Where the journal's files are", callers=Callers.OBSERVERS)
    async def journal(self) -> dict[str, str | None]:
        # The client reads the journal's files itself: the control has no time for them.
        where = self._api.service.settings.journal
        return {"directory": None if where is None else str(where.resolve())}


@asynccontextmanager
async def exposition(
    service: PhaseService, tenants: Tenants | None = None
) -> AsyncGenerator[None, None]:
    """Serves metrics alone on a loopback port, since Prometheus connects to no Unix socket.

    Raises ConfigError where the port is taken. Without a port it does nothing.
    """
    port = service.settings.metrics_port
    if port is None:
        yield
        return
    metrics = metrics_route(service.metrics, callers=Callers.OBSERVERS)
    known = tenant_required(tenants or Tenants(), (metrics,))
    app = web.Application(middlewares=[_ERRORS, known])
    app.add_routes([metrics.definition()])
    async with serving(app, shutdown_s=_SHUTDOWN_S) as runner:
        await listen(runner, _LOOPBACK, port, remedy="set another --metrics-port")
        yield


def listening_socket(path: Path, *, group: str | None = None) -> socket.socket:
    """Bound for this user alone, or also for a group; a socket that an earlier control left is
    replaced. Raises ConfigError where a control answers there, or where the file cannot be made.
    """
    try:
        gid = None if group is None else getgrnam(group).gr_gid
        made = not path.parent.exists()
        socket_path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if gid is not None and made:
            _open_to(gid, path.parent, mode=0o710)
        _remove_left_over(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The file gets its mode from the umask: none may connect between bind and chmod.
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        if gid is not None:
            _open_to(gid, path, mode=0o660)
    except KeyError as error:
        raise ConfigError(f"this machine has no group {group}") from error
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


def _open_to(gid: int, path: Path, *, mode: int) -> None:
    os.chown(path, -1, gid)
    path.chmod(mode)


def _remove_left_over(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            # A plain file refuses the connection too, and is not deleted.
            if not path.is_socket():
                raise ConfigError(f"{path} is no socket: give another --socket") from None
            path.unlink()
            return
    raise ConfigError(f"another phase control listens on {path}")


async def serve(
    path: Path,
    settings: ControlSettings,
    *,
    tenants: Path | None = None,
    group: str | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError if it cannot start."""
    if group is not None and tenants is None:
        raise ConfigError("--group needs --tenants: each of its users could end every job's phases")
    begin_log()
    clock, known = MonotonicClock(), Tenants.load(tenants)
    compile_for(settings.cluster)
    listening = listening_socket(path, group=group)
    own_file = _file_at(path)
    service = make_service(settings, clock)
    api = AsyncPhaseApi(service, clock, known)
    stop = stop_event()
    try:
        async with serving(application(api), shutdown_s=_SHUTDOWN_S) as runner:
            await web.SockSite(runner, listening).start()
            async with exposition(service, known), reporting():
                # An error of the phase service ends the process: its state is on disk, its holders
                # go on.
                await run_until(stop, api.tick())
    finally:
        service.close()
        # A control that was started meanwhile has bound a socket of its own there.
        if _file_at(path) == own_file:
            path.unlink(missing_ok=True)


def _file_at(path: Path) -> tuple[int, int, int] | None:
    """Identity of a file. Numbers of inodes are given again: its time tells two of one number
    apart."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
