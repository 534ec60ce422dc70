"""A store behind a RoseMux HTTP server, or any server of ranges with its listing.

A read goes on from where it was when its connection breaks, waits as long as a busy server asks,
and ends when nothing arrives any more. Redirects are not followed: a token is for one server.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from random import Random
from threading import Lock
from typing import TypeVar

import msgspec

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import UNDECODABLE, ConfigError, Corrupt, PeerProtocolError
from harvester.platform.backoff import Backoff, Interrupted, retry_after_s
from harvester.platform.blocking_peer import http_address
from weightsync.layout.names import LATEST_FILE, MAX_LATEST_BYTES
from weightsync.transport.access import Access
from weightsync.transport.connections import Connections
from weightsync.transport.ranges import ByteSpan, answered_span, range_header
from weightsync.transport.source import StoreSource
from weightsync.transport.wire import (
    MAX_LISTING_BYTES,
    MAX_NEWS_BYTES,
    NEWS_TYPE,
    News,
    StoreList,
    StoreVersions,
    index_etag,
    latest_etag,
)

T = TypeVar("T")
_RECEIVE_BYTES = 256 << 10
_ERROR_BYTES = 2048
_MAX_RETRY_AFTER_S = 60.0
_REMEMBERED = 32
_REMEMBERED_BYTES = 4 << 20
_NO_NEWS = News(b"", StoreVersions(()), {})
_NEWS_S = 5.0
"""Time for which news are believed, as if a slow reader had asked for everything at once."""
_HELD_BACK_S = 1.0
"""A server that holds a request back does so for longer than this; ours for up to 30 s."""
_POLL_S = 0.2
"""Time between two requests to a server that does not hold them back until LATEST changes."""


class HttpSource(StoreSource):
    """One store at `url`, `http(s)://HOST:PORT/stores/NAME`."""

    def __init__(self, url: str, access: Access | None = None) -> None:
        address = http_address(url)
        if address is None or address.query:
            raise ConfigError(f"{url}: use http(s)://HOST:PORT/stores/NAME")
        if address.username is not None:
            raise ConfigError("a URL with a user in it: give a token file instead")
        self._access = access = access or Access()
        self.streams, self.range_bytes = access.streams, access.range_bytes
        self.announces = True
        """Believed until the server answers a question for something newer too early."""
        self._url = address.geturl()
        self._path = address.path
        self._connections = Connections(address, self._access)
        self._clock = MonotonicClock()
        self._random = Random()
        self._lock = Lock()
        self._doubted: set[str] = set()
        self._remembered: dict[str, tuple[str, bytes]] = {}
        """Entity tag and bytes of the small files that were read last."""
        self._known: bytes | None = None
        """LATEST as it was read last."""
        self._news, self._news_until_s = _NO_NEWS, 0.0
        """The unread rest of an answer that named a version: each file is read once."""

    def __str__(self) -> str:
        return self._url

    def stores(self) -> tuple[str, ...]:
        """Names of all stores of the server whose store list is at this URL."""
        return self._listed(StoreList).stores

    def directories(self) -> frozenset[str]:
        return self._seen(self._listed(StoreVersions))

    def _seen(self, listing: StoreVersions) -> frozenset[str]:
        self.composes = listing.composes
        return frozenset(listing.directories)

    def newest(self, expected: bytes) -> tuple[bytes | None, frozenset[str]]:
        latest = expected if self._recent().latest == expected else self._latest(self._known, 0.0)
        news = self._recent()
        if news.latest != latest:
            return latest, self.directories()
        return latest, self._seen(news.versions)

    def _recent(self) -> News:
        if self._clock.now() >= self._news_until_s:
            self._news = _NO_NEWS
        return self._news

    def _from_news(self, path: str, *, until: int | None = None) -> bytes | None:
        """A file of the news, which forget it once it is read until its end."""
        with self._lock:
            files = self._recent().files
            found = files.get(path)
            if found is not None and until == len(found):
                del files[path]
            return found

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        until_s = self._clock.now() + wait_s
        while True:
            left_s = max(0.0, until_s - self._clock.now())
            began_s = self._clock.now()
            found = self._latest(known, left_s)
            if found != known or left_s == 0.0:
                return found
            self.announces = self._clock.now() - began_s >= min(_HELD_BACK_S, left_s / 2)
            time.sleep(min(_POLL_S, left_s))

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        brought = self._from_news(path)
        if brought is None or len(brought) > limit_bytes:
            return self._persist(lambda _: self._small(f"/{path}", limit_bytes))
        self._remember(f"/{path}", index_etag(brought), brought)
        self._from_news(path, until=len(brought))
        return brought

    def size_bytes(self, path: str) -> int:
        def attempt(_: Backoff) -> int:
            with self._answer("HEAD", f"/{path}", {}) as answer:
                answer.read()
                return _length(answer)

        brought = self._from_news(path)
        return self._persist(attempt) if brought is None else len(brought)

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        at, stop = 0, start + len(into)

        def attempt(backoff: Backoff) -> None:
            nonlocal at
            requested = ByteSpan(start + at, stop)
            with self._answer("GET", f"/{path}", {"Range": range_header(requested)}) as answer:
                _check_range(answer, requested, what=f"{self._url}/{path}")
                what = f"{self._url}/{path}"
                for piece in _pieces(answer, requested.size_bytes, what, backoff, before=at):
                    into[at : at + len(piece)] = piece
                    at += len(piece)

        brought = self._from_news(path, until=stop)
        if brought is not None and stop <= len(brought):
            into[:] = brought[start:stop]
        elif len(into):
            self._persist(attempt)

    def doubt(self, path: str) -> None:
        with self._lock:
            self._doubted.add(f"/{path}")
            self._remembered.clear()
            self._news = _NO_NEWS

    def close(self) -> None:
        self._connections.close()

    def _latest(self, known: bytes | None, wait_s: float) -> bytes | None:
        headers: dict[str, str] = {}
        if known is not None:
            headers["If-None-Match"] = latest_etag(known)
        if wait_s > 0:
            headers["Prefer"] = f"wait={wait_s:.3f}"
            if known is not None:
                # Others need other files, and the readers of a relay would each draw a copy.
                headers["Accept"] = f"{NEWS_TYPE}, text/plain"
        self._recent()

        def attempt(_: Backoff) -> bytes | None:
            with self._answer("GET", f"/{LATEST_FILE}", headers, wait_s=wait_s) as answer:
                if answer.status == 304:
                    answer.read()
                    return known
                if answer.headers.get_content_type() == NEWS_TYPE:
                    # News that a slow link cuts would begin again at byte 0, where ranges go on.
                    headers.pop("Accept", None)
                    return self._read_news(answer)
                return self._body(answer, MAX_LATEST_BYTES, what=LATEST_FILE)

        try:
            self._known = self._persist(attempt)
        except FileNotFoundError:
            self._known = None
        return self._known

    def _read_news(self, answer: HTTPResponse) -> bytes:
        """LATEST in the news, which are kept for a while."""
        raw = self._body(answer, MAX_NEWS_BYTES + MAX_LISTING_BYTES, what=NEWS_TYPE)
        try:
            news = msgspec.msgpack.decode(raw, type=News)
        except UNDECODABLE as error:
            raise PeerProtocolError(f"{self._url} sends news that cannot be read") from error
        directory = news.latest[: MAX_LATEST_BYTES + 1].decode(errors="replace").strip()
        foreign = [path for path in news.files if not path.startswith(f"{directory}/")]
        if len(news.latest) > MAX_LATEST_BYTES or foreign:
            raise PeerProtocolError(f"{self._url} sends news of more than one version")
        with self._lock:
            self._news, self._news_until_s = news, self._clock.now() + _NEWS_S
        return news.latest

    def _listed(self, kind: type[T]) -> T:
        try:
            raw = self._persist(lambda _: self._small("", MAX_LISTING_BYTES))
            return msgspec.json.decode(raw, type=kind)
        except UNDECODABLE as error:
            raise PeerProtocolError(f"{self._url} is no weight server: {error}") from error

    def _small(self, path: str, limit_bytes: int) -> bytes:
        """A whole file: the server's, or the remembered copy if the server reports no change."""
        with self._lock:
            tag, remembered = self._remembered.get(path, ("", b""))
        headers = {"If-None-Match": tag} if tag and len(remembered) <= limit_bytes else {}
        with self._answer("GET", path, headers) as answer:
            if answer.status == 304:
                answer.read()
                return remembered
            raw = self._body(answer, limit_bytes, what=path)
        self._remember(path, answer.headers.get("ETag", ""), raw)
        return raw

    def _remember(self, path: str, tag: str, raw: bytes) -> None:
        with self._lock:
            self._remembered.pop(path, None)
            if tag and len(raw) <= _REMEMBERED_BYTES:
                self._remembered[path] = (tag, raw)
            if len(self._remembered) > _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]

    def _body(self, answer: HTTPResponse, limit_bytes: int, *, what: str) -> bytes:
        length = _length(answer)
        if length > limit_bytes:
            raise Corrupt(f"{self._url} {what} is over the limit of {limit_bytes} bytes")
        # The body gets its own pace, since the server may have held the request back.
        pace = Backoff(self._access.retries, self._clock)
        return b"".join(_pieces(answer, length, f"{self._url} {what}", pace))

    def _persist(self, attempt: Callable[[Backoff], T]) -> T:
        backoff = Backoff(self._access.retries, self._clock, random=self._random)
        return backoff.persist(lambda: attempt(backoff))

    @contextmanager
    def _answer(
        self, method: str, path: str, headers: Mapping[str, str], *, wait_s: float = 0.0
    ) -> Iterator[HTTPResponse]:
        given = {"Accept-Encoding": "identity", **headers}
        if self._is_doubted(path):
            given["Cache-Control"] = "no-cache"
        target, timeout_s = (self._path + path) or "/", self._access.stall_s + wait_s
        with self._connections.answer(method, target, given, timeout_s=timeout_s) as answer:
            _check_status(answer, what=f"{self._url}{path}")
            yield answer

    def _is_doubted(self, path: str) -> bool:
        """Whether this is the first request since it was doubted."""
        with self._lock:
            doubted = path in self._doubted
            self._doubted.discard(path)
        return doubted


def _check_status(answer: HTTPResponse, *, what: str) -> None:
    status = answer.status
    if status in {200, 206, 304}:
        if answer.chunked:
            raise PeerProtocolError(f"{what}: the server sent chunks without a Content-Length")
        return
    body = answer.read(_ERROR_BYTES).decode(errors="replace").strip()
    message = f"{what}: {status} {body[:200]}"
    if status == 404:
        raise FileNotFoundError(message)
    if status in {401, 403}:
        raise ConfigError(f"{what} refuses this reader ({status}): give the server's token file")
    if status in {409, 416}:
        raise Corrupt(f"{what} differs from the published file: {body[:200]}")
    if status in {408, 425, 429} or status >= 500:
        pause_s = retry_after_s(answer.headers.get("Retry-After"), most_s=_MAX_RETRY_AFTER_S)
        raise Interrupted(message, retry_after_s=pause_s)
    raise PeerProtocolError(message)


def _check_range(answer: HTTPResponse, requested: ByteSpan, *, what: str) -> None:
    """Raises Corrupt if the reply is not exactly the requested range."""
    if answer.status == 200:
        answered = ByteSpan(0, _length(answer))
    else:
        try:
            answered, _ = answered_span(answer.headers.get("Content-Range", ""))
        except PeerProtocolError as error:
            raise Corrupt(f"{what}: {error}") from error
    if answered != requested or _length(answer) != requested.size_bytes:
        raise Corrupt(
            f"{what}: bytes {answered.start} to {answered.stop} where {requested.start} to "
            f"{requested.stop} were requested"
        )


def _pieces(
    answer: HTTPResponse, size_bytes: int, what: str, pace: Backoff, *, before: int = 0
) -> Iterator[bytes]:
    """A body as it arrives, `before` bytes of which came in earlier answers; raises Interrupted if
    it is cut, and Exhausted if it comes too slowly."""
    left_bytes = size_bytes
    while left_bytes:
        piece = answer.read1(min(_RECEIVE_BYTES, left_bytes))
        if not piece:
            raise Interrupted(f"{what}: cut {left_bytes} bytes before its end")
        left_bytes -= len(piece)
        yield piece
        pace.received(before + size_bytes - left_bytes)
        pace.check(f"{what} comes too slowly")
    # Tells http.client that this answer is done, so that its connection serves again.
    answer.read()


def _length(answer: HTTPResponse) -> int:
    given = answer.headers.get("Content-Length", "")
    if not given.isascii() or not given.isdigit() or len(given) > 18:
        raise PeerProtocolError(f"an answer without a length: {given[:40]!r}")
    return int(given)
