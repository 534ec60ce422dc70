"""kvcached's segment: three sizes in a file of 24 bytes, and nothing else is believed."""

import fcntl
import os
import struct
from pathlib import Path

import pytest

from harvester.contracts.errors import Exhausted, PeerProtocolError, Unsupported
from harvester.platform.kv_segment import KvSegment, KvUse

NAME = "kvcached_guest"
SIZES = (8 << 30, 3 << 30, 1 << 20)


@pytest.fixture
def segment(tmp_path: Path) -> KvSegment:
    (tmp_path / NAME).write_bytes(struct.pack("=qqq", *SIZES))
    return KvSegment(NAME, directory=tmp_path)


def test_limit_and_use_are_read(segment: KvSegment) -> None:
    use = segment.read()
    assert use == KvUse(*SIZES)
    assert use.mapped_bytes == (3 << 30) + (1 << 20)


def test_only_the_limit_is_written(segment: KvSegment) -> None:
    segment.limit(1 << 30)
    assert segment.read() == KvUse(1 << 30, *SIZES[1:])
    with pytest.raises(ValueError, match="-1"):
        segment.limit(-1)


def test_an_engine_that_has_not_started_has_no_segment(tmp_path: Path) -> None:
    segment = KvSegment(NAME, directory=tmp_path)
    assert segment.read() is None
    with pytest.raises(Exhausted):
        segment.limit(1)
    assert not segment.path.exists(), "kvcached makes it, nobody else"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 16,
        b"\0" * 32,
        struct.pack("=qqq", 1, -1, 0),
        struct.pack("=qqq", 1 << 60, 0, 0),
    ],
)
def test_another_layout_is_refused_and_not_written(segment: KvSegment, content: bytes) -> None:
    segment.path.write_bytes(content)
    with pytest.raises(Unsupported):
        segment.read()
    with pytest.raises(Unsupported):
        segment.limit(1)
    assert segment.path.read_bytes() == content


def test_a_link_a_folder_and_a_stranger_s_file_are_refused(
    segment: KvSegment, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(segment.path)
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(Unsupported):
            KvSegment(name, directory=tmp_path).read()
    with pytest.raises(Unsupported, match="not trusted"):
        KvSegment(NAME, owners=frozenset({os.getuid() + 1}), directory=tmp_path).read()
    with pytest.raises(PeerProtocolError):
        KvSegment("../kvcached_guest", directory=tmp_path)


def test_a_held_lock_stops_a_writer_and_no_reader(segment: KvSegment) -> None:
    with segment.path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Exhausted, match="locked"):
            segment.limit(1)
        assert segment.read() == KvUse(*SIZES)
