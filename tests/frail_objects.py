"""An object store in memory that fails like a real one: `frail://bucket/path`.

Objects appear when their upload ends. Nothing can be renamed. A plan makes it fail, die at any
call, call something in between, list late, or know or keep no conditional put.
"""

import errno
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

SCHEME = "frail"
_CHANGES = frozenset({"put", "part", "close", "delete", "copy"})


class Killed(BaseException):
    """The process ends here: it makes no further call."""


@dataclass(slots=True)
class Bucket:
    objects: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)
    """The state that late listings show."""
    lists_late: bool = False
    has_conditional_put: bool = True
    ignores_condition: bool = False
    """As stores that speak S3 and know no `If-None-Match`: a conditional put replaces."""
    calls: int = 0
    """Counts calls that change something."""
    before: Callable[[int, str], None] = lambda number, call: None
    """Called before each change with its number; what it raises is what the call raises."""
    is_dead: bool = False

    def change(self, call: str) -> None:
        self.check()
        self.calls += 1
        try:
            self.before(self.calls, call)
        except Killed:
            self.is_dead = True
            raise

    def check(self) -> None:
        if self.is_dead:
            raise Killed

    def catch_up(self) -> None:
        """Listings show the present objects."""
        self.listed = {path: len(raw) for path, raw in self.objects.items()}

    def sizes(self) -> dict[str, int]:
        if not self.lists_late:
            self.catch_up()
        return self.listed


buckets: dict[str, Bucket] = {}


class FrailObjects(AbstractFileSystem):
    protocol = SCHEME
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        prefix = self._strip_protocol(path).rstrip("/") + "/"
        found: dict[str, dict[str, Any]] = {}
        for name, size in self._listed(prefix).items():
            head, slash, _rest = name[len(prefix) :].partition("/")
            kind = "directory" if slash else "file"
            found[prefix + head] = {"name": prefix + head, "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        prefix = self._strip_protocol(path).rstrip("/") + "/"
        found = {n: {"name": n, "size": s} for n, s in self._listed(prefix).items()}
        return found if detail else sorted(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self._object(path)), "type": "file"}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        raw = self._object(path)
        if not raw and (start, end) != (None, None):
            # As S3, Google and Azure: 416, and s3fs passes no range unchecked.
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")
        return raw[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        bucket = self._bucket(path)
        if mode == "create" and not bucket.has_conditional_put:
            raise NotImplementedError("If-None-Match")
        bucket.change("put")
        there = self._strip_protocol(path) in bucket.objects
        if mode == "create" and there and not bucket.ignores_condition:
            raise FileExistsError(path)
        bucket.objects[self._strip_protocol(path)] = bytes(value)

    def rm_file(self, path: str) -> None:
        self._bucket(path).change("delete")
        self._bucket(path).objects.pop(self._strip_protocol(path), None)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self._bucket(path1).change("copy")
        self._bucket(path1).objects[self._strip_protocol(path2)] = self._object(path1)

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("objects have no rename")

    def _open(self, path: str, mode: str = "rb", **_: Any) -> "_Upload":
        assert mode == "wb"
        return _Upload(self._bucket(path), path)

    def _object(self, path: str) -> bytes:
        bucket = self._bucket(path)
        bucket.check()
        try:
            return bucket.objects[self._strip_protocol(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _listed(self, prefix: str) -> dict[str, int]:
        bucket = self._bucket(prefix)
        bucket.check()
        return {n: s for n, s in sorted(bucket.sizes().items()) if n.startswith(prefix)}

    def _bucket(self, path: str) -> Bucket:
        return buckets[self._strip_protocol(path).partition("/")[0]]


class _Upload(io.BytesIO):
    """There is nothing of it before it is closed."""

    def __init__(self, bucket: Bucket, path: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._path = path
        self._is_given_up = False

    def write(self, data: Any) -> int:
        self._bucket.change("part")
        return super().write(data)

    def discard(self) -> None:
        self._is_given_up = True

    def close(self) -> None:
        if not self.closed and not self._is_given_up:
            self._bucket.change("close")
            self._bucket.objects[self._path] = self.getvalue()
        super().close()

    def __del__(self) -> None:
        self._is_given_up = True


fsspec.register_implementation(SCHEME, FrailObjects, clobber=True)
