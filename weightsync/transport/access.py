"""Client settings for a store over a network: token, trust, streams and retries."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harvester.contracts.errors import ConfigError
from harvester.platform.backoff import RetryLimits
from harvester.platform.bearer import read_token

VARIABLES = {
    "token_file": "ROSEMUX_WEIGHT_TOKEN_FILE",
    "ca_file": "ROSEMUX_WEIGHT_CA_FILE",
    "cert_file": "ROSEMUX_WEIGHT_CERT_FILE",
    "key_file": "ROSEMUX_WEIGHT_KEY_FILE",
    "server_name": "ROSEMUX_WEIGHT_SERVER_NAME",
}
"""Environment variables of an engine's process that name the files, and the server's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    token_file: Path | None = None
    """Holds the token to send; read again when it changes."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's; read again when they change."""
    cert_file: Path | None = None
    """Client certificate for a server that requires one; read again when it changes."""
    key_file: Path | None = None
    server_name: str | None = None
    """Name in the server's certificate; by default the URL's host."""
    streams: int = 4
    """Ranges read in parallel."""
    range_bytes: int = 8 << 20
    """Bytes of one request; a broken connection loses far less."""
    connect_s: float = 10.0
    stall_s: float = 20.0
    """Seconds without a byte after which a connection counts as broken."""
    retries: RetryLimits = field(default_factory=RetryLimits)

    def __post_init__(self) -> None:
        if self.streams < 1 or self.range_bytes < 1:
            raise ConfigError("streams and range_bytes must be at least 1")
        if (self.cert_file is None) != (self.key_file is None):
            names = VARIABLES["cert_file"], VARIABLES["key_file"]
            raise ConfigError(f"a client certificate needs its key too: set {' and '.join(names)}")
        if self.server_name is not None:
            # Only now: readers of plain HTTP and of directories need no TLS.
            from harvester.platform.tls import is_server_name

            if not is_server_name(self.server_name):
                given = f"{VARIABLES['server_name']}: {self.server_name[:80]!r}"
                raise ConfigError(f"{given} is no name of a server")

    @classmethod
    def from_environment(cls, **given: Path | None) -> Self:
        """The environment's files, where a command gives no file. Raises ConfigError."""
        files: dict[str, Any] = {name: path for name, path in given.items() if path}
        for name, variable in VARIABLES.items():
            if path := os.environ.get(variable):
                files.setdefault(name, path if name == "server_name" else Path(path))
        access = cls(**files)
        if access.token_file is not None:
            try:
                read_token(access.token_file)
            except ConfigError as error:
                if given.get("token_file"):
                    raise
                raise ConfigError(f"{VARIABLES['token_file']}: {error}") from error
        return access
