"""The hash of a whole checkpoint state: xxh3-128 per tensor, combined in name order.

It is defined on the bits in checkpoint layout, so a trainer's state dict, a stored checkpoint and
an engine's read-back runtime storage have equal hashes.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from importlib import import_module, util

import numpy as np
import xxhash

from harvester.contracts.errors import Unsupported
from weightsync.elements import xxh3
from weightsync.elements.batches import each
from weightsync.elements.bits import Bits, Bytes, Layout, bytes_of
from weightsync.elements.xxh3 import Accumulators

ALGORITHM = "xxh3-128"


def digest_of(bits: Bits) -> str:
    """xxh3-128 of one tensor's bytes, as 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bytes_of(bits)).data))


def digest_from(sums: Accumulators, data: Bytes) -> str:
    """`digest_of` for bytes that a compiled loop has already summed."""
    if data.size < xxh3.MIN_BYTES:
        return digest_of(data)
    high, low = xxh3.finished(sums, data)
    return f"{int(high):016x}{int(low):016x}"


def digests_of(
    names: Iterable[str], layout: Layout, read: Callable[[str], Bits], pool: Executor
) -> dict[str, str]:
    """Digest of every named tensor, computed on the pool (hashing holds no GIL)."""
    ordered = sorted(names)
    digests = each(
        pool, lambda name: digest_of(read(name)), ordered, lambda name: layout[name].size_bytes
    )
    return dict(zip(ordered, digests, strict=True))


def combined(digests: Mapping[str, str], layout: Layout) -> str:
    """The state hash: names, dtypes, shapes and digests in name order."""
    lines = []
    for name in sorted(digests):
        spec = layout[name]
        shape = ",".join(map(str, spec.shape))
        lines.append(f"{name}\0{spec.dtype}\0{shape}\0{digests[name]}\n")
    return str(xxhash.xxh3_128_hexdigest("".join(lines).encode()))


def foreign_checksum(algorithm: str, bits: Bits) -> str:
    """A tensor's checksum in one of the formats that stores of the shared layout use."""
    check_algorithm(algorithm)
    if algorithm == ALGORITHM:
        return digest_of(bits)
    if algorithm == "adler32":
        return f"{zlib.adler32(bytes_of(bits).data):08x}"
    return str(import_module("blake3").blake3(bytes_of(bits).data).hexdigest())


def check_algorithm(algorithm: str) -> None:
    """Raises Unsupported for a checksum format that cannot be computed here."""
    if algorithm == "blake3" and util.find_spec(algorithm) is None:
        raise Unsupported(
            "checksum_format 'blake3': its package is not installed (pip install blake3)"
        )
    if algorithm not in {ALGORITHM, "adler32", "blake3"}:
        raise Unsupported(
            f"checksum_format {algorithm!r}: this reader knows {ALGORITHM}, adler32 and blake3"
        )
