"""One HTTP server that this process calls, with the credentials for it."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from harvester.platform.tls import NO_CREDENTIALS, Credentials

_Reply = AbstractAsyncContextManager[aiohttp.ClientResponse]


class Peer:
    """Raises ConfigError where its token would be sent by plain HTTP to another machine, or a file
    of the credentials cannot be used.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        credentials.check(url)
        self.url = url.rstrip("/")
        self._session = session
        self._credentials = credentials

    def get(self, path: str, **options: Any) -> _Reply:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> _Reply:
        return self.request("POST", path, **options)

    def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> _Reply:
        """Like aiohttp's. Returns a redirection and does not follow it: it could lead anywhere."""
        sent = (headers or {}) | self._credentials.headers()
        # True: the system's certificates. Plain HTTP ignores it, and the server's name.
        tls = self._credentials.tls() if self._credentials.has_own_tls else True
        return self._session.request(
            method,
            self.url + path,
            headers=sent,
            ssl=tls,
            server_hostname=self._credentials.server_name,
            allow_redirects=False,
            **options,
        )
