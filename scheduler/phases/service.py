"""The phase control as a process of its own, on a Unix socket that only its user may open.

python -m scheduler.phases --socket FILE --state FILE [--journal DIRECTORY]
"""

import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec
from aiohttp import web

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError
from scheduler.phases.desk import PermitDesk
from scheduler.phases.front import Front
from scheduler.phases.status import statuses
from scheduler.policy.phases.terms import PermitsConfig

MAX_BODY_BYTES = 1 << 20
_SHUTDOWN_S = 1.0
_BACKLOG = 128


def application(front: Front) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES)

    async def call(request: web.Request) -> web.Response:
        try:
            body = await front.call(request.match_info["call"], await request.read())
        except PeerProtocolError as error:
            return web.json_response({"error": str(error)}, status=400)
        except Exhausted as error:
            return web.json_response({"error": str(error)}, status=503)
        return web.Response(body=body, content_type="application/json")

    async def status(_request: web.Request) -> web.Response:
        body = msgspec.json.encode(statuses(front.desk))
        return web.Response(body=body, content_type="application/json")

    app.add_routes([web.post("/v1/phases/{call}", call), web.get("/v1/phases", status)])
    return app


def listening_socket(path: Path) -> socket.socket:
    """Bound for this user alone; a file that an earlier control left is replaced.

    Raises ConfigError where a control answers there, or where the file cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_left_over(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The file gets its mode from the umask: none may connect between bind and chmod.
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


def _remove_left_over(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"another phase control listens on {path}")


async def serve(
    path: Path,
    config: PermitsConfig,
    *,
    state: Path | None,
    journal: Path | None,
    clock: Clock | None = None,
) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError where it cannot start."""
    clock = clock or MonotonicClock()
    listening = listening_socket(path)
    desk = PermitDesk(config, clock, state=state, journal=journal)
    front = Front(desk, clock)
    runner = web.AppRunner(
        application(front),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
    )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await runner.setup()
        await web.SockSite(runner, listening).start()
        ticking = asyncio.ensure_future(front.tick())
        stopping = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({ticking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        # An error of the desk ends the process: its state is on disk, its holders go on.
        if ticking.done():
            ticking.result()
        ticking.cancel()
    finally:
        await runner.cleanup()
        desk.close()
        path.unlink(missing_ok=True)
