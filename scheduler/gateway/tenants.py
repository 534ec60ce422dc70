"""Authentication of tenants by bearer tokens, from a file that only its owner can read."""

import hmac
import stat
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import TenantId, checked_name
from harvester.platform.bearer import MIN_TOKEN_BYTES, check_token_file
from harvester.platform.renewed import Renewed
from harvester.platform.yaml_file import parse_fields, read_text

OPERATOR, OBSERVER = TenantId("operator"), TenantId("observer")
"""No tenants: the first one's token is for all jobs, the second one's reads status and metrics."""

Tokens = dict[bytes, TenantId]


class Tenants:
    """Tenants by token, read again when the file changes; without a file every client that can
    connect is trusted."""

    def __init__(self, tokens: Renewed[Tokens] | None = None) -> None:
        self._tokens = tokens

    @classmethod
    def load(cls, path: Path | None) -> "Tenants":
        """Raises ConfigError, which shows no token."""
        return cls() if path is None else cls(Renewed([path], lambda: _read(path)))

    @property
    def open_to_all(self) -> bool:
        return self._tokens is None

    def tenant_of(self, authorization: str) -> TenantId | None:
        """The tenant of the token in the header; all tokens are compared, in constant time each."""
        scheme, _, given = authorization.partition(" ")
        found = None
        for token, tenant in self._tokens.current().items() if self._tokens else ():
            # aiohttp passes bytes that are no UTF-8 on as surrogates.
            if hmac.compare_digest(given.encode(errors="replace"), token):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _read(path: Path) -> Tokens:
    check_token_file(path, open_to=stat.S_IRGRP | stat.S_IROTH)
    # Errors of this reader show no line of the file: tokens stand there.
    given = parse_fields(read_text(path), path)
    if not given:
        raise ConfigError(f"token file {path}: write one 'tenant: token' per line")
    tokens: Tokens = {}
    for tenant, values in given.items():
        name = TenantId(checked_name(str(tenant), what="tenant"))
        for token in values if isinstance(values, list) and values else [values]:
            if not isinstance(token, str) or len(token) < MIN_TOKEN_BYTES:
                raise ConfigError(
                    f"token of {name} in {path}: use {MIN_TOKEN_BYTES} characters or more"
                )
            if tokens.setdefault(token.encode(), name) != name:
                raise ConfigError(f"{path}: {name} and {tokens[token.encode()]} have one token")
    return tokens
