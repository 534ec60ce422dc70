"""The audit's files on disk: one to append to, and older ones, bounded by bytes and by age.

A file ends with its UTC day or at an eighth of the bound, and becomes `audit.NNNNNN.jsonl`. Each
event is one write, so a killed agent loses none but the one being written. A power cut may take the
last half minute: no event waits for the disk, because the beat waits for the event.
"""

import errno
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from harvester.contracts.audit import MAX_LINE_BYTES, AuditEvent, audit_files
from harvester.contracts.errors import UNDECODABLE
from harvester.contracts.journal import is_at, open_private

_DAY_S = 86_400.0
_FILES = 8
_AGED_AT_ONCE = 2
"""Files removed for their age at a rotation: a clock that jumps ahead costs two, not all."""


class AuditFile:
    def __init__(self, path: Path, *, max_bytes: int, max_days: float) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_days * _DAY_S
        self._file: FileIO | None = None
        self._day = ""
        self._torn = False
        """Whether a killed agent left the last line without its end."""

    def append(self, event: AuditEvent) -> None:
        """Raises OSError where it cannot be written; no part of it is left, and a later one may
        succeed."""
        line = msgspec.json.encode(event) + b"\n"
        day = event.time[:10]
        file = self._opened()
        full = file.tell() + len(line) > self._max_bytes // _FILES
        if file.tell() and (full or day != self._day):
            self._rotate()
            file = self._opened()
        self._day = day
        before_bytes = file.tell()
        line = b"\n" + line if self._torn else line
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._torn = False
        except OSError:
            with suppress(OSError):
                file.truncate(before_bytes)
            file.seek(before_bytes)
            raise

    @property
    def in_place(self) -> bool:
        """Whether the opened file, if any, is there and whole; an `append` hides a cut."""
        return self._file is None or is_at(self.path, self._file, least_bytes=self._file.tell())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> FileIO:
        """The current file; a new one where it was moved or removed."""
        if self._file is not None and not is_at(self.path, self._file):
            self.close()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._day, self._torn = _first_day(self.path), _is_torn(self.path)
        return self._file

    def _open(self) -> FileIO:
        # Unbuffered: a buffer would keep bytes that a full disk refused, and raise when closed.
        return open(self.path, "ab", buffering=0, opener=open_private)

    def _rotate(self) -> None:
        older = audit_files(self.path)[:-1]
        number = int(older[-1].suffixes[0][1:]) + 1 if older else 1
        self.path.rename(self.path.with_suffix(f".{number:06}{self.path.suffix}"))
        self.close()
        self._drop(audit_files(self.path))

    def _drop(self, files: list[Path]) -> None:
        """Remove the oldest files beyond the bounds."""
        found = [(path, path.stat()) for path in files]
        kept_bytes = sum(status.st_size for _, status in found)
        most_bytes = self._max_bytes - self._max_bytes // _FILES
        # The latest of all times may come from a clock that was ahead for a while.
        newest_s = found[-1][1].st_mtime
        for place, (path, status) in enumerate(found):
            aged = place < _AGED_AT_ONCE and newest_s - status.st_mtime > self._max_age_s
            if kept_bytes <= most_bytes and not aged:
                break
            path.unlink(missing_ok=True)
            kept_bytes -= status.st_size


def _first_day(path: Path) -> str:
    """UTC day on which the file began; "" for a file that is empty or begins with no event."""
    with path.open("rb") as file:
        try:
            return msgspec.json.decode(file.readline(MAX_LINE_BYTES), type=AuditEvent).time[:10]
        except UNDECODABLE:
            return ""


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")
