"""The process of a weight server or relay: from its address to its last transfer."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.platform import http_kit
from harvester.platform.bearer import is_loopback
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.server import ServingLimits, WeightServer
from weightsync.serve.shelf import Shelf


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
    stop = http_kit.stop_event()
    metrics = TransferMetrics()
    shelf = shelf_with(metrics)
    server = WeightServer(shelf, token=listening.token, limits=limits, metrics=metrics)
    try:
        async with http_kit.serving(server.app()) as runner:
            remedy = "choose another --port, 0 takes a free one"
            host, port, tls = listening.host, listening.port, _tls(listening)
            started(await http_kit.listen(runner, host, port, remedy=remedy, tls=tls))
            await stop.wait()
    finally:
        await shelf.close()


def _tls(listening: Listening) -> ssl.SSLContext | None:
    if listening.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listening.cert, listening.key)
    except OSError as error:
        raise ConfigError(f"cannot use {listening.cert} with {listening.key}: {error}") from error
    return context
