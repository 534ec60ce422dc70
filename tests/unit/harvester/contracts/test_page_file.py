"""One page between a writer and a reader, in real files."""

import math
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.page import (
    Grant,
    GrantMode,
    PageFault,
    PageHeld,
    PageReader,
    PageWriter,
    Pulse,
    Reading,
)
from harvester.contracts.page.seal import (
    LAYOUT_VERSION,
    PAGE_BYTES,
    pack_body,
    pack_head,
    sequence_of,
)

NOW_NS = 1_000_000_000_000
TTL_NS = 500_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pulse.prod.0"


def written(path: Path, **fields: Any) -> PageWriter[Pulse]:
    writer = PageWriter(path, Pulse)
    writer.write(Pulse(**fields), now_ns=NOW_NS, ttl_ns=TTL_NS)
    return writer


def read(reader: PageReader[Pulse], *, now_ns: int = NOW_NS) -> Reading[Pulse]:
    return reader.read(now_ns=now_ns)


def test_reads_what_was_written_last(path: Path) -> None:
    writer, reader = written(path, in_flight=1), PageReader(path, Pulse)
    assert read(reader).record == Pulse(in_flight=1)
    writer.write(Pulse(in_flight=2), now_ns=NOW_NS + 5, ttl_ns=TTL_NS)
    assert read(reader) == Reading(Pulse(in_flight=2), None, NOW_NS + 5)


def test_a_record_is_decoded_once_and_believed_until_it_expires(path: Path) -> None:
    written(path, in_flight=1)
    reader = PageReader(path, Pulse)
    first = read(reader)
    assert read(reader, now_ns=NOW_NS + TTL_NS - 1).record is first.record
    assert read(reader, now_ns=NOW_NS + TTL_NS).fault is PageFault.EXPIRED
    assert read(reader, now_ns=NOW_NS - 2_000_000_000).fault is PageFault.CLOCK


def test_a_record_that_is_written_again_is_not_decoded_again(path: Path) -> None:
    writer, reader = written(path, in_flight=1), PageReader(path, Pulse)
    first = read(reader).record
    writer.write(Pulse(in_flight=1), now_ns=NOW_NS + 5, ttl_ns=TTL_NS)
    again = read(reader, now_ns=NOW_NS + TTL_NS)
    assert again.record is first
    assert again.stamp_ns == NOW_NS + 5
    writer.write(Pulse(in_flight=2), now_ns=NOW_NS + 6, ttl_ns=TTL_NS)
    assert read(reader).record == Pulse(in_flight=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"itl_slo_s": math.nan},
        {"itl_late_s_recent": (math.inf,), "itl_late_total": 1},
        {"unanswered_s_recent": (math.nan,), "unanswered_total": 1},
        {"in_flight": -1},
        {"running": -1},
    ],
)
def test_a_number_outside_its_range_is_a_torn_page(path: Path, fields: dict[str, Any]) -> None:
    written(path, **fields)
    assert read(PageReader(path, Pulse)).fault is PageFault.TORN


def test_no_file_is_missing_until_there_is_one(path: Path) -> None:
    reader = PageReader(path, Pulse)
    assert read(reader).fault is PageFault.MISSING
    written(path)
    assert read(reader).fault is None


def test_a_page_without_its_first_record_says_no_more_than_one_that_is_over(path: Path) -> None:
    PageWriter(path, Pulse)
    assert read(PageReader(path, Pulse)).fault is PageFault.EXPIRED


def test_a_new_writer_invalidates_its_predecessor_s_record(path: Path) -> None:
    written(path, in_flight=1).close()
    reader = PageReader(path, Pulse)
    read(reader)
    PageWriter(path, Pulse)
    assert read(reader).fault is PageFault.TORN


def test_a_page_has_one_living_writer(path: Path) -> None:
    first, reader = written(path, in_flight=41), PageReader(path, Pulse)
    with pytest.raises(PageHeld, match=rf"process {os.getpid()} .*still runs"):
        PageWriter(path, Pulse)
    assert read(reader).record == Pulse(in_flight=41)
    first.close()
    successor = written(path, in_flight=2)
    assert read(reader).record == Pulse(in_flight=2)
    successor.close()


def test_a_writer_that_is_closed_writes_no_more(path: Path) -> None:
    first = written(path, in_flight=1)
    first.close()
    successor = written(path, in_flight=2)
    first.write(Pulse(in_flight=3), now_ns=NOW_NS, ttl_ns=TTL_NS)
    assert read(PageReader(path, Pulse)).record == Pulse(in_flight=2)
    successor.close()


def test_a_page_of_another_kind_is_foreign(path: Path) -> None:
    written(path)
    assert PageReader(path, Grant).read(now_ns=NOW_NS).fault is PageFault.FOREIGN


def test_a_page_that_a_dead_writer_left_open_is_torn_until_a_successor_writes(path: Path) -> None:
    written(path, in_flight=1).close()
    with path.open("rb+") as file:
        sequence = sequence_of(file.read(16))
        file.seek(0)
        file.write(pack_head(kind=Pulse.KIND, sequence=sequence + 1))
    reader = PageReader(path, Pulse)
    assert read(reader).fault is PageFault.TORN
    written(path, in_flight=2)
    assert read(reader).record == Pulse(in_flight=2)


def test_a_page_cut_short_is_torn(path: Path) -> None:
    path.write_bytes(b"RMXP")
    assert read(PageReader(path, Pulse)).fault is PageFault.TORN


@pytest.mark.parametrize(
    "record",
    [
        b"\xc1",
        b"\x81\xa5shape\xa2\xff\xfe",
        b"\x81\xa5shape\x01",
        b"\x81\xa1x" + b"\x91" * 3000 + b"\x00",
    ],
    ids=["no msgpack", "no UTF-8", "another type", "nested without end"],
)
def test_a_record_that_does_not_decode_is_torn(path: Path, record: bytes) -> None:
    body = pack_body(record, sequence=2, stamp_ns=NOW_NS, expires_ns=NOW_NS + 1)
    path.write_bytes((pack_head(kind=Pulse.KIND, sequence=2) + body).ljust(PAGE_BYTES, b"\0"))
    assert read(PageReader(path, Pulse)).fault is PageFault.TORN
    assert PageReader(path, Pulse).read_left().fault is PageFault.TORN


def test_a_page_made_anew_is_found_once_the_old_one_expired(path: Path) -> None:
    written(path, in_flight=1)
    reader = PageReader(path, Pulse)
    assert read(reader).record == Pulse(in_flight=1)
    path.unlink()
    after_ns = NOW_NS + TTL_NS
    assert read(reader, now_ns=after_ns).fault is PageFault.MISSING
    PageWriter(path, Pulse).write(Pulse(in_flight=2), now_ns=after_ns, ttl_ns=TTL_NS)
    assert read(reader, now_ns=after_ns).record == Pulse(in_flight=2)


def test_a_page_replaced_by_a_link_is_foreign(path: Path, tmp_path: Path) -> None:
    written(path)
    reader = PageReader(path, Pulse)
    read(reader)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(reader, now_ns=NOW_NS + TTL_NS).fault is PageFault.FOREIGN


def test_neither_side_follows_a_symbolic_link(path: Path, tmp_path: Path) -> None:
    written(tmp_path / "target")
    path.symlink_to(tmp_path / "target")
    assert read(PageReader(path, Pulse)).fault is PageFault.FOREIGN
    with pytest.raises(ConfigError, match="cannot write page"):
        PageWriter(path, Pulse)


@pytest.mark.timeout(10)
def test_a_named_pipe_in_the_place_of_a_page_blocks_no_reader(path: Path) -> None:
    os.mkfifo(path)
    assert read(PageReader(path, Pulse)).fault is PageFault.FOREIGN
    with pytest.raises(ConfigError, match="not a regular file"):
        PageWriter(path, Pulse)


def test_a_folder_in_the_place_of_a_page_is_foreign(path: Path) -> None:
    path.mkdir()
    assert read(PageReader(path, Pulse)).fault is PageFault.FOREIGN


def test_a_page_of_another_user_is_believed_only_where_that_user_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 4242)
    stranger = PageReader(path, Pulse)
    # Root's pages are always believed, so the test as root expects no fault.
    assert read(stranger).fault is (None if owner == 0 else PageFault.FOREIGN)
    assert read(PageReader(path, Pulse, owners=frozenset({owner}))).fault is None
    with pytest.raises(ConfigError, match="another user"):
        PageWriter(path, Pulse)


def test_a_page_is_readable_by_others_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        written(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_successor_goes_on_counting_so_that_a_reader_sees_its_first_record(path: Path) -> None:
    first = written(path, in_flight=1)
    reader = PageReader(path, Pulse)
    read(reader)
    seen = reader.peek()
    first.close()
    written(path, in_flight=2)
    assert reader.peek() != seen
    assert read(reader).record == Pulse(in_flight=2)


def test_a_writer_takes_over_a_file_that_holds_anything(path: Path) -> None:
    path.write_bytes(b"\xff" * PAGE_BYTES)
    written(path, in_flight=3)
    assert read(PageReader(path, Pulse)).record == Pulse(in_flight=3)


def test_the_record_that_was_left_is_there_for_a_successor_however_old(path: Path) -> None:
    written(path, in_flight=7).close()
    assert PageReader(path, Pulse).read_left().record == Pulse(in_flight=7)


def test_closing_removes_the_own_page_on_request(path: Path) -> None:
    written(path).close(unlink=True)
    assert not path.exists()


def test_closing_leaves_the_page_that_a_successor_made_anew(path: Path) -> None:
    old = written(path, in_flight=1)
    for file in path.parent.iterdir():
        file.unlink()
    assert not old.check()
    successor = written(path, in_flight=2)
    old.close(unlink=True)
    assert successor.check()
    assert read(PageReader(path, Pulse)).record == Pulse(in_flight=2)


def test_a_record_too_large_for_a_page_leaves_the_last_one_in_place(path: Path) -> None:
    writer = PageWriter(path, Grant)
    grant = Grant(epoch=1, mode=GrantMode.OPEN)
    writer.write(grant, now_ns=NOW_NS, ttl_ns=TTL_NS)
    with pytest.raises(ValueError, match="a page holds"):
        writer.write(
            Grant(epoch=2, mode=GrantMode.OPEN, reason="x" * PAGE_BYTES),
            now_ns=NOW_NS,
            ttl_ns=TTL_NS,
        )
    assert PageReader(path, Grant).read(now_ns=NOW_NS).record == grant


class NextPulse(Pulse, frozen=True, kw_only=True):
    """The pulse of the next layout, which has one more field."""

    gpu_clock_ratio: float = 1.0


class PreviousPulse(msgspec.Struct, frozen=True, kw_only=True):
    """The pulse of the previous layout, which lacks most fields."""

    in_flight: int = 0


def page_of(record: msgspec.Struct, version: int) -> bytes:
    body = pack_body(
        msgspec.msgpack.encode(record), sequence=2, stamp_ns=NOW_NS, expires_ns=NOW_NS + TTL_NS
    )
    head = struct.pack("<4sHHQ", b"RMXP", version, Pulse.KIND, 2)
    return (head + body).ljust(PAGE_BYTES, b"\0")


def test_a_page_of_the_next_layout_is_read_without_its_new_fields(path: Path) -> None:
    path.write_bytes(page_of(NextPulse(in_flight=4, gpu_clock_ratio=0.5), LAYOUT_VERSION + 1))
    assert read(PageReader(path, Pulse)).record == Pulse(in_flight=4)


def test_a_page_of_the_previous_layout_is_read_with_defaults(path: Path) -> None:
    path.write_bytes(page_of(PreviousPulse(in_flight=4), LAYOUT_VERSION - 1))
    assert read(PageReader(path, Pulse)).record == Pulse(in_flight=4)


def test_the_next_layout_reads_a_page_of_this_one(path: Path) -> None:
    written(path, in_flight=4)
    assert PageReader(path, NextPulse).read(now_ns=NOW_NS).record == NextPulse(in_flight=4)
