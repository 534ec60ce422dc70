"""How a page's 4 KiB are laid out, and how a reader knows that it may believe them.

A page is a sequence-locked envelope around one msgpack record:

    offset  bytes  field
    0       4      magic "RMXP"
    4       2      layout version
    6       2      record kind
    8       8      sequence number, odd while the writer is inside
    16      8      stamp, CLOCK_MONOTONIC ns at writing
    24      8      expiry, CLOCK_MONOTONIC ns
    32      4      length of the record in bytes
    36      4      CRC-32 of header fields 8..36 and the record
    40      ...    record, msgpack map; fields are added with defaults and never renamed

Readers of layout N accept N and N-1, and a layout N-1 reader skips fields that it does not know.
The checksum binds the record to its sequence number, so that one sequence number means one record:
a page that was copied while it was written does not pass. A page that two processes want to write
has another magic, "RMXC", and is believed by no reader of any version. Its writer renews it on each
beat, so past its expiry it has no writer; nor has an odd sequence number over an expired record.
This module touches no file: it packs and checks bytes.
"""

import struct
import zlib
from enum import StrEnum

import msgspec

PAGE_BYTES = 4096
MAGIC = b"RMXP"
CONTESTED = b"RMXC"
_UNWRITTEN = bytes(len(MAGIC))
"""A page whose writer has made the file and written nothing yet."""
LAYOUT_VERSION = 1
OLDEST_READABLE_VERSION = LAYOUT_VERSION - 1

_HEAD = struct.Struct("<4sHHQ")
_BODY = struct.Struct("<QQQI")
_CRC = struct.Struct("<I")
_PAGE = struct.Struct("<4sHHQQQII")
SEQUENCE_OFFSET = 8
BODY_OFFSET = _HEAD.size
RECORD_OFFSET = _PAGE.size
CRC_OFFSET = RECORD_OFFSET - _CRC.size
MAX_RECORD_BYTES = PAGE_BYTES - RECORD_OFFSET

# A stamp may be this far ahead of the reader: CLOCK_MONOTONIC is one clock on one machine, so more
# than scheduling noise means a page from another boot or another machine.
FUTURE_TOLERANCE_NS = 1_000_000_000


class PageFault(StrEnum):
    """Why a page cannot be read. Every fault closes a gate: missing data is a breach."""

    MISSING = "missing"
    FOREIGN = "foreign"
    TORN = "torn"
    VERSION = "version"
    EXPIRED = "expired"
    CLOCK = "clock"
    CONFLICT = "conflict"


class Sealed(msgspec.Struct, frozen=True):
    """A whole record with its times, not yet decoded."""

    stamp_ns: int
    expires_ns: int
    record: bytes


def pack_head(*, kind: int, sequence: int, contested: bool = False) -> bytes:
    return _HEAD.pack(CONTESTED if contested else MAGIC, LAYOUT_VERSION, kind, sequence)


def pack_body(record: bytes, *, sequence: int, stamp_ns: int, expires_ns: int) -> bytes:
    """Everything behind the head, checksum included; `sequence` is the head's when all is written.

    Raises ValueError when the record does not fit into a page.
    """
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"record of {len(record)} bytes, a page holds {MAX_RECORD_BYTES}")
    times = _BODY.pack(sequence, stamp_ns, expires_ns, len(record))
    crc = zlib.crc32(record, zlib.crc32(times))
    return times[BODY_OFFSET - SEQUENCE_OFFSET :] + _CRC.pack(crc) + record


def sequence_of(page: bytes) -> int:
    sequence: int = _HEAD.unpack_from(page)[3]
    return sequence


def unseal(page: bytes, *, kind: int, now_ns: int) -> Sealed | PageFault:
    """Check a copied page, which may be shorter than a whole one."""
    if len(page) < RECORD_OFFSET:
        return PageFault.TORN
    head = _PAGE.unpack_from(page)
    magic, version, found_kind, sequence, stamp_ns, expires_ns, length, crc = head
    if magic == _UNWRITTEN:
        return PageFault.MISSING
    if magic not in (MAGIC, CONTESTED) or found_kind != kind:
        return PageFault.FOREIGN
    contested = magic == CONTESTED
    if not contested and not OLDEST_READABLE_VERSION <= version <= LAYOUT_VERSION + 1:
        return PageFault.VERSION
    fault = time_fault(stamp_ns, expires_ns, now_ns=now_ns)
    if sequence % 2 and fault is PageFault.EXPIRED:
        # The writer ended before its first write: the state that it took over bounds the wait.
        return fault
    record = page[RECORD_OFFSET : RECORD_OFFSET + min(length, MAX_RECORD_BYTES)]
    crc_found = zlib.crc32(record, zlib.crc32(page[SEQUENCE_OFFSET:CRC_OFFSET]))
    torn = sequence % 2 or len(record) != length or crc_found != crc
    if contested:
        # The living writer would write on each beat, so an old conflict has no writer left.
        return fault if fault is PageFault.EXPIRED and not torn else PageFault.CONFLICT
    if torn:
        return PageFault.TORN
    return Sealed(stamp_ns, expires_ns, record) if fault is None else fault


def time_fault(stamp_ns: int, expires_ns: int, *, now_ns: int) -> PageFault | None:
    """Whether a whole record may not be believed at `now_ns`."""
    if stamp_ns > now_ns + FUTURE_TOLERANCE_NS:
        return PageFault.CLOCK
    return PageFault.EXPIRED if now_ns >= expires_ns else None
