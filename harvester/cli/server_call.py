"""One call of a command to an agent or a gateway, and the options for its credentials."""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.platform.blocking_peer import BlockingPeer
from harvester.platform.tls import Credentials, is_server_name

_TIMEOUT_S = 5.0
_MAX_REPLY_BYTES = 1 << 20
T = TypeVar("T")

TokenToSend = Annotated[Path | None, typer.Option(help="Token to send.")]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust besides the system's.")]
CertFile = Annotated[
    Path | None, typer.Option(help="This client's certificate, for a server that asks for one.")
]
KeyFile = Annotated[Path | None, typer.Option(help="Its private key.")]
ServerName = Annotated[
    str | None, typer.Option(help="Name in the server's certificate, if not the URL's host.")
]


def credentials_of(
    token_file: Path | None,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    server_name: str | None,
) -> Credentials:
    """Raises ConfigError for half of a client certificate, and for a name that is none."""
    if (cert_file is None) != (key_file is None):
        raise ConfigError("a client certificate needs both --cert-file and --key-file")
    if server_name is not None and not is_server_name(server_name):
        raise ConfigError(f"--server-name {server_name}: is no name of a server")
    return Credentials(
        token_file=token_file,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        server_name=server_name,
    )


def call(
    url: str,
    path: str,
    answer: type[T],
    credentials: Credentials,
    *,
    option: str,
    body: msgspec.Struct | None = None,
    most_bytes: int = _MAX_REPLY_BYTES,
) -> T:
    """POST of a body, else GET. `option` is the flag that named the URL. Raises ConfigError for a
    URL that cannot be called, and Exhausted for a server that refuses or gives no answer."""
    peer = BlockingPeer.at(url, credentials, name=option)
    data = None if body is None else msgspec.json.encode(body)
    try:
        reply = peer.answer(path, data, timeout_s=_TIMEOUT_S, most_bytes=most_bytes)
        return msgspec.json.decode(reply, type=answer)
    except UNDECODABLE as error:
        raise Exhausted(f"{option} {url}{path} gives no answer: {error}") from error
    except (Stale, PeerProtocolError) as error:
        raise Exhausted(str(error)) from error
