"""A delta that stays encoded in the receiver's staging and is decoded each time it is applied.

Used where decoded deltas would not fit into memory. The encoded bytes have been checked.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import Bits, TensorSpec
from weightsync.encoding.codec import Encoding, decode
from weightsync.encoding.delta import Delta, checked_apply, max_overwrite_bytes
from weightsync.encoding.stream import FRAME_HEAD_BYTES, frame_bytes
from weightsync.layout.slices import SlicedDelta
from weightsync.reading.spool import StagedFile
from weightsync.receive.held_parts import EntryPart, placed
from weightsync.transport.ranges import ByteSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDelta:
    file: StagedFile
    span: ByteSpan
    encoding: Encoding
    spec: TensorSpec
    what: str
    """Version and tensor, for error messages."""
    part: EntryPart | None = None
    """The holder's part of the entry, to which the delta is cut; None: all of it."""

    @property
    def elements(self) -> int:
        return self.spec.elements if self.part is None else prod(self.part.of.shape)

    @property
    def lent_bytes(self) -> int:
        """Approximate memory for decoding and applying it, beside the tensor, in bytes."""
        raw_bytes = self.spec.size_bytes
        if self.encoding is Encoding.OVERWRITE:
            # A changed byte comes with four of its position.
            start = self.span.start
            head = ByteSpan(start, min(start + FRAME_HEAD_BYTES, self.span.stop))
            raw_bytes = min(frame_bytes(self.file.read(head).data), max_overwrite_bytes(self.spec))
        return self.span.size_bytes + raw_bytes

    def decoded(self, *, alone: bool = False) -> Delta:
        """The checked delta; with `alone` it shares no memory with the file. Raises Corrupt."""
        payload = self.file.read(self.span)
        if alone and self.file.kept_bytes:
            payload = payload.copy()
        try:
            delta = decode(self.encoding, payload.data, self.spec)
        except Corrupt as error:
            raise Corrupt(f"{self.what}: {error}") from error
        return delta if self.part is None else placed([self.part], delta, self.spec)[0]

    def apply(self, bits: Bits, *, hashed: bool = False) -> str:
        return checked_apply(self.decoded(), bits, hashed=hashed)


def decoded_bytes(delta: Delta) -> int:
    """Memory of a decoded delta, in bytes."""
    if isinstance(delta, SlicedDelta):
        return decoded_bytes(delta.delta)
    values = (getattr(delta, name) for name in getattr(delta, "__dataclass_fields__", ()))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def delta_bytes(delta: Delta) -> int:
    """Approximate temporary memory for applying a delta, in bytes."""
    if isinstance(delta, SlicedDelta):
        return delta_bytes(delta.delta)
    return delta.lent_bytes if isinstance(delta, StoredDelta) else 0
