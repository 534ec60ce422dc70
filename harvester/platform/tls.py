"""TLS and tokens as every RoseMux service describes them: a server's files, a client's files.

Files are read again when they change: certificates and tokens are rotated without a restart.
"""

import re
import ssl
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from harvester.contracts.errors import ConfigError, config_error_of
from harvester.platform.bearer import authorization, is_loopback, read_token
from harvester.platform.certificate_expiry import note_expiry
from harvester.platform.renewed import Renewed
from harvester.platform.yaml_file import FrozenSettings

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?!.{{254}}){_LABEL}(\.{_LABEL})*")


def is_server_name(name: str) -> bool:
    """Whether a certificate may have it as the name of a host."""
    return _NAME.fullmatch(name) is not None


class ServerTls(FrozenSettings):
    """TLS of a server, 1.2 or later."""

    cert_file: Path
    """Certificate chain, PEM."""
    key_file: Path
    """Private key of `cert_file`, PEM."""
    client_ca_file: Path | None = None
    """Clients must show a certificate that one of these signed."""

    def context(self) -> ssl.SSLContext:
        """The context to listen with. Raises ConfigError if a file cannot be used."""
        files = [self.cert_file, self.key_file, self.client_ca_file]
        renewed = Renewed(filter(None, files), self._read)

        def take_newest(connection: ssl.SSLObject, _name: object, _listening: object) -> None:
            connection.context = renewed.current()

        # A listening context keeps the files that it has read; this is called by each handshake.
        context = renewed.current()
        context.sni_callback = take_newest
        return context

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        _load_chain(context, self.cert_file, self.key_file)
        if self.client_ca_file is not None:
            _trust(context, self.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would outlive the certificates that began it.
        context.num_tickets, context.options = 0, context.options | ssl.OP_NO_TICKET
        return context


def server_tls(
    cert: Path | None, key: Path | None, client_ca: Path | None = None
) -> ServerTls | None:
    """TLS of a command's options. Raises ConfigError for half of it."""
    if cert is not None and key is not None:
        return ServerTls(cert_file=cert, key_file=key, client_ca_file=client_ca)
    if cert is None and key is None and client_ca is None:
        return None
    raise ConfigError("TLS needs both --cert and --key")


def open_to_network(
    host: str, token_file: Path | None, tls: ServerTls | None, plain_http: bool
) -> str:
    """Why a server must not listen at this address; "" if it may."""
    if is_loopback(host):
        return ""
    if token_file is None and (tls is None or tls.client_ca_file is None):
        return (
            f"host {host} is not loopback: set token_file, or tls.client_ca_file, or host to "
            "127.0.0.1"
        )
    if tls is None and not plain_http:
        return (
            f"host {host} is not loopback: set tls (cert_file, key_file), or plain_http: true if a "
            "proxy or mesh in front of this process has TLS"
        )
    return ""


class Credentials(FrozenSettings):
    """A client's own proof to a server, and the certificates by which it knows that server."""

    token_file: Path | None = None
    """Bearer token to send: never by plain HTTP to another machine."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's."""
    cert_file: Path | None = None
    """Client certificate for a server that requires one, PEM."""
    key_file: Path | None = None
    """Private key of `cert_file`, PEM."""
    server_name: str | None = None
    """Name that the server's certificate must have, and that it is asked for (SNI); by default the
    URL's host. For a server that is called at an address, such as a pod."""

    @field_validator("server_name")
    @classmethod
    def _certifiable(cls, name: str | None) -> str | None:
        if name is not None and not is_server_name(name):
            raise ValueError(f"server_name: {name[:80]!r} is no name of a server: use HOST.DOMAIN")
        return name

    @model_validator(mode="after")
    def _whole_pair(self) -> "Credentials":
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs both cert_file and key_file")
        return self

    @property
    def are_given(self) -> bool:
        """Whether any field is set."""
        return self.token_file is not None or self.has_own_tls

    @property
    def has_own_tls(self) -> bool:
        """Whether TLS with this server differs from that with others, whose connections it must
        not share then."""
        return any((self.ca_file, self.cert_file, self.server_name))

    def check(self, *urls: str) -> None:
        """Raises ConfigError if a file cannot be used, or a URL would expose the token."""
        if why := next(filter(None, map(self.exposed_at, urls)), ""):
            raise ConfigError(why)
        self.headers()
        if self.has_own_tls:
            self.tls()

    def exposed_at(self, url: str) -> str:
        """Why the token must not be sent to this URL; "" if it may."""
        if self.token_file is None:
            return ""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            return f"token_file: {url!r} is no URL: {error}"
        if parts.scheme == "https" or is_loopback(parts.hostname or ""):
            return ""
        return (
            f"token_file: {url} is plain HTTP to another machine, where others can read the token; "
            "use https://, for an engine through `rosemux engine-proxy` on its machine"
        )

    def headers(self) -> dict[str, str]:
        """Raises ConfigError if the token's file cannot be used at the first call."""
        return authorization("" if self._token is None else self._token.current().decode())

    def tls(self) -> ssl.SSLContext:
        """The context to connect with. Raises ConfigError if a file cannot be used at first."""
        return self._tls.current()

    @cached_property
    def _token(self) -> Renewed[bytes] | None:
        path = self.token_file
        return None if path is None else Renewed([path], lambda: read_token(path))

    @cached_property
    def _tls(self) -> Renewed[ssl.SSLContext]:
        return Renewed(filter(None, [self.ca_file, self.cert_file, self.key_file]), self._read)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self.ca_file is not None:
            _trust(context, self.ca_file)
        if self.cert_file is not None and self.key_file is not None:
            _load_chain(context, self.cert_file, self.key_file)
        return context


NO_CREDENTIALS: Final = Credentials()


def _trust(context: ssl.SSLContext, ca_file: Path) -> None:
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:
        raise config_error_of(error)(f"cannot use the CA file {ca_file}: {error}") from error


def _load_chain(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    try:
        # Without a password OpenSSL asks the terminal for one.
        context.load_cert_chain(cert_file, key_file, password=_no_password)
        note_expiry(context, cert_file)
    except (OSError, ValueError) as error:
        raise config_error_of(error)(f"cannot use {cert_file} with {key_file}: {error}") from error


def _no_password() -> str:
    raise ConfigError("the key has a password: give a key file without one, mode 600")
