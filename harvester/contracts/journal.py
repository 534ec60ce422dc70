"""The journal: every decision of a policy with the sample that it rests on.

One JSON line per decision. It is the simulator's input and the next regression test: the policy
named in the `Opened` line, built from that line's configuration and fed the samples in order, gives
the same effects again (`scheduler.sim.replay`).

A slot's journal, written ten times a second, is compressed (`journal_frames`); readers tell by the
first bytes. Size on disk is bounded: a file that reaches half the bound is renamed to `<name>.1`
and a new file begins, which opens with the policy's snapshot so that each file replays by itself.
"""

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import xxhash

from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import UNDECODABLE, Corrupt
from harvester.contracts.journal_frames import LinePacker, is_packed, last_line_of, packed_lines

SCHEMA = 1
DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""Faults that pass; any other at start is the user's to mend."""
TAKEN = "moved, removed or cut by another program"
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
    """Fields of a reloaded configuration file that are not in force."""
    missing: int = 0
    """Decisions before this line that could not be written."""
    t_s: float | None = None
    """Reading of the decisions' clock at `wall`, in seconds; None if the writer gave none."""
    version: str = ""
    """RoseMux's, of the writer; "" from one before this field."""


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

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20, packed: bool = False) -> None:
        """`packed` compresses. A file of the other form, such as an older agent's, becomes `.1`."""
        self._path = path
        self._file_bytes = max_bytes // 2
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._hash = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._packer = self._mended() if packed else None
        if not packed:
            _cut_torn_line(path)
        self._file = self._open()
        self._end_bytes = self._file.tell()

    def opened(self, line: Opened) -> None:
        self._hash = line.config_hash
        self._append(msgspec.structs.replace(line, wall=wall_time_utc()))

    def decided(
        self, *, now: float, sample: msgspec.Struct, effects: tuple[msgspec.Struct, ...]
    ) -> None:
        # As JSON these equal the dictionaries of a reader, which take as long to make as the rest.
        plain = cast(Any, sample), cast(Any, effects)
        self._append(Decided(t_s=now, config_hash=self._hash, sample=plain[0], effects=plain[1]))

    @property
    def in_place(self) -> bool:
        """Whether the path still names the file, with all that was written to it."""
        return is_at(self._path, self._file, least_bytes=self._end_bytes)

    def give_up(self) -> None:
        """Close a file that is not `in_place`. One that was cut becomes `.1`, for what it has."""
        cut = is_at(self._path, self._file)
        self.close()
        with suppress(OSError):
            if cut and _has_head(self._path):
                self._path.replace(self._older)

    @property
    def full(self) -> bool:
        """Whether the file has reached half the bound; then call `rotate` with a new first line."""
        return self._end_bytes >= self._file_bytes

    def rotate(self, line: Opened) -> None:
        # The old file is given up last, so that a full disk leaves a working writer: by then the
        # old file may already have its older name.
        if is_at(self._path, self._file):
            self._path.replace(self._older)
        old, self._file = (self._file, self._packer, self._end_bytes), self._open()
        self._packer = None if self._packer is None else LinePacker()
        self._end_bytes = self._file.tell()
        try:
            self.opened(line)
        except OSError:
            self._file.close()
            self._file, self._packer, self._end_bytes = old
            raise
        _ended(*old[:2])

    def close(self) -> None:
        _ended(self._file, self._packer)

    def _append(self, line: Line) -> None:
        encoded = self._encoder.encode(line) + b"\n"
        packed = memoryview(encoded if self._packer is None else self._packer.pack(encoded))
        written = 0
        try:
            while written < len(packed):
                written += self._file.write(packed[written:])
        except OSError:
            # A full disk takes a part of the line.
            if self._packer is not None:
                self._packer.refused()
            self._file.truncate(self._end_bytes)
            self._file.seek(self._end_bytes)
            raise
        self._end_bytes += written
        if self._packer is not None:
            self._packer.written()

    def _mended(self) -> LinePacker:
        """Cuts a line that a crash left incomplete; the frame around it is still to be ended."""
        if not self._path.exists():
            return LinePacker()
        try:
            last_line = last_line_of(self._path)
        except Corrupt:
            if _has_head(self._path):
                self._path.replace(self._older)
            else:
                # Another program cut it: no reader could read it, and it would cost the older one.
                os.truncate(self._path, 0)
            return LinePacker()
        if last_line.end_bytes < self._path.stat().st_size:
            os.truncate(self._path, last_line.end_bytes)
        return LinePacker(in_frame=last_line.in_frame)

    @property
    def _older(self) -> Path:
        return self._path.with_name(self._path.name + ".1")

    def _open(self) -> FileIO:
        # Unbuffered: a buffer would keep bytes that a full disk refused, and raise at its close.
        return open(self._path, "ab", buffering=0, opener=open_private)


def is_at(path: Path, file: FileIO, *, least_bytes: int = 0) -> bool:
    """Whether the path still names the opened file, and it has at least so many bytes."""
    try:
        there, opened = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False
    return os.path.samestat(there, opened) and there.st_size >= least_bytes


def _has_head(path: Path) -> bool:
    """Whether the file begins as a journal of either form."""
    with path.open("rb") as file:
        return is_packed(head := file.read(4)) or head.startswith(b"{")


def open_private(path: str, flags: int) -> int:
    """Opens a file for this user alone, whatever the umask: it names tenants and jobs."""
    file = os.open(path, flags, 0o640)
    if os.fstat(file).st_mode & 0o007:
        os.fchmod(file, 0o640)
    return file


def _ended(file: FileIO, packer: LinePacker | None) -> None:
    """Closes a file, with the end of its last frame if there is room: readers do without."""
    if packer is not None and not file.closed:
        with suppress(OSError):
            file.write(packer.end())
    file.close()


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


def torn_bytes(path: Path) -> int:
    """Size of the incomplete line at the end, which readers leave out. Raises Corrupt."""
    with path.open("rb") as file:
        if is_packed(file.read(4)):
            return path.stat().st_size - last_line_of(path).end_bytes
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE_BYTES))
        return len(file.read().rpartition(b"\n")[2])


def read_journal(path: Path) -> Iterator[Line]:
    """The lines of a file, without a torn last one. Raises Corrupt, naming the invalid line."""
    with path.open("rb") as file:
        yield from lines_of(file, path.name)


def lines_of(file: BinaryIO, name: str) -> Iterator[Line]:
    """`read_journal` for an open file at its beginning; `name` is for error messages."""
    decoder = msgspec.json.Decoder(Line)
    head = file.read(4)
    file.seek(0)
    if is_packed(head):
        lines = packed_lines(file, max_bytes=MAX_LINE_BYTES)
    else:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
    for number in itertools.count(1):
        try:
            raw = next(lines, b"")
        except Corrupt as error:
            raise Corrupt(f"{name} line {number}: {error}") from error
        if not raw.endswith(b"\n"):
            if len(raw) == MAX_LINE_BYTES:
                raise Corrupt(f"{name} line {number}: longer than {MAX_LINE_BYTES} bytes")
            return
        try:
            yield decoder.decode(raw)
        except UNDECODABLE as error:
            raise Corrupt(f"{name} line {number}: {error}") from error
