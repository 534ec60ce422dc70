"""sd_notify(3): tells systemd that the agent is ready, alive, reloading or stopping.

Without NOTIFY_SOCKET in the environment every call does nothing.
"""

import contextlib
import os
import socket
from collections.abc import Mapping

from harvester.contracts.clock import monotonic_ns


class Notifier:
    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ names the abstract namespace, whose addresses begin with a zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        self.watchdog_s: float | None = int(watchdog_us) / 1e6 if watchdog_us.isdigit() else None

    def ready(self) -> None:
        self._send("READY=1")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # systemd may be gone or slow; that never stops the agent.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
        ):
            channel.sendto(message.encode(), self._address)
