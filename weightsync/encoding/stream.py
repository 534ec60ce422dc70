"""One compressed run of bytes: zstd level 1 where that is smaller, else the bytes themselves.

Two forms. A stream is ours: its raw length is known from elsewhere, so it carries neither magic nor
size, and equal lengths mean "stored raw". A frame is standard zstd with its content size, as the
`xor` and `overwrite` delta encodings of other systems write it. Neither reader ever allocates more
than the length that the caller expects.
"""

import io
import mmap
import threading
from typing import Any

import numpy as np
import zstandard

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import Bytes

_FRONT_BYTES = 64
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
LEVEL = 1
FRAME_HEAD_BYTES = 18
RAW_BELOW_BYTES = 24
"""Shorter streams are stored uncompressed."""
_ANNOUNCES = 0xE0
"""Bits of a frame's first byte behind the magic; without them no content size follows."""


class LargePayload:
    """Bytes that are appended, up to `room_bytes`; a header may be prepended at the end.

    Separate pages hold the bytes: they exist once written and return to the system at once. Heap
    memory would not, since a trainer's allocations lie in between.
    """

    def __init__(self, room_bytes: int) -> None:
        self._pages = memoryview(mmap.mmap(-1, _FRONT_BYTES + room_bytes, flags=_FLAGS))
        self._start = self._end = _FRONT_BYTES

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, piece: Any) -> None:
        """Append an object with the buffer protocol."""
        end = self._end + len(piece)
        self._pages[self._end : end] = piece
        self._end = end

    def prepend(self, piece: bytes) -> None:
        """Put bytes in front, up to 64 in all."""
        start = self._start - len(piece)
        self._pages[start : self._start] = piece
        self._start = start

    def clear(self) -> None:
        self._start = self._end = _FRONT_BYTES

    def view(self) -> memoryview:
        """The content; the pages are freed with its last view."""
        return self._pages[self._start : self._end].toreadonly()


class _Codecs(threading.local):
    """zstd contexts are not thread-safe, and making one costs more than a small tensor."""

    def __init__(self) -> None:
        bare = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
        )
        self.packer = zstandard.ZstdCompressor(compression_params=bare)
        self.packers = [zstandard.ZstdCompressor(compression_params=bare) for _ in range(8)]
        """Compressors for streams that are made concurrently."""
        self.unpacker = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        self.framer = zstandard.ZstdCompressor(level=LEVEL)
        self.unframer = zstandard.ZstdDecompressor()


_codecs = _Codecs()


def pack_stream(raw: Bytes) -> bytes:
    """`raw` compressed, or as it is when that is not smaller."""
    if raw.size < RAW_BELOW_BYTES:
        return raw.tobytes()
    packed = _codecs.packer.compress(raw.data)
    return packed if len(packed) < raw.size else raw.tobytes()


class StreamPacker:
    """`pack_stream` of bytes that come run after run; one at a time for each `number` below 8."""

    def __init__(self, number: int, into: LargePayload, *, raw_bytes: int) -> None:
        self._packing = _codecs.packers[number].compressobj()
        self._into = into
        self._raw_bytes = raw_bytes
        self._is_smaller = True

    def take(self, raw: Bytes) -> None:
        self._keep(self._packing.compress(raw.data))

    def finish(self) -> bool:
        """Whether the result is smaller than its input; otherwise `into` is empty."""
        self._keep(self._packing.flush())
        return self._is_smaller

    def _keep(self, piece: bytes) -> None:
        if self._is_smaller and len(self._into) + len(piece) < self._raw_bytes:
            self._into.append(piece)
        else:
            self._is_smaller = False
            self._into.clear()


class StreamReader:
    """The raw bytes behind a stream, from its start on."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read_into(self, raw: Bytes) -> None:
        """Raises Corrupt where there are fewer."""
        at = 0
        try:
            while at < raw.size and (got := self._source.readinto(raw[at:].data)):
                at += got
        except zstandard.ZstdError as error:
            raise Corrupt(f"zstd: {error}") from error
        if at < raw.size:
            raise Corrupt(f"stream ends {raw.size - at} bytes early")

    def is_over(self) -> bool:
        """Whether all of it was read."""
        try:
            return not self._source.read(1)
        except zstandard.ZstdError as error:
            raise Corrupt(f"zstd: {error}") from error


def read_stream(packed: memoryview, raw_length: int) -> StreamReader:
    """`unpack_stream` without all of it in memory."""
    if len(packed) == raw_length:
        return StreamReader(io.BytesIO(packed))
    unpacker = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    return StreamReader(unpacker.stream_reader(packed))


def unpack_stream(packed: memoryview, raw_length: int) -> Bytes:
    """The `raw_length` bytes behind `packed`; raises Corrupt."""
    if len(packed) == raw_length:
        return np.frombuffer(packed, dtype=np.uint8)
    if len(packed) > raw_length:
        raise Corrupt(f"stream of {len(packed)} bytes for {raw_length} raw bytes")
    raw = _decompress(_codecs.unpacker, zstandard.FORMAT_ZSTD1_MAGICLESS, packed, raw_length)
    if raw.size != raw_length:
        raise Corrupt(f"stream holds {raw.size} bytes where {raw_length} were announced")
    return raw


def pack_frame(raw: Bytes) -> bytes:
    """A standard zstd frame."""
    return _codecs.framer.compress(raw.data)


def frame_bytes(head: memoryview) -> int:
    """Size of a frame's content as its first FRAME_HEAD_BYTES announce it: a large number if they
    do not, 0 if they are no frame's."""
    try:
        return int(zstandard.get_frame_parameters(head).content_size)
    except zstandard.ZstdError:
        return 0


def unpack_frame(packed: memoryview, max_length: int) -> Bytes:
    """The content of a standard zstd frame, at most `max_length` bytes; raises Corrupt."""
    return _decompress(_codecs.unframer, zstandard.FORMAT_ZSTD1, packed, max_length)


def _decompress(
    decompressor: zstandard.ZstdDecompressor, form: int, packed: memoryview, max_length: int
) -> Bytes:
    try:
        # The decompressor believes an announced size over our limit, so it is read first.
        if form != zstandard.FORMAT_ZSTD1_MAGICLESS or not packed or packed[0] & _ANNOUNCES:
            announced = zstandard.get_frame_parameters(packed, format=form).content_size
            if announced == 0:
                return np.empty(0, dtype=np.uint8)
            if announced != zstandard.CONTENTSIZE_UNKNOWN and announced > max_length:
                raise Corrupt(
                    f"zstd frame announces {announced} bytes where {max_length} are allowed"
                )
        raw = decompressor.decompress(packed, max_output_size=max_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd: {error}") from error
    return np.frombuffer(raw, dtype=np.uint8)
