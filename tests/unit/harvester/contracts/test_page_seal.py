"""The bytes of a page."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.page.seal import (
    CONTESTED,
    FUTURE_TOLERANCE_NS,
    LAYOUT_VERSION,
    MAX_RECORD_BYTES,
    PAGE_BYTES,
    PageFault,
    Sealed,
    pack_body,
    pack_head,
    unseal,
)

KIND = 2
STAMP_NS, EXPIRES_NS = 5_000_000_000, 5_500_000_000


def sealed_page(record: bytes = b"record", *, sequence: int = 8, kind: int = KIND) -> bytes:
    head = pack_head(kind=kind, sequence=sequence)
    body = pack_body(record, sequence=sequence, stamp_ns=STAMP_NS, expires_ns=EXPIRES_NS)
    return (head + body).ljust(PAGE_BYTES, b"\0")


def with_version(page: bytes, version: int) -> bytes:
    return page[:4] + struct.pack("<H", version) + page[6:]


@given(st.binary(max_size=MAX_RECORD_BYTES), st.integers(0, 2**62).map(lambda n: 2 * n))
def test_a_sealed_record_is_read_again(record: bytes, sequence: int) -> None:
    page = sealed_page(record, sequence=sequence)
    assert unseal(page, kind=KIND, now_ns=STAMP_NS) == Sealed(STAMP_NS, EXPIRES_NS, record)


def test_a_page_is_readable_up_to_its_expiry_and_not_at_it() -> None:
    page = sealed_page()
    assert isinstance(unseal(page, kind=KIND, now_ns=EXPIRES_NS - 1), Sealed)
    assert unseal(page, kind=KIND, now_ns=EXPIRES_NS) is PageFault.EXPIRED


def test_a_stamp_from_the_future_is_a_clock_fault() -> None:
    page = sealed_page()
    tolerated = STAMP_NS - FUTURE_TOLERANCE_NS
    assert isinstance(unseal(page, kind=KIND, now_ns=tolerated), Sealed)
    assert unseal(page, kind=KIND, now_ns=tolerated - 1) is PageFault.CLOCK


def test_another_kind_or_another_magic_is_foreign() -> None:
    assert unseal(sealed_page(kind=1), kind=KIND, now_ns=STAMP_NS) is PageFault.FOREIGN
    assert unseal(b"ELF!" + sealed_page()[4:], kind=KIND, now_ns=STAMP_NS) is PageFault.FOREIGN


def test_a_page_that_two_want_to_write_is_a_conflict_and_foreign_to_older_readers() -> None:
    head = pack_head(kind=KIND, sequence=2, contested=True)
    assert head.hex() == "524d584301000" + f"{KIND:x}00" + "0200000000000000"
    page = head + sealed_page()[len(head) :]
    assert unseal(page, kind=KIND, now_ns=STAMP_NS) is PageFault.CONFLICT
    assert unseal(page, kind=KIND + 1, now_ns=STAMP_NS) is PageFault.FOREIGN


def test_a_conflict_whose_rivals_are_silent_is_as_old_as_any_page() -> None:
    page = CONTESTED + sealed_page()[len(CONTESTED) :]
    assert unseal(page, kind=KIND, now_ns=EXPIRES_NS - 1) is PageFault.CONFLICT
    assert unseal(page, kind=KIND, now_ns=EXPIRES_NS) is PageFault.EXPIRED


@pytest.mark.parametrize("offset", [16, 24, 30, 36, 41])
def test_the_times_of_a_conflict_are_believed_where_its_checksum_holds(offset: int) -> None:
    page = bytearray(CONTESTED + sealed_page()[len(CONTESTED) :])
    page[offset] ^= 1
    assert unseal(bytes(page), kind=KIND, now_ns=EXPIRES_NS) is PageFault.CONFLICT


@pytest.mark.parametrize("left", [b"", sealed_page()[16:]], ids=["a new page", "one taken over"])
def test_a_page_whose_writer_ended_before_its_first_record_is_as_old_as_what_it_took_over(
    left: bytes,
) -> None:
    page = (pack_head(kind=KIND, sequence=9) + left).ljust(PAGE_BYTES, b"\0")
    assert unseal(page, kind=KIND, now_ns=EXPIRES_NS) is PageFault.EXPIRED


@pytest.mark.parametrize("version", [LAYOUT_VERSION - 1, LAYOUT_VERSION + 1])
def test_the_neighbouring_layout_versions_are_read(version: int) -> None:
    page = with_version(sealed_page(), version)
    assert isinstance(unseal(page, kind=KIND, now_ns=STAMP_NS), Sealed)


def test_a_layout_two_versions_ahead_is_a_version_fault() -> None:
    page = with_version(sealed_page(), LAYOUT_VERSION + 2)
    assert unseal(page, kind=KIND, now_ns=STAMP_NS) is PageFault.VERSION


def test_an_odd_sequence_is_torn() -> None:
    assert unseal(sealed_page(sequence=9), kind=KIND, now_ns=STAMP_NS) is PageFault.TORN


def test_a_new_head_over_an_old_body_is_torn() -> None:
    # The state that a reader may see where stores arrive out of order.
    page = pack_head(kind=KIND, sequence=10) + sealed_page(sequence=8)[16:]
    assert unseal(page, kind=KIND, now_ns=STAMP_NS) is PageFault.TORN


def test_a_record_larger_than_a_page_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ValueError, match="a page holds"):
        pack_body(bytes(MAX_RECORD_BYTES + 1), sequence=2, stamp_ns=0, expires_ns=1)


@given(st.integers(8, 40 + 5), st.integers(1, 255))
def test_no_flipped_byte_behind_the_kind_is_believed(offset: int, flip: int) -> None:
    page = bytearray(sealed_page())
    page[offset] ^= flip
    read = unseal(bytes(page), kind=KIND, now_ns=STAMP_NS)
    assert isinstance(read, PageFault)


@given(st.binary(max_size=64))
def test_garbage_behind_a_good_head_is_never_a_record(garbage: bytes) -> None:
    page = (pack_head(kind=KIND, sequence=8) + garbage).ljust(PAGE_BYTES, b"\0")
    assert isinstance(unseal(page, kind=KIND, now_ns=STAMP_NS), PageFault)
