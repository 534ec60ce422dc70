"""Encodings of a tensor: old and new bits to a payload, and a payload back to a checked delta.

`dense` is the new tensor; `xor` and `overwrite` equal the shared Hugging Face index layout's byte
for byte; `rosemux` writes changes by one unit in the last place as gap and sign, and all other
changes as gap and difference, because 84 to 90 % of an Adam step's changes are one unit. `encode`
takes the smaller of `rosemux` and `dense`, which can be composed; delta.py reads payloads back.

rosemux payload: bytes format, layout, width; varint elements; then by layout
  sparse  varints small, far, gap bytes, far gap bytes; streams gaps, signs, far gaps, width planes
  planes  width planes of zigzag differences of all elements
  groups  as `sparse`, with entropy-coded gaps (grouped.py)
  classes changes coded by the old elements (context.py); only of `context`
where a stream is varint packed length, bytes (see stream.py).
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np

from harvester.contracts.errors import Unsupported
from weightsync.elements import kernels, state_hash
from weightsync.elements.bits import (
    UNSIGNED_NUMPY,
    Bits,
    Bytes,
    TensorSpec,
    bits_from_bytes,
    bytes_of,
)
from weightsync.elements.compiled import forget_cache, is_cached
from weightsync.elements.element_sums import Dims, bits_change, bits_sum, streams_change
from weightsync.encoding.context import WIDTHS_BYTES as CONTEXT_WIDTHS_BYTES
from weightsync.encoding.context import classes_payload
from weightsync.encoding.delta import (
    Delta,
    checked_apply,
    decode_dense,
    decode_overwrite,
    decode_rosemux,
    decode_xor,
    rosemux_layout,
)
from weightsync.encoding.grouped import grouped_payload, is_worth_groups
from weightsync.encoding.plain import PLAIN_BYTES, plain_deltas, plain_payload
from weightsync.encoding.planes import PLANES, apply_planes_payload, planes_payload
from weightsync.encoding.sparse import FORMAT, SPARSE, SparseStreams, compared
from weightsync.encoding.stream import pack_frame, pack_stream, read_stream
from weightsync.encoding.varint import PayloadReader, varint


class Encoding(StrEnum):
    DENSE = "dense"
    XOR = "xor"
    OVERWRITE = "overwrite"
    ROSEMUX = "rosemux"
    CONTEXT = "context"
    """`rosemux` in its least size, which takes the whole old tensor to read."""

    @property
    def is_ours(self) -> bool:
        """Whether RoseMux alone reads and writes it."""
        return self in {Encoding.ROSEMUX, Encoding.CONTEXT}


@dataclass(frozen=True, slots=True)
class Encoded:
    encoding: Encoding
    payload: bytes | memoryview
    changed: int
    """Number of elements that differ."""
    digest: str
    """xxh3-128 of the new bits."""
    sum_change: int | None = None
    """Number to add to the tensor's sum (element_sums.py), where its place was given; made of the
    compared bits and never of the payload, so that it shows a wrong one."""


MOST_CONTEXT_CHANGES = 1 << 21
"""Changes of a tensor up to which `context` codes them: 16 bytes each, half as many again at its
end."""
PLANES_ABOVE_RATIO = 0.40
"""Share of changed elements below which neither `planes` nor `dense` can win: a zero difference
costs at least one bit of zstd's entropy coder in each plane."""
_SPARSE_BELOW_RATIO = 0.60
"""Share from which on `planes` marks the changed elements in fewer bytes than gaps do."""
_GUESS_RUNS = 128
_GUESS_RUN_ELEMENTS = 32
"""The share of changed elements is estimated from this many runs of neighbours: scattered single
elements would touch all of a tensor's cache lines."""
_SAMPLE_ELEMENTS = 1 << 16
_SAMPLES = 8
_RUN_ELEMENTS = _SAMPLE_ELEMENTS // _SAMPLES


def encode(old: Bits, new: Bits, dims: Dims | None = None) -> Encoded | None:
    """The smallest payload that turns `old` into `new`, or None if nothing changed. `dims`: the
    place of these bits in their tensor, for its sum."""
    if new.nbytes <= PLAIN_BYTES:
        # Read once: a trainer's tensor may change meanwhile.
        new = new if dims is None else new.copy()
        plain = plain_payload(old, new)
        if plain.changed == 0:
            return None
        if plain.payload and plain.changed <= PLANES_ABOVE_RATIO * old.size:
            change = None if dims is None else bits_change(old, new, dims)
            return Encoded(Encoding.ROSEMUX, plain.payload, plain.changed, plain.digest, change)
    return encode_streams(old, new, dims)


def encode_streams(old: Bits, new: Bits, dims: Dims | None = None) -> Encoded | None:
    """`encode` of a tensor of any size, from streams that may be compressed."""
    if _mostly_changed(old, new):
        found = _encode_everything(old, new)
        return found if dims is None else replace(found, sum_change=bits_change(old, new, dims))
    streams = compared(old, new)
    changed = streams.changed
    if changed == 0:
        return None
    encoding, digest = Encoding.ROSEMUX, streams.digest
    change = None if dims is None else _sum_change(old, streams, dims)
    payload: bytes | memoryview = _encode_sparse(old, streams)
    # One after another, so that at most two payloads exist at once.
    if changed > PLANES_ABOVE_RATIO * old.size:
        del streams
        payload = min(payload, planes_payload(old, new), key=len)
        dense = encode_dense(new)
        if len(dense) < len(payload):
            encoding, payload = Encoding.DENSE, dense
    return Encoded(encoding, payload, changed, digest, change)


def _sum_change(old: Bits, found: SparseStreams, dims: Dims) -> int:
    # numba would compile the loop again for rows that lie apart.
    planes = np.ascontiguousarray(found.far_planes)
    streams = (found.gaps, found.signs, found.far_gaps, planes)
    return int(streams_change(old, *streams, dims))


def composed(
    changes: Iterable[tuple[Encoding, memoryview]], spec: TensorSpec, digest: str
) -> Encoded | None:
    """Consecutive changes of one tensor as a single change, None if they cancel out; `digest`: of
    the resulting bits.

    Needs no old bits: `rosemux` adds differences modulo the element width, so that differences add
    up in a tensor of zeros, and `dense` replaces all earlier bits. Raises Corrupt, and Unsupported
    for other encodings.
    """
    total = bits_from_bytes(np.zeros(spec.size_bytes, dtype=np.uint8), spec)
    is_dense = False
    for encoding, change in changes:
        if encoding not in {Encoding.DENSE, Encoding.ROSEMUX}:
            raise Unsupported(f"changes by {encoding} do not add up")
        is_dense |= encoding is Encoding.DENSE
        apply_own(encoding, change, spec, total)
    if is_dense:
        return Encoded(Encoding.DENSE, encode_dense(total), total.size, digest)
    nothing = np.zeros_like(total)
    sum_of_all = encode(nothing, total)
    if sum_of_all is None:
        return None
    payload = sum_of_all.payload
    if sum_of_all.encoding is Encoding.DENSE:
        payload = planes_payload(nothing, total)
    return Encoded(Encoding.ROSEMUX, payload, sum_of_all.changed, digest)


def _mostly_changed(old: Bits, new: Bits) -> bool:
    """Whether a sample over a large tensor shows that `sparse` need not be tried."""
    if old.size < 4 * _SAMPLE_ELEMENTS:
        return False
    return kernels.share_changed(old, new, _GUESS_RUNS, _GUESS_RUN_ELEMENTS) > _SPARSE_BELOW_RATIO


def _encode_everything(old: Bits, new: Bits) -> Encoded:
    """Encode all elements, in the encoding that samples predict to be smaller: for a large tensor
    both payloads would take much memory."""
    changed, digest = kernels.count_changes(old, new), state_hash.digest_of(new)
    planes_bytes = dense_bytes = 0
    for part in range(_SAMPLES):
        start = part * (old.size - _RUN_ELEMENTS) // (_SAMPLES - 1)
        run = slice(start, start + _RUN_ELEMENTS)
        planes_bytes += len(planes_payload(old[run], new[run]))
        dense_bytes += len(encode_dense(new[run]))
    if dense_bytes < planes_bytes:
        return Encoded(Encoding.DENSE, encode_dense(new), changed, digest)
    return Encoded(Encoding.ROSEMUX, planes_payload(old, new), changed, digest)


def encode_as(encoding: Encoding, old: Bits, new: Bits, dims: Dims | None = None) -> Encoded | None:
    """A payload in the given encoding, or None if nothing changed. `dims`: as in `encode`, of
    `context` alone."""
    if encoding is Encoding.ROSEMUX:
        streams = compared(old, new)
        if streams.changed == 0:
            return None
        payload = _encode_sparse(old, streams)
        return Encoded(encoding, payload, streams.changed, streams.digest)
    if encoding is Encoding.CONTEXT:
        return _encode_context(old, new, dims)
    changed = kernels.count_changes(old, new)
    if changed == 0:
        return None
    writers: dict[Encoding, Callable[[Bits, Bits], bytes]] = {
        Encoding.XOR: lambda old, new: pack_frame(bytes_of(np.bitwise_xor(old, new))),
        Encoding.OVERWRITE: encode_overwrite,
        Encoding.DENSE: lambda _, new: encode_dense(new),
    }
    return Encoded(encoding, writers[encoding](old, new), changed, state_hash.digest_of(new))


def _encode_context(old: Bits, new: Bits, dims: Dims | None) -> Encoded | None:
    found = encode(old, new, dims)
    if found is None or found.encoding is not Encoding.ROSEMUX:
        return found
    payload = found.payload
    is_worth = new.nbytes > PLAIN_BYTES and found.changed <= PLANES_ABOVE_RATIO * old.size
    if is_worth and old.itemsize in CONTEXT_WIDTHS_BYTES and found.changed <= MOST_CONTEXT_CHANGES:
        payload = min(classes_payload(old, new, found.digest) or payload, payload, key=len)
    return replace(found, encoding=Encoding.CONTEXT, payload=payload)


def decode(encoding: Encoding, payload: memoryview, spec: TensorSpec) -> Delta:
    """The checked delta for a tensor of `spec`; raises Corrupt."""
    readers: dict[Encoding, Callable[[memoryview, TensorSpec], Delta]] = {
        Encoding.DENSE: decode_dense,
        Encoding.XOR: decode_xor,
        Encoding.OVERWRITE: decode_overwrite,
        Encoding.ROSEMUX: decode_rosemux,
        Encoding.CONTEXT: partial(decode_rosemux, in_classes=True),
    }
    return readers[encoding](payload, spec)


def apply_own(encoding: Encoding, payload: memoryview, spec: TensorSpec, bits: Bits) -> None:
    """Change bits by this process's own payload, in less memory than its delta needs. Raises
    Corrupt, and then the bits are in doubt."""
    if encoding is Encoding.DENSE:
        read_stream(payload, spec.size_bytes).read_into(bytes_of(bits))
        return
    if encoding.is_ours:
        reader = PayloadReader(payload)
        if rosemux_layout(reader, spec, in_classes=encoding is Encoding.CONTEXT) == PLANES:
            apply_planes_payload(reader, bits)
            return
    checked_apply(decode(encoding, payload, spec), bits)


_DTYPE_OF_WIDTH = {1: "I8", 2: "BF16", 4: "F32", 8: "I64"}
WIDTHS_BYTES = frozenset(_DTYPE_OF_WIDTH)
_WARM_ELEMENTS = 1 << 14
_warm: set[int] = set()
_LOG = logging.getLogger(__name__)


def warm_up(widths_bytes: Iterable[int] = (2,)) -> None:
    """Compile or load the loops for elements of these widths, so that no pause waits for them.

    Takes seconds for each width if they are compiled, a tenth of that if they are cached.
    """
    for width in sorted(set(widths_bytes) - _warm):
        try:
            _warm_up(width)
        except Exception:
            # The cache is unusable (a full disk, another user's files, classes of an earlier
            # release), which costs time and no version. A fault of the loops comes again.
            forget_cache()
            _warm_up(width)
        _warm.add(width)
        if not is_cached():
            _LOG.warning("no cache can be written, so every process compiles: set NUMBA_CACHE_DIR")


def _warm_up(width_bytes: int) -> None:
    """Writes and applies one change in each form that a payload may have."""
    old = np.zeros(_WARM_ELEMENTS, dtype=UNSIGNED_NUMPY[width_bytes])
    new = old.copy()
    new[::8], new[1] = 1, 9
    dtype = _DTYPE_OF_WIDTH[width_bytes]
    kernels.count_changes(old, new)
    kernels.share_changed(old, new, 1, 1)
    streams = compared(old, new)
    is_worth_groups(streams, old.size)
    dims = np.array([[1, 0, old.size, 1]], np.uint64)
    _sum_change(old, streams, dims)
    bits_sum(old, dims)
    bits_change(old, new, dims)
    for payload in (
        _encode_streams(old, streams),
        grouped_payload(old.size, streams),
        planes_payload(old, new),
        *([classes_payload(old, new)] if width_bytes in CONTEXT_WIDTHS_BYTES else []),
    ):
        delta = decode(Encoding.CONTEXT, memoryview(payload), TensorSpec(dtype, old.shape))
        for hashed in (False, True):
            delta.apply(old.copy(), hashed=hashed)
    small = TensorSpec(dtype, (PLAIN_BYTES // 64,))
    payloads = np.frombuffer(
        plain_payload(old[: small.elements], new[: small.elements]).payload, np.uint8
    )
    plain = plain_deltas(payloads, {"": (0, payloads.size)}, {"": small})
    checked_apply(plain[""], old[: small.elements].copy())


def encode_dense(new: Bits) -> bytes:
    return pack_stream(bytes_of(new))


def encode_overwrite(old: Bits, new: Bits) -> bytes:
    """Count, byte positions (u4 each), bytes: a zstd frame."""
    new_bytes = bytes_of(new)
    if new_bytes.size >= 1 << 32:
        raise Unsupported("overwrite: tensors of 4 GiB and more need another encoding")
    positions = np.flatnonzero(bytes_of(old) != new_bytes).astype("<u4")
    count = np.array([positions.size], dtype="<u4")
    return pack_frame(
        np.concatenate([count.view(np.uint8), positions.view(np.uint8), new_bytes[positions]])
    )


def _encode_sparse(old: Bits, found: SparseStreams) -> bytes:
    if is_worth_groups(found, old.size) and (payload := grouped_payload(old.size, found)):
        return payload
    return _encode_streams(old, found)


def _encode_streams(old: Bits, found: SparseStreams) -> bytes:
    numbers = (old.size, found.small, found.far, found.gaps.size, found.far_gaps.size)
    streams = (found.gaps, found.signs, found.far_gaps, *found.far_planes)
    return b"".join(
        [bytes((FORMAT, SPARSE, old.itemsize)), *map(varint, numbers), *map(_stream, streams)]
    )


def _stream(raw: Bytes) -> bytes:
    packed = pack_stream(raw)
    return varint(len(packed)) + packed
