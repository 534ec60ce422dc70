"""A disk that fills up under a journal."""

import errno
from io import FileIO
from typing import Any

import pytest

from harvester.contracts.journal import JournalWriter


class SmallDisk(FileIO):
    """Takes what it has room for, as a full disk does: the beginning of a write, then nothing."""

    room_bytes = 1 << 20

    def write(self, data: Any) -> int:
        if len(data) and SmallDisk.room_bytes == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(data[: SmallDisk.room_bytes])
        SmallDisk.room_bytes -= taken
        return taken


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> type[SmallDisk]:
    monkeypatch.setattr(JournalWriter, "_open", lambda self: SmallDisk(self._path, "ab"))
    monkeypatch.setattr(SmallDisk, "room_bytes", 1 << 20)
    return SmallDisk
