"""Client settings for a store over a network: token, trust, streams and retries."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from harvester.contracts.errors import ConfigError
from harvester.platform.backoff import RetryLimits
from harvester.platform.bearer import read_token

TOKEN_VARIABLE = "ROSEMUX_WEIGHT_TOKEN_FILE"
CA_VARIABLE = "ROSEMUX_WEIGHT_CA_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    token_file: Path | None = None
    """Holds the token to send; read again when it changes."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's; read again when they change."""
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

    @classmethod
    def from_environment(cls, token_file: Path | None = None, ca_file: Path | None = None) -> Self:
        """Settings of an engine's process; a command gives its own files. Raises ConfigError."""
        token, ca = (os.environ.get(name) for name in (TOKEN_VARIABLE, CA_VARIABLE))
        token_file = token_file or (Path(token) if token else None)
        if token_file is not None:
            read_token(token_file)
        return cls(token_file=token_file, ca_file=ca_file or (Path(ca) if ca else None))
