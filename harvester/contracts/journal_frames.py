"""The journal's compressed form: zstd frames in which each line ends a block.

A line is whole in the file once it is written, and finds the lines before it in the compressor's
window: beats are much like one another. A killed writer leaves a frame without its end, perhaps
with a torn line: the next one cuts the line and ends the frame. `zstd -dc` reads such files too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from harvester.contracts.errors import Corrupt

MAGIC = b"\x28\xb5\x2f\xfd"
END_OF_FRAME = b"\x01\x00\x00"
"""An empty last block: it ends a frame without a checksum."""
_LEVEL = 1
"""Level 3 makes no fewer bytes of such short blocks, and takes longer."""
_WINDOW_LOG = 19
"""512 KiB, some 150 beats: more gains nothing."""
_FRAME_BYTES = 4 << 20
"""Bytes of lines in a frame: damage costs the rest of one, about two minutes."""
_MAX_WINDOW_BYTES = 8 << 20
_MAX_HEADER_BYTES = 18
_BLOCK_HEADER_BYTES = 3
_RLE, _RESERVED = 1, 3
_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 512
"""Small, because a forged file unpacks to 32,768 times as much: 16 MiB at once."""


class LinePacker:
    """Bytes to append to a file for each line. The caller reports whether they were written."""

    def __init__(self, *, in_frame: bool = False) -> None:
        """`in_frame`: the file ends in a frame that another writer has not ended."""
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, window_log=_WINDOW_LOG, write_content_size=0, write_checksum=0
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._stream: zstandard.ZstdCompressionObj | None = None
        self._line_bytes = 0
        self._in_frame = in_frame

    def pack(self, line: bytes) -> bytes:
        packed = b""
        if self._stream is None:
            packed = END_OF_FRAME if self._in_frame else b""
            self._stream, self._line_bytes = self._compressor.compressobj(), 0
        packed += self._stream.compress(line)
        self._line_bytes += len(line)
        if self._line_bytes < _FRAME_BYTES:
            return packed + self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        packed += self._stream.flush()
        self._stream = None
        return packed

    def written(self) -> None:
        """The line that was packed last is in the file."""
        self._in_frame = self._stream is not None

    def refused(self) -> None:
        """The file refused the bytes packed last: later lines may not refer to them."""
        self._stream = None

    def end(self) -> bytes:
        """Bytes that end the file's last frame."""
        return END_OF_FRAME if self._in_frame else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLine:
    end_bytes: int
    """Offset of the end of the last whole line."""
    in_frame: bool
    """Whether its frame has no end."""


def is_packed(head: bytes) -> bool:
    """Whether a file that begins so is compressed."""
    return head.startswith(MAGIC)


def last_line_of(path: Path) -> LastLine:
    """The end of the file's last whole line. Raises Corrupt for a file of another form."""
    size_bytes = path.stat().st_size
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        at = 0
        while at < size_bytes:
            frame = at
            header_bytes = _frame_header_bytes(file.read(_MAX_HEADER_BYTES), path.name, at)
            if header_bytes is None:
                return LastLine(end_bytes=frame, in_frame=False)
            ends, last = [at + header_bytes], False
            while not last:
                file.seek(ends[-1])
                header = int.from_bytes(file.read(_BLOCK_HEADER_BYTES), "little")
                kind, content_bytes = header >> 1 & 3, header >> 3
                if kind == _RESERVED:
                    raise Corrupt(f"{path.name} byte {ends[-1]}: no block of zstd")
                end = ends[-1] + _BLOCK_HEADER_BYTES + (1 if kind == _RLE else content_bytes)
                if end > size_bytes:
                    return _last_line_in(file, frame, ends, path.name)
                ends.append(end)
                last = bool(header & 1)
            at = ends[-1]
            file.seek(at)
        return LastLine(end_bytes=at, in_frame=False)


def _last_line_in(file: BinaryIO, frame: int, ends: list[int], name: str) -> LastLine:
    """The last line of a frame without its end. A line beyond 128 KiB has several blocks; the first
    blocks alone are no line."""
    stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    file.seek(frame)
    at, found = frame, frame
    for end in ends:
        try:
            content = stream.decompress(file.read(end - at))
        except zstandard.ZstdError as error:
            raise Corrupt(f"{name} byte {at}: {error}") from error
        at = end
        if content.endswith(b"\n"):
            found = end
    return LastLine(end_bytes=found, in_frame=found > frame)


def packed_lines(file: BinaryIO, *, max_bytes: int) -> Iterator[bytes]:
    """The lines of a compressed file as far as its blocks are whole; the last one may be torn, and
    one beyond `max_bytes` is cut there. Raises Corrupt for damaged blocks."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    # zstd's stream reader would keep back bytes without room in the buffer when the file ends.
    stream = decompressor.decompressobj(read_across_frames=True)
    begun: list[bytes] = []
    begun_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        try:
            content = stream.decompress(chunk)
        except zstandard.ZstdError as error:
            raise Corrupt(str(error)) from error
        at = 0
        while end := content.find(b"\n", at) + 1:
            yield b"".join((*begun, content[at:end]))
            begun, begun_bytes, at = [], 0, end
        begun.append(content[at:])
        begun_bytes += len(content) - at
        if begun_bytes >= max_bytes:
            break
    if begun_bytes:
        yield b"".join(begun)[:max_bytes]


def _frame_header_bytes(head: bytes, name: str, at: int) -> int | None:
    """Size of a frame's header; None if it is torn."""
    if not MAGIC.startswith(head[:4]):
        raise Corrupt(f"{name}: byte {at} begins no zstd frame")
    try:
        header_bytes = zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    return header_bytes if header_bytes <= len(head) else None
