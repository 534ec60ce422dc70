"""A reply that is cut short is no reply, and a call goes to its server alone."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.platform.blocking_peer import BlockingPeer


@contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """A server of one call, which reads its head, sends these bytes and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def answer(url: str) -> bytes:
    return BlockingPeer.at(url, name="server").answer("/", timeout_s=5.0, most_bytes=1000)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 10\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_server_that_goes_within_its_reply_has_not_refused_the_call(reply: bytes) -> None:
    with replying(reply) as url, pytest.raises(Exhausted, match=url):
        answer(url)


@pytest.mark.parametrize(
    ("status", "error"), [("302 Found", PeerProtocolError), ("409 Conflict", Stale)]
)
def test_a_refusal_is_reported_with_its_status(status: str, error: type[Exception]) -> None:
    body = b'{"error": "why"}'
    head = f"HTTP/1.1 {status}\r\nLocation: /x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with replying(head + body) as url, pytest.raises(error, match=f"HTTP {status[:3]}: why"):
        answer(url)


def test_no_proxy_of_the_environment_gets_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with replying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as url:
        assert answer(url) == b"{}"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:8o", "http://h:99999", "http://["])
def test_a_url_that_is_no_address_of_a_server_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="use http://HOST:PORT"):
        BlockingPeer.at(url, name="server")
