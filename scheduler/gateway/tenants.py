"""Authentication of tenants by bearer tokens, from a file that only its owner can read."""

import hmac
import stat
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import TenantId, checked_name
from harvester.platform.yaml_file import parse_fields, read_text

MIN_TOKEN_CHARS = 16


class Tenants:
    """Tenants by token; without any, every client on loopback is trusted."""

    def __init__(self, tokens: dict[TenantId, str]) -> None:
        self._tokens = tokens

    @classmethod
    def load(cls, path: Path | None) -> "Tenants":
        if path is None:
            return cls({})
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"cannot read token file {path}: {error.strerror}") from error
        # Errors of this reader show no line of the file: tokens stand there.
        given = parse_fields(read_text(path), path)
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            raise ConfigError(f"token file {path} can be read by others; chmod 600 it")
        if not given:
            raise ConfigError(f"token file {path}: write one 'tenant: token' per line")
        tokens: dict[TenantId, str] = {}
        for tenant, token in given.items():
            name = TenantId(checked_name(str(tenant), what="tenant"))
            if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS:
                raise ConfigError(
                    f"token of {name} in {path}: use {MIN_TOKEN_CHARS} characters or more"
                )
            tokens[name] = token
        return cls(tokens)

    @property
    def open_to_all(self) -> bool:
        return not self._tokens

    def tenant_of(self, authorization: str) -> TenantId | None:
        """The tenant of the token in the header; all tokens are compared, in constant time each."""
        scheme, _, given = authorization.partition(" ")
        found = None
        for tenant, token in self._tokens.items():
            if hmac.compare_digest(given.encode(), token.encode()):
                found = tenant
        return found if scheme.lower() == "bearer" else None
