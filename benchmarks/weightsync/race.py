"""One pair of states through every contender, in turns, on two threads.

Speeds are dense bytes per second, the median of all turns, hashing included; `memcpy` is the
same machine's copy of the same bytes in the same turns.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.weightsync.bound import conditional_bound_bytes, entropy_bound_bytes
from benchmarks.weightsync.contenders import CONTENDERS, Contender
from benchmarks.weightsync.states import Pair
from weightsync.elements import state_hash
from weightsync.elements.batches import each

THREADS = 2


class Race:
    """All turns of one pair."""

    def __init__(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        self._pair = pair
        self._pool = pool
        # Largest first, so that no thread ends on one long tensor.
        self._names = sorted(pair.new, key=lambda name: (-pair.new[name].nbytes, name))
        self._held = {name: bits.copy() for name, bits in pair.old.items()}
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._bytes: dict[str, int] = {}
        self._exact: dict[str, bool] = dict.fromkeys(CONTENDERS, True)

    def turn(self) -> None:
        """Every contender once, and the copy."""
        self._reset()
        for name, contender in CONTENDERS.items():
            payloads = self._encoded(name, contender)
            self._apply(name, contender, payloads)
            self._reset()
        with self._timed("copy", "memcpy"):
            self._each(lambda tensor: np.copyto(self._held[tensor], self._pair.new[tensor]))

    def cases(self) -> list[dict[str, Any]]:
        bound, conditional = entropy_bound_bytes(self._pair), conditional_bound_bytes(self._pair)
        return [
            {
                "name": self._pair.name,
                "codec": codec,
                "bytes": self._bytes[codec],
                "dense_bytes": self._pair.dense_bytes,
                "entropy_bound_bytes": bound,
                "conditional_bound_bytes": conditional,
                "encode_gb_s": self._gb_s("encode", codec),
                "apply_gb_s": self._gb_s("apply", codec),
                "memcpy_gb_s": self.memcpy_gb_s,
                "exact": self._exact[codec],
            }
            for codec in CONTENDERS
        ]

    @property
    def memcpy_gb_s(self) -> float:
        return self._gb_s("copy", "memcpy")

    def _encoded(self, name: str, contender: Contender) -> Mapping[str, tuple[object, int, str]]:
        def encoded(tensor: str) -> tuple[object, int, str] | None:
            return contender.encode(self._pair.old[tensor], self._pair.new[tensor])

        with self._timed("encode", name):
            found = dict(zip(self._names, self._each(encoded), strict=True))
        payloads = {tensor: payload for tensor, payload in found.items() if payload is not None}
        self._bytes[name] = sum(size for _, size, _ in payloads.values())
        return payloads

    def _apply(
        self, name: str, contender: Contender, payloads: Mapping[str, tuple[object, int, str]]
    ) -> None:
        def verified(tensor: str) -> bool:
            if tensor not in payloads:
                state_hash.digest_of(self._held[tensor])
                return True
            payload, _, digest = payloads[tensor]
            return contender.apply(payload, self._held[tensor]) == digest

        with self._timed("apply", name):
            right = self._each(verified)
        same = all((self._held[tensor] == self._pair.new[tensor]).all() for tensor in self._names)
        self._exact[name] &= all(right) and same

    def _reset(self) -> None:
        self._each(lambda tensor: np.copyto(self._held[tensor], self._pair.old[tensor]))

    def _each(self, work: Callable[[str], Any]) -> list[Any]:
        return each(self._pool, work, self._names, lambda name: self._pair.new[name].nbytes)

    @contextmanager
    def _timed(self, what: str, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[what, name].append(time.perf_counter() - began)

    def _gb_s(self, what: str, name: str) -> float:
        return round(
            self._pair.dense_bytes / statistics.median(self._seconds[what, name]) * 1e-9, 2
        )


def raced(pair: Pair, *, turns: int) -> Race:
    """A race that was run."""
    with ThreadPoolExecutor(THREADS) as pool:
        race = Race(pair, pool)
        for _ in range(turns):
            race.turn()
    return race
