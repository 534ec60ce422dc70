"""The journal: every decision of a policy with the sample that it rests on.

One JSON line per decision. It is the audit log, the simulator's input and the next regression test:
the policy named in the `Opened` line, built from that line's configuration and fed the samples in
order, gives the same effects again (`scheduler.sim.replay`).

Size on disk is bounded: a file that reaches half the bound is renamed to `<name>.1` and a new file
begins, which opens with the policy's snapshot so that each file replays by itself.
"""

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import UNDECODABLE, Corrupt

SCHEMA = 1
MAX_LINE_BYTES = 8 << 20
"""A snapshot holds 28 days of the error budget and the last slices' latencies: some 100 KB."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """First line of a file."""

    schema: int = SCHEMA
    actor: str
    """The deciding policy: `agent:<slot>` or `scheduler`."""
    policy: str
    config: dict[str, Any]
    config_hash: str
    snapshot: dict[str, Any] | None = None
    """The policy's state where a rotated file goes on; None at the beginning."""
    wall: str = ""
    restart_needed: tuple[str, ...] = ()
    """After a reload: fields of the configuration file that are not in force."""
    missing: int = 0
    """Decisions before this line that could not be written."""
    t_s: float | None = None
    """Reading of the decisions' clock at `wall`, in seconds; None if the writer gave none."""


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag="decided"):
    """One call of a policy. Every effect carries its reason."""

    t_s: float
    config_hash: str
    sample: dict[str, Any]
    effects: tuple[dict[str, Any], ...] = ()


Line = Opened | Decided


def config_hash(config: dict[str, Any]) -> str:
    """Short hash of a configuration, the same for the same settings in any order."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(config, order="sorted"))


class JournalWriter:
    """Appends lines; a crash loses at most the line being written, never an earlier one.

    Raises OSError if a line cannot be written; no part of it is left, and a later line may succeed.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20) -> None:
        self._path = path
        self._file_bytes = max_bytes // 2
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._hash = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = self._open()

    def opened(self, line: Opened) -> None:
        self._hash = line.config_hash
        self._append(msgspec.structs.replace(line, wall=wall_time_utc()))

    def decided(
        self, *, now: float, sample: msgspec.Struct, effects: tuple[msgspec.Struct, ...]
    ) -> None:
        self._append(
            Decided(
                t_s=now,
                config_hash=self._hash,
                sample=msgspec.to_builtins(sample),
                effects=tuple(msgspec.to_builtins(effect) for effect in effects),
            )
        )

    @property
    def full(self) -> bool:
        """Whether the file has reached half the bound; then call `rotate` with a new first line."""
        return self._file.tell() >= self._file_bytes

    def rotate(self, line: Opened) -> None:
        # The old file is given up last, so that a full disk leaves a working writer: by then the
        # old file may already have its older name.
        if self._in_place():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        old, self._file = self._file, self._open()
        try:
            self.opened(line)
        except OSError:
            self._file.close()
            self._file = old
            raise
        old.close()

    def close(self) -> None:
        self._file.close()

    def _append(self, line: Line) -> None:
        encoded = memoryview(self._encoder.encode(line) + b"\n")
        written, before_bytes = 0, self._file.tell()
        try:
            while written < len(encoded):
                written += self._file.write(encoded[written:])
        except OSError:
            # A full disk takes a part of the line.
            self._file.truncate(before_bytes)
            self._file.seek(before_bytes)
            raise

    def _open(self) -> FileIO:
        # Without a buffer: one would keep what a full disk refused, and raise again when closed.
        return open(self._path, "ab", buffering=0, opener=open_private)

    def _in_place(self) -> bool:
        try:
            return self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False


def open_private(path: str, flags: int) -> int:
    """Tenants, jobs and processes are not for every user of the machine, whatever the umask."""
    file = os.open(path, flags, 0o640)
    if os.fstat(file).st_mode & 0o007:
        os.fchmod(file, 0o640)
    return file


def _cut_torn_line(path: Path) -> None:
    """Truncate a line that a crash left incomplete, before the next line is appended."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - MAX_LINE_BYTES))
        whole = start + file.read().rfind(b"\n") + 1
        if whole > start or start == 0:
            file.truncate(whole)


def read_journal(path: Path) -> Iterator[Line]:
    """The lines of a file, but for a torn last one. Raises Corrupt, naming a line that is none."""
    with path.open("rb") as file:
        yield from lines_of(file, path.name)


def lines_of(file: BinaryIO, name: str) -> Iterator[Line]:
    """`read_journal` for an open file; `name` is for error messages."""
    decoder = msgspec.json.Decoder(Line)
    for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
        if not raw.endswith(b"\n"):
            if len(raw) == MAX_LINE_BYTES:
                raise Corrupt(f"{name} line {number}: longer than {MAX_LINE_BYTES} bytes")
            return
        try:
            yield decoder.decode(raw)
        except UNDECODABLE as error:
            raise Corrupt(f"{name} line {number}: {error}") from error
