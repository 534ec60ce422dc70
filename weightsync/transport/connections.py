"""Connections to one HTTP server, kept open between requests. Judges no answer but its end."""

import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from threading import Lock
from urllib.parse import SplitResult

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.platform.backoff import Interrupted
from harvester.platform.blocking_peer import connection_to, why_broken
from harvester.platform.tls import Credentials
from weightsync.transport.access import VARIABLES, Access


class Connections:
    """Thread-safe; holds at most as many idle connections as there are streams, and sends the
    token with each request."""

    def __init__(self, address: SplitResult, access: Access) -> None:
        self._address, self._access = address, access
        self._name = f"{address.hostname}:{address.port}"
        self._credentials = Credentials(**{name: getattr(access, name) for name in VARIABLES})
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._closed = False
        self._lock = Lock()

    @contextmanager
    def answer(
        self, method: str, target: str, headers: Mapping[str, str], *, timeout_s: float
    ) -> Iterator[HTTPResponse]:
        """The answer to one request; raises Interrupted where the connection breaks in the block.

        The connection serves again only where the answer was read to its end.
        """
        connection, answer = self._taken(timeout_s), None
        try:
            connection.request(method, target, headers={**headers, **self._credentials.headers()})
            answer = connection.getresponse()
            yield answer
        except FileNotFoundError:
            raise
        except (OSError, HTTPException) as error:
            raise Interrupted(f"{self._name}: {why_broken(connection, error)}") from error
        finally:
            with self._lock:
                self._busy.discard(connection)
            if answer is not None and answer.isclosed() and answer.length == 0:
                self._give_back(connection)
            else:
                if answer is not None:
                    # http.client lets go of an answer that ends with its connection.
                    answer.close()
                connection.close()

    def close(self) -> None:
        """Ends open requests in all threads, and no further request is made."""
        with self._lock:
            self._closed = True
            idle, self._idle, busy = self._idle, [], set(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            # Closing it here would pull it from under the thread that reads; this wakes it.
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _taken(self, timeout_s: float) -> HTTPConnection:
        with self._lock:
            if self._closed:
                raise Exhausted(f"{self._name}: this reader was closed")
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connected()
        connection.sock.settimeout(timeout_s)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _connected(self) -> HTTPConnection:
        connection = connection_to(self._address, self._credentials, self._access.connect_s)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{self._address.hostname}'s certificate is not trusted: {error.verify_message}; "
                "give the CA's file"
            ) from error
        except OSError as error:
            raise Interrupted(f"cannot reach {self._name}: {error}") from error
        return connection

    def _give_back(self, connection: HTTPConnection) -> None:
        # http.client has closed it where the server asked for that.
        if connection.sock is not None:
            with self._lock:
                if len(self._idle) < self._access.streams and not self._closed:
                    self._idle.append(connection)
                    return
        connection.close()
