"""The `planes` layout of a delta: differences of all elements, one stream per byte of the element.

Made and applied a run of elements at a time, so that a publisher whose every element changes holds
the payload and little else. Decides nothing about when planes are worth it; codec.py does.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from harvester.contracts.errors import Corrupt
from weightsync.elements import kernels
from weightsync.elements.bits import Bits
from weightsync.encoding.sparse import FORMAT
from weightsync.encoding.stream import LargePayload, StreamPacker, pack_stream, read_stream
from weightsync.encoding.varint import PayloadReader, varint

PLANES = 1
"""Layout number of a payload of plane streams."""
RUN_ELEMENTS = 1 << 20
_Rows: TypeAlias = npt.NDArray[np.uint8]
_PREFIX_BYTES = 16
"""More than any length takes."""


def planes_payload(old: Bits, new: Bits) -> bytes | memoryview:
    """The differences of all elements, each stream behind its length."""
    head = bytes((FORMAT, PLANES, old.itemsize)) + varint(old.size)
    if old.size <= RUN_ELEMENTS:
        rows = np.empty((old.itemsize, old.size), dtype=np.uint8)
        kernels.write_planes(old, new, rows)
        packed = map(pack_stream, rows)
        return b"".join((head, *(part for row in packed for part in (varint(len(row)), row))))
    payload = LargePayload(old.itemsize * (old.size + _PREFIX_BYTES))
    streams = [payload, *(LargePayload(old.size) for _ in range(old.itemsize - 1))]
    packers = [StreamPacker(k, into, raw_bytes=old.size) for k, into in enumerate(streams)]
    for rows in _rows(old, new):
        for packer, row in zip(packers, rows, strict=True):
            packer.take(row)
    for plane, packer in enumerate(packers):
        stream = streams.pop(0)
        if not packer.finish():
            for rows in _rows(old, new):
                stream.append(rows[plane].data)
        if stream is payload:
            payload.prepend(head + varint(len(stream)))
        else:
            payload.append(varint(len(stream)))
            payload.append(stream.view())
    return payload.view()


def apply_planes_payload(reader: PayloadReader, bits: Bits) -> None:
    """Changes bits by the streams that follow; raises Corrupt, and then they are in doubt."""
    streams = [
        read_stream(reader.take(reader.number(at_most=bits.size)), bits.size)
        for _ in range(bits.itemsize)
    ]
    reader.finish()
    for run in _runs(bits.size):
        changed = bits[run]
        rows = np.empty((bits.itemsize, changed.size), dtype=np.uint8)
        for stream, row in zip(streams, rows, strict=True):
            stream.read_into(row)
        kernels.apply_planes(changed, rows)
    for stream in streams:
        if not stream.is_over():
            raise Corrupt(f"planes of more than {bits.size} elements")


def _runs(elements: int) -> Iterator[slice]:
    for start in range(0, elements, RUN_ELEMENTS):
        yield slice(start, min(elements, start + RUN_ELEMENTS))


def _rows(old: Bits, new: Bits) -> Iterator[_Rows]:
    """Rows of one run after another, in the same memory where the next one is as long."""
    rows = np.empty((old.itemsize, 0), dtype=np.uint8)
    for run in _runs(old.size):
        if rows.shape[1] != run.stop - run.start:
            rows = np.empty((old.itemsize, run.stop - run.start), dtype=np.uint8)
        kernels.write_planes(old[run], new[run], rows)
        yield rows
