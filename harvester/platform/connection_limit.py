"""The connections of one server, and which of them go where there are too many.

Applied as a connection is accepted: before TLS, and before anything is read. A connection has
proved itself once a request on it was let in; it is never closed for another one.
"""

import asyncio
import resource
import socket
from contextlib import ExitStack, suppress
from typing import Any

_DESCRIPTORS_SHARE = 4
"""Connections take at most half of a process's descriptors: `ConnectionLimit` keeps twice its
number while those that it closes end."""


class ConnectionLimit:
    def __init__(self, most: int) -> None:
        """`most`: bound on connections; lower if the process may have few descriptors. A further
        connection replaces the oldest one that has not proved itself."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        share = descriptors // _DESCRIPTORS_SHARE
        self.most = min(most, share) if descriptors != resource.RLIM_INFINITY else most
        self._unproven: dict[int, socket.socket] = {}
        self._proven: dict[int, socket.socket] = {}
        self._ending: dict[int, socket.socket] = {}

    def listeners(self, host: str, port: int, *, backlog: int) -> list["LimitedListener"]:
        """A socket for each address of `host`, whose name may have to be looked up meanwhile.
        Raises OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listeners = list[LimitedListener]()
        with ExitStack() as failed:
            for family, address in dict.fromkeys((family, at) for family, _, _, _, at in found):
                plain = socket.create_server(address, family=family, backlog=backlog)
                listeners.append(failed.enter_context(LimitedListener(plain.detach(), self)))
            failed.pop_all()
        return listeners

    def takes(self, connection: socket.socket) -> bool:
        """Whether a new connection may stay; ends the one whose place it takes."""
        for held in (self._unproven, self._proven, self._ending):
            for number in [number for number, each in held.items() if each.fileno() < 0]:
                del held[number]
        if len(self._unproven) + len(self._proven) >= self.most:
            if not self._unproven or len(self._ending) >= self.most:
                return False
            number = next(iter(self._unproven))
            oldest = self._ending[number] = self._unproven.pop(number)
            with suppress(OSError):  # Its peer may have just left.
                # The event loop sees an end, and closes it.
                oldest.shutdown(socket.SHUT_RDWR)
        self._unproven[connection.fileno()] = connection
        return True

    def prove(self, transport: asyncio.BaseTransport | None) -> None:
        """A request on this connection was let in."""
        known = None if transport is None else transport.get_extra_info("socket")
        if known is not None and (one := self._unproven.pop(known.fileno(), None)) is not None:
            self._proven[known.fileno()] = one


class LimitedListener(socket.socket):
    """Hands out the connections that a limit takes; closes the others."""

    def __init__(self, number: int, limit: ConnectionLimit) -> None:
        super().__init__(fileno=number)
        self._limit = limit

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(self._limit.most):
            connection, address = super().accept()
            if self._limit.takes(connection):
                return connection, address
            connection.close()
        # The event loop does its other work, and comes back.
        raise BlockingIOError
