"""The process of a weight server or relay: from its address to its last transfer."""

import asyncio
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from harvester.contracts.errors import ConfigError
from harvester.platform.bearer import is_loopback
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.server import ServingLimits, WeightServer
from weightsync.serve.shelf import Shelf

_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Address and credentials of a server. Raises ConfigError if it would be open to any client."""

    host: str = "127.0.0.1"
    port: int = 9731
    token: bytes | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} is not loopback: give --token-file, or listen on 127.0.0.1"
            )
        if (self.cert is None) != (self.key is None):
            raise ConfigError("TLS needs both --cert and --key")


async def listen(
    shelf_with: Callable[[TransferMetrics], Shelf],
    listening: Listening,
    limits: ServingLimits,
    *,
    started: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; `started` is called with the URL. Raises ConfigError."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = TransferMetrics()
    shelf = shelf_with(metrics)
    server = WeightServer(shelf, token=listening.token, limits=limits, metrics=metrics)
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    try:
        await runner.setup()
        started(await _bound(runner, listening))
        await stop.wait()
    finally:
        await runner.cleanup()
        await shelf.close()


async def _bound(runner: web.AppRunner, listening: Listening) -> str:
    site = web.TCPSite(runner, listening.host, listening.port, ssl_context=_tls(listening))
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listening.host}:{listening.port}: {error.strerror}; "
            "choose another --port, 0 takes a free one"
        ) from error
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if listening.cert is None else 'https'}://{shown}:{port}"


def _tls(listening: Listening) -> ssl.SSLContext | None:
    if listening.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listening.cert, listening.key)
    except OSError as error:
        raise ConfigError(f"cannot use {listening.cert} with {listening.key}: {error}") from error
    return context
