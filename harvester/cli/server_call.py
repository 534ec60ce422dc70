"""One call of a command to an agent or a gateway, and the options for its credentials."""

import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted
from harvester.platform.tls import Credentials

_TIMEOUT_S = 5.0
_MAX_REPLY_BYTES = 1 << 20
_SHOWN_BYTES = 300
T = TypeVar("T")

TokenToSend = Annotated[Path | None, typer.Option(help="Token to send.")]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust besides the system's.")]
CertFile = Annotated[
    Path | None, typer.Option(help="This client's certificate, for a server that asks for one.")
]
KeyFile = Annotated[Path | None, typer.Option(help="Its private key.")]


def credentials_of(
    token_file: Path | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> Credentials:
    """Raises ConfigError for half of a client certificate."""
    if (cert_file is None) != (key_file is None):
        raise ConfigError("a client certificate needs both --cert-file and --key-file")
    return Credentials(
        token_file=token_file, ca_file=ca_file, cert_file=cert_file, key_file=key_file
    )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token is for the given URL; urllib sends it to any other host too."""

    def redirect_request(self, *_: Any) -> None:
        return None


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
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{option} {url}: use http://HOST:PORT")
    if exposed := credentials.exposed_at(url):
        raise ConfigError(exposed)
    headers = {"Content-Type": "application/json", **credentials.headers()}
    data = None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
    tls = credentials.tls() if url.startswith("https://") else None
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=tls))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            return msgspec.json.decode(reply.read(most_bytes), type=answer)
    except urllib.error.HTTPError as error:
        with error:
            shown = error.read(_SHOWN_BYTES).decode(errors="replace")
        raise Exhausted(f"{url} refuses: HTTP {error.code}: {shown}") from error
    except (OSError, HTTPException, *UNDECODABLE) as error:
        raise Exhausted(f"{url} gives no answer: {error}") from error
