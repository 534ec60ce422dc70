"""One archive cut into parts of bounded size, and parts joined again on a machine without network.

A bundle is a folder with `manifest.json` and the parts `part-1`, `part-2`, ...; the manifest says
each part's size and SHA-256. File names come from the index alone. Needs nothing but Python.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MANIFEST = "manifest.json"
PART_LIMIT_BYTES = 56 << 20
"""Size of each part: with the project's own tree, a few MiB, at most 64 MiB travel at once."""
PARTS_LIMIT = 64
MANIFEST_LIMIT_BYTES = 64 << 10
_BLOCK_BYTES = 1 << 20
_FORMAT = 1


class BundleRefused(Exception):  # noqa: N818 - the bundle is at fault
    """A bundle is damaged, incomplete or another one; the message names what."""


@dataclass(frozen=True, slots=True)
class BundlePart:
    index: int
    """Counted from 1."""
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return f"part-{self.index}"


@dataclass(frozen=True, slots=True)
class BundleManifest:
    bundle: str
    parts: tuple[BundlePart, ...]

    def encode(self) -> bytes:
        document = {
            "format": _FORMAT,
            "bundle": self.bundle,
            "parts": [{"bytes": p.size_bytes, "sha256": p.sha256} for p in self.parts],
        }
        return json.dumps(document, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> BundleManifest:
    try:
        with (folder / MANIFEST).open("rb") as file:
            raw = file.read(MANIFEST_LIMIT_BYTES + 1)
        if len(raw) > MANIFEST_LIMIT_BYTES:
            raise ValueError("too long")
        document = json.loads(raw)
        if document["format"] != _FORMAT or not 1 <= len(document["parts"]) <= PARTS_LIMIT:
            raise ValueError("of another format")
        parts = tuple(
            BundlePart(index, int(part["bytes"]), str(part["sha256"]))
            for index, part in enumerate(document["parts"], 1)
        )
        return BundleManifest(str(document["bundle"]), parts)
    except FileNotFoundError as error:
        raise BundleRefused(_no_bundle(folder)) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleRefused(f"{folder / MANIFEST} cannot be read: {error}") from error


def _no_bundle(folder: Path) -> str:
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
    if inside:
        return f"{folder} is no bundle; name one that is in it: {', '.join(inside)}"
    return f"{folder} is no bundle: it has no {MANIFEST}"


class PartWriter(io.RawIOBase):
    """A file to write that ends up as parts; they count once the manifest is written."""

    def __init__(self, folder: Path, bundle: str, *, limit_bytes: int = PART_LIMIT_BYTES) -> None:
        super().__init__()
        if limit_bytes <= 0:
            raise ValueError("a part has more than 0 bytes")
        self._folder, self._bundle, self._limit_bytes = folder, bundle, limit_bytes
        self._finished: list[BundlePart] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        total = len(view)
        while view:
            if self._file is None:
                self._begin()
            piece = view[: self._limit_bytes - self._written]
            assert self._file is not None
            self._file.write(piece)
            self._digest.update(piece)
            self._written += len(piece)
            view = view[len(piece) :]
            if self._written == self._limit_bytes:
                self._end()
        return total

    def close(self) -> None:
        if not self.closed:
            self._end()
        super().close()

    def write_manifest(self) -> None:
        self.close()
        manifest = BundleManifest(self._bundle, tuple(self._finished))
        (self._folder / MANIFEST).write_bytes(manifest.encode())

    def _begin(self) -> None:
        if len(self._finished) == PARTS_LIMIT:
            raise BundleRefused(f"more than {PARTS_LIMIT} parts")
        self._file = (self._folder / f"part-{len(self._finished) + 1}").open("wb")
        self._digest, self._written = hashlib.sha256(), 0

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            part = BundlePart(len(self._finished) + 1, self._written, self._digest.hexdigest())
            self._finished.append(part)
            self._file = None


def join(bundle: Path, directory: Path) -> tuple[BundlePart, ...]:
    """Take the parts that lie in `bundle` into `directory`; return those that are still missing.

    In any order, again or not. Raises BundleRefused, and takes nothing more, at a torn part or
    where `directory` holds parts of another bundle.
    """
    manifest = read_manifest(bundle)
    directory.mkdir(parents=True, exist_ok=True)
    kept = directory / MANIFEST
    if kept.exists() and read_manifest(directory) != manifest:
        raise BundleRefused(f"{directory} holds parts of another bundle; name another directory")
    _place(bundle / MANIFEST, kept)
    for part in manifest.parts:
        if (bundle / part.file_name).exists() and not _is_whole(directory, part):
            verify(bundle, part)
            _place(bundle / part.file_name, directory / part.file_name)
            verify(directory, part)
    return missing(directory, manifest)


def missing(directory: Path, manifest: BundleManifest) -> tuple[BundlePart, ...]:
    return tuple(part for part in manifest.parts if not _is_whole(directory, part))


def verify(folder: Path, part: BundlePart) -> None:
    path = folder / part.file_name
    found_bytes = path.stat().st_size
    if found_bytes != part.size_bytes:
        raise BundleRefused(f"{path} is torn: {found_bytes} of {part.size_bytes} bytes")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
            raise BundleRefused(f"{path} is damaged: its SHA-256 differs")


class PartReader(io.RawIOBase):
    """The bytes of all parts, one after the other."""

    def __init__(self, directory: Path, manifest: BundleManifest) -> None:
        super().__init__()
        self._blocks = _blocks(directory, manifest)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        piece = self._rest[: len(target)]
        target[: len(piece)] = piece
        self._rest = self._rest[len(piece) :]
        return len(piece)


def _blocks(directory: Path, manifest: BundleManifest) -> Iterator[bytes]:
    for part in manifest.parts:
        with (directory / part.file_name).open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


def _is_whole(directory: Path, part: BundlePart) -> bool:
    try:
        verify(directory, part)
    except (BundleRefused, OSError):
        return False
    return True


def _place(source: Path, target: Path) -> None:
    """Copy by way of another name: a copy that is cut short never has the part's name."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.replace(target)
