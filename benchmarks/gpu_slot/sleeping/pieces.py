"""Weights in pieces that fall asleep and wake: out to host memory and back, each piece in turn.

The order is vLLM's: asleep, a piece is copied and its memory given back before the next one; awake,
memory is put behind a piece's address and its contents are copied there. Addresses never change.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu_slot.decode_model import DecodeShape
from benchmarks.gpu_slot.sleeping.virtual_memory import VirtualMemory
from harvester.contracts.clock import monotonic_ns

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One passage over all pieces."""

    began_ns: int
    ended_ns: int
    size_bytes: int
    calls: dict[str, list[float]]
    """Seconds of each call of the memory interface, by its name."""

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) * 1e-9


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    address: int
    host_address: int
    size_bytes: int


@dataclass(slots=True)
class SleepingPieces:
    """Awake and filled from the beginning."""

    memory: VirtualMemory
    device: torch.device
    sizes_bytes: Sequence[int]
    """Multiples of the memory's granularity."""
    host: torch.Tensor
    """Bytes for all pieces; pinned where the device is a GPU."""
    _pieces: list[_Piece] = field(init=False)
    _positions: torch.Tensor = field(init=False)
    _scratch: torch.Tensor = field(init=False)
    _checksums: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if sum(self.sizes_bytes) > self.host.nbytes:
            raise ValueError(f"{self.host.nbytes} bytes of host memory do not hold all pieces")
        words = max(self.sizes_bytes) // _WORD_BYTES
        self._positions = torch.arange(words, dtype=torch.int64, device=self.device)
        self._scratch = torch.empty_like(self._positions)
        self._pieces, self._checksums = [], []
        offset = 0
        for number, size_bytes in enumerate(self.sizes_bytes):
            address = self.memory.reserve(size_bytes)
            self._pieces.append(_Piece(number, address, self.host.data_ptr() + offset, size_bytes))
            offset += size_bytes
        self.remap()
        for piece in self._pieces:
            self._fill(piece)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)

    def fall_asleep(self, *, pause_ratio: float = 0.0) -> Pass:
        """`pause_ratio`: pause after each piece, over the time of the piece."""
        return self._pass(self._fall_asleep, pause_ratio)

    def wake(self, *, pause_ratio: float = 0.0) -> Pass:
        return self._pass(self._wake, pause_ratio)

    def discard(self) -> Pass:
        """Memory is given back without a copy, as vLLM does with KV."""
        return self._pass(lambda piece: self.memory.unmap(piece.address))

    def remap(self) -> Pass:
        """Memory is put behind all pieces; their contents are undefined."""
        return self._pass(lambda piece: self.memory.map(piece.address))

    def write_back(self) -> Pass:
        """The contents that the last sleep left in host memory."""
        return self._pass(self._write_back)

    def damaged(self) -> list[int]:
        """Numbers of the pieces with contents other than the ones they were filled with."""
        wrong = []
        for piece in self._pieces:
            words = self._words(piece)
            self.memory.copy(to=words.data_ptr(), source=piece.address, size_bytes=piece.size_bytes)
            if self._checksum(words) != self._checksums[piece.number]:
                wrong.append(piece.number)
        self.memory.calls.take()
        return wrong

    def _pass(self, act: Callable[[_Piece], None], pause_ratio: float = 0.0) -> Pass:
        began_ns = monotonic_ns()
        for piece in self._pieces:
            piece_began_ns = monotonic_ns()
            act(piece)
            if pause_ratio:
                time.sleep(pause_ratio * (monotonic_ns() - piece_began_ns) * 1e-9)
        return Pass(
            began_ns=began_ns,
            ended_ns=monotonic_ns(),
            size_bytes=self.size_bytes,
            calls=self.memory.calls.take(),
        )

    def _fall_asleep(self, piece: _Piece) -> None:
        self.memory.copy(to=piece.host_address, source=piece.address, size_bytes=piece.size_bytes)
        self.memory.unmap(piece.address)

    def _wake(self, piece: _Piece) -> None:
        self.memory.map(piece.address)
        self._write_back(piece)

    def _write_back(self, piece: _Piece) -> None:
        self.memory.copy(to=piece.address, source=piece.host_address, size_bytes=piece.size_bytes)

    def _fill(self, piece: _Piece) -> None:
        words = self._words(piece)
        # Different in each piece, so that one in another's place is found.
        torch.mul(self._positions[: words.numel()], 2 * piece.number + 1, out=words)
        words.add_(piece.number)
        self._checksums.append(self._checksum(words))
        self.memory.copy(to=piece.address, source=words.data_ptr(), size_bytes=piece.size_bytes)
        self.memory.calls.take()

    def _words(self, piece: _Piece) -> torch.Tensor:
        return self._scratch[: piece.size_bytes // _WORD_BYTES]

    def _checksum(self, words: torch.Tensor) -> int:
        """Depends on each word and its place; computed on the device, modulo 2**64."""
        return int((words * (2 * self._positions[: words.numel()] + 1)).sum())


def tensor_sizes(shape: DecodeShape, *, granularity_bytes: int) -> list[int]:
    """Bytes of a bf16 model's matrices, each rounded up, and of one piece for its norms."""
    width = shape.heads * shape.head_dim
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = (
        shape.hidden * heads,
        width * shape.hidden,
        shape.hidden * 2 * shape.ffn,
        shape.ffn * shape.hidden,
    )
    ends = (shape.vocabulary * shape.hidden,) * 2
    norms = (2 * shape.layers + 1) * shape.hidden
    elements = (ends[0], *(layer * shape.layers), ends[1], norms)
    return [_rounded(2 * one, granularity_bytes) for one in elements]


def even_sizes(total_bytes: int, *, piece_bytes: int, granularity_bytes: int) -> list[int]:
    """Pieces of one size and a last one for the rest."""
    whole, rest = divmod(total_bytes, _rounded(piece_bytes, granularity_bytes))
    sizes = [_rounded(piece_bytes, granularity_bytes)] * whole
    return [*sizes, _rounded(rest, granularity_bytes)] if rest else sizes


def _rounded(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes
