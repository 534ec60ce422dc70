"""CUDA machine code of other GPUs, overwritten with zeros inside a shared library.

A library of vLLM has each kernel once per GPU generation. An entry that the driver would not load
on the one target keeps its header, which names its architecture, and loses its bytes: no offset
moves, and zeros compress to nothing. Layout of the section `.nv_fatbin`, little-endian:

    container   magic u32, version u16, header bytes u16, entries' bytes u64, then the entries
    entry       kind u16 (1 PTX, 2 machine code), version u16, header bytes u32, payload bytes u64,
                ..., architecture u32 at byte 28 (90 is Hopper), then the payload
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from deploy.gpu.wheel import CarryError

HOPPER = 90
_MAGIC = 0xBA55ED50
_ELF_MAGIC = b"\x7fELF\x02\x01"
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_ALIGNMENT_BYTES = 8


class CodeKind(IntEnum):
    PTX = 1
    MACHINE_CODE = 2


@dataclass(frozen=True, slots=True)
class FatbinEntry:
    kind: int
    architecture: int
    """Compute capability times ten; of PTX, the lowest that can run it."""
    start: int
    """Place of the payload in the file."""
    length_bytes: int


def containers(library: bytes | bytearray) -> Iterator[tuple[FatbinEntry, ...]]:
    """The entries of each container, in file order; empty without CUDA code."""
    if library[: len(_ELF_MAGIC)] != _ELF_MAGIC:
        raise CarryError("not a little-endian 64-bit ELF file")
    try:
        for start, end in _fatbin_sections(library):
            yield from _walk(library, start, end)
    except (struct.error, IndexError, ValueError) as error:
        raise CarryError(f"damaged ELF or CUDA section: {error}") from error


def keep_one_architecture(library: bytearray, architecture: int = HOPPER) -> int:
    """Zero what a GPU of `architecture` does not load; return the bytes that were zeroed.

    Its machine code stays where there is some, else the newest PTX that it can compile.
    """
    zeroed = 0
    for entries in containers(library):
        kept = _chosen(entries, architecture)
        for entry in entries:
            if (entry.kind, entry.architecture) != kept:
                library[entry.start : entry.start + entry.length_bytes] = bytes(entry.length_bytes)
                zeroed += entry.length_bytes
    return zeroed


def _chosen(entries: tuple[FatbinEntry, ...], architecture: int) -> tuple[int, int] | None:
    if any(e.kind == CodeKind.MACHINE_CODE and e.architecture == architecture for e in entries):
        return (CodeKind.MACHINE_CODE, architecture)
    ptx = [
        e.architecture for e in entries if e.kind == CodeKind.PTX and e.architecture <= architecture
    ]
    return (CodeKind.PTX, max(ptx)) if ptx else None


def _fatbin_sections(library: bytes | bytearray) -> Iterator[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    sections = [
        _SECTION.unpack_from(library, table + index * entry_bytes) for index in range(count)
    ]
    if not sections:
        return
    names = sections[names_index][4]
    for section in sections:
        name_start = names + section[0]
        name = library[name_start : library.index(b"\0", name_start)]
        if name == b".nv_fatbin":
            yield section[4], section[4] + section[5]


def _walk(library: bytes | bytearray, start: int, end: int) -> Iterator[tuple[FatbinEntry, ...]]:
    if end > len(library):
        raise ValueError("the section ends behind the file")
    at = start
    while at + _CONTAINER.size <= end:
        magic, _, header_bytes, body_bytes = _CONTAINER.unpack_from(library, at)
        if magic != _MAGIC:
            at += _ALIGNMENT_BYTES
            continue
        body = at + header_bytes
        at = body + body_bytes
        if header_bytes < _CONTAINER.size or at > end:
            raise ValueError("a container ends behind its section")
        yield tuple(_entries(library, body, at))


def _entries(library: bytes | bytearray, start: int, end: int) -> Iterator[FatbinEntry]:
    at = start
    while at < end:
        kind, _, header_bytes, payload_bytes, architecture = _ENTRY.unpack_from(library, at)
        payload = at + header_bytes
        at = payload + payload_bytes
        if header_bytes < _ENTRY.size or at > end:
            raise ValueError("an entry ends behind its container")
        yield FatbinEntry(kind, architecture, payload, payload_bytes)
