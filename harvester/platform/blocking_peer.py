"""HTTP without an event loop: connections with TLS and a token, and one call with a bounded reply.

Follows no redirection and no proxy of the environment: a token is for one server.
"""

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
    RemoteDisconnected,
)
from types import SimpleNamespace
from typing import Self
from urllib.parse import SplitResult, urlsplit

from harvester.contracts.errors import (
    ConfigError,
    Exhausted,
    PeerProtocolError,
    Stale,
    message_of,
    reason_of,
)
from harvester.platform.tls import NO_CREDENTIALS, Credentials

_SHOWN_CHARS = 300


class WholeReply(HTTPResponse):
    """http.client takes a head that is cut short for a short head; here it is a broken one."""

    def begin(self) -> None:
        file, last = self.fp, b""

        def readline(limit: int = -1) -> bytes:
            nonlocal last
            last = file.readline(limit)
            return last

        self.fp = SimpleNamespace(readline=readline, close=file.close)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = file
        if last not in {b"\r\n", b"\n"}:
            raise IncompleteRead(last)


class BlockingPeer:
    """One HTTP server that this thread calls, over a connection for each call."""

    def __init__(
        self,
        name: str,
        connect: Callable[[float], HTTPConnection],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        base: str = "",
    ) -> None:
        """`name`: begins every error. `connect`: gives a connection with that timeout in s, not yet
        open. `base`: before every path. Raises ConfigError as `Peer`."""
        credentials.check()
        self._name, self._connect, self._credentials = name, connect, credentials
        self._base = base

    @classmethod
    def at(cls, url: str, credentials: Credentials = NO_CREDENTIALS, *, name: str) -> Self:
        """`name` says what the URL is. Raises ConfigError as `Peer`, and for no URL of a server."""
        if (address := http_address(url)) is None:
            raise ConfigError(f"{name} {url}: use http://HOST:PORT")
        credentials.check(url)
        connect = partial(connection_to, address, credentials)
        return cls(f"{name} {url}", connect, credentials, base=address.path)

    def answer(
        self, path: str, body: bytes | None = None, *, timeout_s: float, most_bytes: int
    ) -> bytes:
        """The reply to a POST of the body, without one to a GET; at most `most_bytes` of it.

        Raises Exhausted without a whole reply or with a server's error, Stale for 409,
        PeerProtocolError for any other refusal.
        """
        connection, what = self._connect(timeout_s), self._name + path
        headers = {"Content-Type": "application/json", **self._credentials.headers()}
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, self._base + path, body, headers)
            with connection.getresponse() as response:  # It owns a connection that ends with it.
                answer = response.read(most_bytes)
                if response.length and len(answer) < most_bytes:
                    raise IncompleteRead(answer, response.length)
        except (OSError, HTTPException) as error:
            raise Exhausted(f"{what} gives no answer: {why_broken(connection, error)}") from error
        finally:
            connection.close()
        if response.status == HTTPStatus.OK:
            return answer
        refusal = f"{what} refuses: HTTP {response.status}: {message_of(answer)[:_SHOWN_CHARS]}"
        if response.status == HTTPStatus.CONFLICT:
            raise Stale(refusal)
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Exhausted(refusal)
        raise PeerProtocolError(refusal)


def http_address(url: str) -> SplitResult | None:
    """The parts of an HTTP server's URL; None for any other text."""
    try:
        address = urlsplit(url.rstrip("/"))
        known = address.scheme in {"http", "https"} and address.hostname and address.port != 0
        known = known and not any(map(str.isspace, url))
    except ValueError:
        return None
    return address if known else None


def base_url(url: object, *, name: str, example: str) -> str:
    """The URL without a slash at its end. Raises ConfigError, which says `name` and `example`, for
    anything else than an HTTP server's, with a path at most."""
    address = http_address(url) if isinstance(url, str) else None
    if address is None or address.query or address.fragment or address.username is not None:
        raise ConfigError(f"{name} {url!r}: give a URL as {example}")
    return address.geturl()


class _TlsConnection(HTTPSConnection):
    """http.client knows a server by the host at which it calls it; this, by a name if one is
    given."""

    def __init__(
        self, host: str, port: int | None, timeout_s: float, credentials: Credentials
    ) -> None:
        self._tls, self._server_name = credentials.tls(), credentials.server_name or host
        super().__init__(host, port, timeout=timeout_s, context=self._tls)

    def connect(self) -> None:
        HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


def connection_to(
    address: SplitResult, credentials: Credentials, timeout_s: float
) -> HTTPConnection:
    """A connection that is not open yet."""
    host, port = address.hostname or "", address.port
    connection = (
        _TlsConnection(host, port, timeout_s, credentials)
        if address.scheme == "https"
        else HTTPConnection(host, port, timeout=timeout_s)
    )
    connection.response_class = WholeReply
    return connection


def why_broken(connection: HTTPConnection, error: Exception) -> str:
    """The words for a connection's fault."""
    why = str(getattr(error, "strerror", None) or reason_of(error))
    if isinstance(connection, HTTPSConnection) and isinstance(error, RemoteDisconnected):
        why += "; does it require a client certificate, and know ours?"
    return why
