"""Connections whose other side has gone without a packet: its machine was cut off or restarted, or
a balancer dropped a connection on which a request waits for long.
"""

import asyncio
import socket
import struct
from typing import Any

UNREACHABLE_S = 60.0
_PROBES = 3
_TCP_INFO = struct.Struct("2xBB52xI")
"""Unanswered retransmissions and probes, and milliseconds since the last acknowledgement."""


def keep_alive(connection: Any, *, within_s: float = UNREACHABLE_S) -> Any:
    """The connection, if any; its system finds within about `within_s`, while no byte is on its
    way, that the other side has gone.

    No TCP_USER_TIMEOUT: it would find the same of a stream, but also end one whose client lives and
    reads nothing for a while, as a trainer's event loop does in a training step."""
    every_s = max(1, round(within_s / (2 * _PROBES)))
    options = (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", max(1, round(within_s) - _PROBES * every_s)),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", every_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", _PROBES),
    )
    for level, name, value in options if connection is not None else ():
        if hasattr(socket, name):  # macOS, where clients may run, lacks some.
            connection.setsockopt(level, getattr(socket, name), value)
    return connection


async def end_unreachable(
    transport: asyncio.Transport | None, *, within_s: float = UNREACHABLE_S
) -> None:
    """Ends a connection whose other side acknowledges nothing for `within_s`: what runs for it is
    then cancelled. Cancel it with the request that it watches.

    TCP sends no keep-alive probe while a stream's bytes are unacknowledged, and gives up after some
    15 minutes. The machine of a caller that lives and reads nothing answers the probes of its
    closed window."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    if transport is None or connection is None or transport.is_closing():
        return
    keep_alive(connection, within_s=within_s)
    while True:
        await asyncio.sleep(within_s / 4)
        if transport.is_closing():
            return
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        retransmissions, probes, silent_ms = _TCP_INFO.unpack(info)
        # The first may have been sent at this moment, after a pause of minutes between probes.
        if max(retransmissions, probes) > 1 and silent_ms >= 1000 * within_s:
            transport.abort()
