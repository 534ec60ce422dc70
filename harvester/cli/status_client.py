"""An agent's slots as `rosemux status` and `rosemux top` ask for them, and the options for that."""

import urllib.request
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted
from harvester.contracts.wire.leases import SlotOffers
from harvester.platform.tls import Credentials

TokenFileOption = Annotated[Path | None, typer.Option(help="The agent's token.")]
CaFileOption = Annotated[
    Path | None, typer.Option(help="Certificates to trust besides the system's.")
]
CertFileOption = Annotated[
    Path | None, typer.Option(help="This client's certificate, for an agent that asks for one.")
]
KeyFileOption = Annotated[Path | None, typer.Option(help="Its private key.")]

_TIMEOUT_S = 3.0
_MAX_REPLY_BYTES = 1 << 20


def credentials(
    token_file: Path | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> Credentials:
    """Raises ConfigError for half a certificate."""
    if (cert_file is None) != (key_file is None):
        raise ConfigError("a client certificate needs both --cert-file and --key-file")
    return Credentials(
        token_file=token_file, ca_file=ca_file, cert_file=cert_file, key_file=key_file
    )


class StatusClient:
    def __init__(self, url: str, credentials: Credentials) -> None:
        """Raises ConfigError for another URL than one of HTTP, or one that would show the token."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"agent {url}: use http://HOST:PORT")
        if exposed := credentials.exposed_at(url):
            raise ConfigError(exposed)
        self.url = url.rstrip("/")
        self._headers = credentials.headers()
        self._tls = credentials.tls() if url.startswith("https://") else None

    def ask(self) -> SlotOffers:
        """Raises Exhausted without an answer."""
        request = urllib.request.Request(self.url + "/v1/slots", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._tls) as reply:
                return msgspec.json.decode(reply.read(_MAX_REPLY_BYTES), type=SlotOffers)
        except (OSError, *UNDECODABLE) as error:
            raise Exhausted(f"agent at {self.url} gives no answer: {error}") from error
