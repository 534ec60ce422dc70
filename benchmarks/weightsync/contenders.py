"""The encodings that are compared: ours and the formats of other systems, each with its hash.

`xor` and `overwrite` are byte for byte what stores of the shared layout hold (one zstd-1 frame a
tensor), written by us. `xor_planes` is XOR with a frame for each byte of the elements, in which the
bytes that barely change lie in a row. `int32` is the patch of indices and values that goes over
collectives, not compressed. All hash the new state (xxh3-128) when they encode and again when they
have applied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zstandard

from weightsync.elements import state_hash
from weightsync.elements.bits import Bits, TensorSpec, bytes_of
from weightsync.encoding.codec import Encoded, Encoding, decode, encode, encode_as
from weightsync.encoding.delta import checked_apply

_SPECS = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}


class Contender(Protocol):
    def encode(self, old: Bits, new: Bits) -> tuple[object, int, str] | None:
        """Payload, its bytes and the digest of `new`; None where nothing changed."""
        ...

    def apply(self, payload: object, bits: Bits) -> str:
        """Changes the bits in place; returns the digest of the new bits."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """One of our codec's encodings; None takes the smallest one, as a publisher does."""

    encoding: Encoding | None

    def encode(self, old: Bits, new: Bits) -> tuple[object, int, str] | None:
        found = encode(old, new) if self.encoding is None else encode_as(self.encoding, old, new)
        return None if found is None else (found, len(found.payload), found.digest)

    def apply(self, payload: object, bits: Bits) -> str:
        assert isinstance(payload, Encoded)
        spec = TensorSpec(_SPECS[bits.itemsize], (bits.size,))
        delta = decode(payload.encoding, memoryview(payload.payload), spec)
        return checked_apply(delta, bits, hashed=True)


class IndexAndValue:
    """int32 positions and new values, as they are."""

    def encode(self, old: Bits, new: Bits) -> tuple[object, int, str] | None:
        positions = np.flatnonzero(old != new).astype(np.int32)
        if positions.size == 0:
            return None
        values = new[positions]
        return (positions, values), positions.nbytes + values.nbytes, state_hash.digest_of(new)

    def apply(self, payload: object, bits: Bits) -> str:
        assert isinstance(payload, tuple)
        positions, values = payload
        bits[positions] = values
        return state_hash.digest_of(bits)


class XorPlanes:
    """XOR in one zstd-1 frame for each byte of the elements."""

    def encode(self, old: Bits, new: Bits) -> tuple[object, int, str] | None:
        changed = np.bitwise_xor(old, new)
        if not changed.any():
            return None
        squeeze = zstandard.ZstdCompressor(level=1).compress
        planes = bytes_of(changed).reshape(-1, changed.itemsize).T
        frames = [squeeze(np.ascontiguousarray(plane).data) for plane in planes]
        return frames, sum(map(len, frames)), state_hash.digest_of(new)

    def apply(self, payload: object, bits: Bits) -> str:
        assert isinstance(payload, list)
        expand = zstandard.ZstdDecompressor().decompress
        planes = [np.frombuffer(expand(frame), dtype=np.uint8) for frame in payload]
        bits ^= np.stack(planes, axis=1).reshape(-1).view(bits.dtype)
        return state_hash.digest_of(bits)


CONTENDERS: Mapping[str, Contender] = {
    "rosemux": Codec(None),
    "context": Codec(Encoding.CONTEXT),
    "xor": Codec(Encoding.XOR),
    "xor_planes": XorPlanes(),
    "overwrite": Codec(Encoding.OVERWRITE),
    "int32": IndexAndValue(),
}
