"""The phase control in another process of this machine, over its Unix socket."""

import os
import socket
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import TypeVar

import msgspec

from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted, PeerProtocolError
from harvester.platform.blocking_peer import BlockingPeer, WholeReply
from harvester.platform.tls import Credentials
from scheduler.rollmux.cluster.runtime_events import Call
from scheduler.rollmux.control.wire import (
    ControlUnreachable,
    JobStatus,
    Reply,
    call_name,
    decoded_reply,
    encoded_call,
)
from scheduler.rollmux.permits.events import Enter

MAX_REPLY_BYTES = 1 << 20
MAX_STATUS_BYTES = 64 << 20
"""Bound of a status reply: thousands of jobs on a thousand nodes each."""
_ANSWER_S = 5.0
_PATH_MAX_BYTES = 107
"""Linux's `sun_path`, without its final zero byte."""
T = TypeVar("T")


def socket_path(path: Path) -> Path:
    """Raises ConfigError for a path that no Unix socket can have."""
    if (size := len(os.fsencode(path))) > _PATH_MAX_BYTES:
        raise ConfigError(f"socket path of {size} bytes, above {_PATH_MAX_BYTES}: {path}")
    return path


class SocketTransport:
    """Transport over the control's Unix socket; opens a connection for each call."""

    def __init__(
        self, path: Path, *, token_file: Path | None = None, answer_s: float = _ANSWER_S
    ) -> None:
        """Raises ConfigError for a path that is too long, and where the token's file cannot be
        used; the file is followed later."""
        self._path = socket_path(path)
        self._peer = BlockingPeer(
            f"unix:{path}:", partial(_UnixConnection, path), Credentials(token_file=token_file)
        )
        self._answer_s = answer_s

    def call(self, message: Call) -> Reply:
        """Raises ConfigError, ControlUnreachable, Exhausted, or PeerProtocolError if refused."""
        wait_s = message.wait_s if isinstance(message, Enter) else 0.0
        route, body = f"/v1/phases/{call_name(message)}", encoded_call(message)
        return decoded_reply(self._answer(route, body, MAX_REPLY_BYTES, wait_s))

    def jobs(self) -> tuple[JobStatus, ...]:
        """Status of every job that the caller may see. Raises as `call` does."""
        return self._shown("/v1/phases", tuple[JobStatus, ...])

    def journal(self) -> Path:
        """The directory of the control's journal.

        Raises ConfigError where it writes none, else as `call` does.
        """
        where = self._shown("/v1/journal", dict[str, str | None]).get("directory")
        if where is None:
            raise ConfigError(f"the control at {self._path} was started without --journal")
        return Path(where)

    def _shown(self, route: str, kind: type[T]) -> T:
        body = self._answer(route, None, MAX_STATUS_BYTES)
        try:
            return msgspec.json.decode(body, type=kind)
        except UNDECODABLE as error:
            raise PeerProtocolError(f"{route} at {self._path}: {error}") from error

    def _answer(
        self, route: str, body: bytes | None, most_bytes: int, wait_s: float = 0.0
    ) -> bytes:
        """The reply to a POST of the body, without one to a GET."""
        timeout_s = self._answer_s + wait_s
        try:
            return self._peer.answer(route, body, timeout_s=timeout_s, most_bytes=most_bytes)
        except Exhausted as error:
            if isinstance(why := error.__cause__, FileNotFoundError | ConnectionRefusedError):
                words = f"no phase control at {self._path}: {why.strerror}"
                raise ControlUnreachable(words) from error
            raise


class _UnixConnection(HTTPConnection):
    response_class = WholeReply

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
