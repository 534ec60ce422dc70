"""What a service tells systemd: that it is ready, alive, stopping. Nothing without systemd."""

import asyncio
import contextlib
import os
import socket

_WATCHDOG_SHARE = 4
"""Notifications per watchdog period."""


def notify(message: str) -> None:
    """sd_notify(3); nothing where the environment has no NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        # The abstract namespace, whose addresses begin with a zero byte.
        address = "\0" + address[1:]
    # systemd may be gone or slow; that never stops the service.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
    ):
        channel.sendto(message.encode(), address)


def alive_period_s() -> float:
    """Seconds between two notifications of `WATCHDOG=1`; 1.0 without a watchdog."""
    watchdog_us = os.environ.get("WATCHDOG_USEC", "")
    watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() else 0.0
    return (watchdog_s or 4.0) / _WATCHDOG_SHARE


async def stay_alive() -> None:
    """Notifies as long as the event loop runs: systemd restarts a service whose loop hangs."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(alive_period_s())
