"""The process of a weight server or relay: from its address to its last transfer."""

from collections.abc import Callable
from dataclasses import dataclass

from harvester.contracts.errors import ConfigError
from harvester.platform import http_kit
from harvester.platform.bearer import is_loopback
from harvester.platform.tls import ServerTls
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.server import ServingLimits, WeightServer
from weightsync.serve.shelf import Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Address and credentials of a server. Raises ConfigError if it would be open to any client."""

    host: str = "127.0.0.1"
    port: int = 9731
    token: bytes | None = None
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} is not loopback: give --token-file, or listen on 127.0.0.1"
            )


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
            host, port, tls = listening.host, listening.port, listening.tls
            started(await http_kit.listen(runner, host, port, remedy=remedy, tls=tls))
            await stop.wait()
    finally:
        await shelf.close()
