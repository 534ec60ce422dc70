"""Reports of a service to systemd: that it serves, that its event loop goes on, that it stops."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator
from typing import Final

BEATS: Final = 4
"""Reports within a period of the watchdog."""


def notify(message: str) -> None:
    """sd_notify(3); nothing where the environment has no NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        # The abstract namespace, whose addresses begin with a zero byte.
        address = "\0" + address[1:]
    # systemd may be gone or slow; that never stops a service.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
    ):
        channel.sendto(message.encode(), address)


def watchdog_s() -> float:
    """Silence after which systemd ends this process; 0 without a watchdog."""
    given = os.environ.get("WATCHDOG_USEC", "")
    return int(given) / 1e6 if given.isdigit() else 0.0


@contextlib.asynccontextmanager
async def reporting() -> AsyncGenerator[None, None]:
    """Reports READY, the event loop's beats for a watchdog, and STOPPING."""
    loop, period_s = asyncio.get_running_loop(), watchdog_s() / BEATS
    ended = False

    def beat() -> None:
        if not ended:
            notify("WATCHDOG=1")
            loop.call_later(period_s, beat)

    notify("READY=1")
    if period_s:
        beat()
    try:
        yield
    finally:
        ended = True
        notify("STOPPING=1")
