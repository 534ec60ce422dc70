"""Authentication of tenants by bearer tokens, from a file that only its owner can read."""

import hmac
import stat
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ConfigDict, Field, RootModel, ValidationError

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NAME_PATTERN, NAME_RULE, TenantId
from harvester.platform.bearer import MIN_TOKEN_BYTES, check_token_file, read_tokens
from harvester.platform.http_kit import prove_connection
from harvester.platform.openapi_document import PATH
from harvester.platform.renewed import Renewed
from harvester.platform.route_table import Callers, Route
from harvester.platform.yaml_file import FrozenSettings, parse_fields, read_text

OPERATOR, OBSERVER = TenantId("operator"), TenantId("observer")
"""No tenants: the first one's token is for all, the second one's reads status and metrics."""
TENANT: Final[web.RequestKey[TenantId | None]] = web.RequestKey("tenant")
"""The caller of a request, as `Tenants.caller` has it."""

Tokens = dict[bytes, TenantId]
Stores = dict[TenantId, list[str]]
_Token = Annotated[str, Field(min_length=MIN_TOKEN_BYTES)]
_TokenOrMore = _Token | Annotated[list[_Token], Field(min_length=1)]


class TenantSettings(FrozenSettings):
    token: _TokenOrMore
    """The token that the tenant sends; several while one is replaced."""
    stores: str | Annotated[list[str], Field(min_length=1)] = ""
    """Weight stores that a weight server or relay shows it: names, or patterns as job-a-*."""


class TenantTokens(
    RootModel[dict[Annotated[str, Field(pattern=NAME_PATTERN)], _TokenOrMore | TenantSettings]]
):
    """Tenants by name, each with its token; `operator` and `observer` are roles."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})


class Tenants:
    """Tenants by token, read again when the file changes; without a file every client that can
    connect is trusted."""

    def __init__(self, entries: Renewed[tuple[Tokens, Stores]] | None = None) -> None:
        self._entries = entries

    @classmethod
    def load(cls, path: Path | None) -> "Tenants":
        """Raises ConfigError, which shows no token."""
        return cls() if path is None else cls(Renewed([path], lambda: _read(path)))

    @classmethod
    def operators(cls, path: Path) -> "Tenants":
        """The operator alone: a file of tokens, one a line. Raises ConfigError."""
        return cls(Renewed([path], lambda: (dict.fromkeys(read_tokens(path), OPERATOR), {})))

    @property
    def open_to_all(self) -> bool:
        return self._entries is None

    def tenant_of(self, authorization: str) -> TenantId | None:
        """The tenant of the token in the header; all tokens are compared, in constant time each."""
        scheme, _, given = authorization.partition(" ")
        found = None
        for token, tenant in self._entries.current()[0].items() if self._entries else ():
            # aiohttp passes bytes that are no UTF-8 on as surrogates.
            if hmac.compare_digest(given.encode(errors="replace"), token):
                found = tenant
        return found if scheme.lower() == "bearer" else None

    def caller(self, authorization: str, callers: Callers = Callers.TENANTS) -> TenantId | None:
        """The tenant; None: the operator, the observer, and everyone without tokens. Raises
        HTTPUnauthorized, and HTTPForbidden for one that is not of the `callers`."""
        if self.open_to_all:
            return None
        tenant = self.tenant_of(authorization)
        if tenant is None:
            raise web.HTTPUnauthorized(reason="send Authorization: Bearer <token>")
        if tenant == OBSERVER and callers not in (Callers.READERS, Callers.OBSERVERS):
            raise web.HTTPForbidden(reason=f"the token of {OBSERVER} reads status and metrics")
        if tenant in (OPERATOR, OBSERVER):
            return None
        if callers in (Callers.OBSERVERS, Callers.OPERATOR):
            raise web.HTTPForbidden(reason=f"send the token of {callers}")
        return tenant

    def reads(self, tenant: TenantId | None, store: str) -> bool:
        """Whether the store is one of the caller's: the file's `stores` name or match it."""
        patterns = self._entries.current()[1].get(tenant, ()) if self._entries and tenant else "*"
        return any(fnmatchcase(store, pattern) for pattern in patterns)


def tenant_required(tenants: Tenants, routes: Iterable[Route]) -> Middleware:
    """Refuses requests without a token of the file that the path's route asks for, but for probes;
    sets TENANT."""
    known = {PATH: Callers.READERS, "/healthz": Callers.ANYONE}
    known |= {route.path: route.callers for route in routes}

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        callers = known.get(request.path, Callers.TENANTS)
        if callers is not Callers.ANYONE:
            sent = request.headers.get("Authorization", "")
            request[TENANT] = tenants.caller(sent, callers)
            prove_connection(request)
        return await handler(request)

    return middleware


def _read(path: Path) -> tuple[Tokens, Stores]:
    check_token_file(path, open_to=stat.S_IRGRP | stat.S_IROTH)
    # Errors of this reader show no line of the file, which holds tokens.
    given = {str(name): entry for name, entry in parse_fields(read_text(path), path).items()}
    if not given:
        raise ConfigError(f"token file {path}: write one 'tenant: token' per line")
    try:
        entries = TenantTokens.model_validate(given).root
    except ValidationError as error:
        name, *within = error.errors()[0]["loc"]
        if within == ["[key]"]:
            raise ConfigError(f"{path}: {name!r} is no tenant: {NAME_RULE}") from None
        raise ConfigError(
            f"{name} in {path}: give a token of {MIN_TOKEN_BYTES} characters or more, a list of "
            "them, or token and stores, which are names, or patterns as job-a-*"
        ) from None
    tokens: Tokens = {}
    stores: Stores = {}
    for name, entry in entries.items():
        fields = entry if isinstance(entry, TenantSettings) else TenantSettings(token=entry)
        tenant = TenantId(name)
        for token in _listed(fields.token):
            if tokens.setdefault(token.encode(), tenant) != tenant:
                raise ConfigError(f"{path}: {name} and {tokens[token.encode()]} have one token")
        stores[tenant] = _listed(fields.stores)
        if tenant in (OPERATOR, OBSERVER) and "stores" in fields.model_fields_set:
            raise ConfigError(f"{path}: {OPERATOR} reads every store, {OBSERVER} none")
    return tokens, stores


def _listed(given: str | list[str]) -> list[str]:
    return given if isinstance(given, list) else [given]
