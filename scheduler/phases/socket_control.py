"""The phase control in another process of this machine, over its Unix socket."""

import http.client
import socket
from http import HTTPStatus
from pathlib import Path

import msgspec

from harvester.contracts.errors import Exhausted, PeerProtocolError
from scheduler.phases.wire import Absent, Call, Enter, Reply, decoded_reply

MAX_REPLY_BYTES = 1 << 20
_ANSWER_S = 5.0


class SocketControl:
    """A transport. A connection for each call: calls are rare, and come from several threads."""

    def __init__(self, path: Path, *, answer_s: float = _ANSWER_S) -> None:
        self._path = path
        self._answer_s = answer_s

    def call(self, name: str, message: Call) -> Reply:
        """Raises Absent, Exhausted, or PeerProtocolError where the control refuses the call."""
        timeout_s = self._answer_s + (message.wait_s if isinstance(message, Enter) else 0.0)
        connection = _UnixConnection(self._path, timeout_s)
        try:
            connection.request("POST", f"/v1/phases/{name}", msgspec.json.encode(message))
            response = connection.getresponse()
            body = response.read(MAX_REPLY_BYTES)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise Absent(f"no phase control at {self._path}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Exhausted(f"{name} at {self._path}: {error!r}") from error
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            said = f"{name} at {self._path}: {response.status} {body[:300]!r}"
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise Exhausted(said)
            raise PeerProtocolError(said)
        return decoded_reply(body)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
