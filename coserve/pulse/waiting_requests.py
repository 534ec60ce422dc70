"""Requests without a first token yet, and their prompts' sizes before vLLM has counted them.

The middleware and vLLM's statistics share no ids, so a first token ends the wait of the request
whose arrival fits vLLM's time for it. A prompt is bounded by its request's bytes; finished requests
teach how many bytes a token takes.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import msgspec

from coserve.pulse.engine_cores import EngineStep

# Before the first prompt was counted: a byte-level tokenizer at worst, four bytes a token usually.
_INITIAL_BYTES_PER_TOKEN = 2.0
# Bytes of a request around its prompt (model name, sampling parameters).
_ENVELOPE_BYTES = 100
_SAME_ARRIVAL_S = 2e-6
"""Precision of vLLM's arrivals. All samples (n) and prompts (a list) of a request have one."""
_ARRIVALS = 64
_SPARE_BOUNDS = 64
_BURST_NS = 20_000_000
"""Requests that come within this time get their first tokens in order of arrival."""


class _Waiting(msgspec.Struct, frozen=True):
    arrival_ns: int
    prompt_tokens_bound: int
    body_bytes: int


@dataclass(slots=True)
class WaitingRequests:
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    """Waiting requests in order of arrival."""
    _bounds: list[tuple[int, int]] = field(default_factory=list)
    """Heap of the waiting requests' prompts, the largest first, and their keys; with some that wait
    no more. A pulse is made at every event, and thousands may wait."""
    _answered: deque[float] = field(default_factory=lambda: deque(maxlen=_ARRIVALS))
    """Arrivals by vLLM's wall clock, in s, of the latest first tokens."""
    _bytes_per_token: float = _INITIAL_BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_arrival_ns(self) -> int:
        """0 if none waits."""
        oldest = next(iter(self._waiting.values()), None)
        return 0 if oldest is None else oldest.arrival_ns

    @property
    def largest_prompt_tokens(self) -> int:
        """An upper bound; 0 if none waits."""
        bounds = self._bounds
        while bounds:
            bound, request = -bounds[0][0], self._waiting.get(bounds[0][1])
            if request is not None and request.prompt_tokens_bound == bound:
                return bound
            heappop(bounds)
        return 0

    def add(self, key: int, *, body_bytes: int, now_ns: int) -> None:
        bound = max(1, int((body_bytes - _ENVELOPE_BYTES) / self._bytes_per_token))
        self._waiting[key] = _Waiting(now_ns, bound, body_bytes)
        heappush(self._bounds, (-bound, key))
        if len(self._bounds) > 2 * len(self._waiting) + _SPARE_BOUNDS:
            self._bounds = [(-one.prompt_tokens_bound, key) for key, one in self._waiting.items()]
            heapify(self._bounds)

    def remove(self, key: int) -> int | None:
        """Arrival, in ns, of a request that ended before its first token; None if it had one."""
        request = self._waiting.pop(key, None)
        return None if request is None else request.arrival_ns

    def answer(self, step: EngineStep, *, now_ns: int) -> None:
        """Take out the requests that get their first token in this step."""
        requests = [self._waiting.pop(key) for key in self._answered_by(step, now_ns)]
        body_bytes = sum(request.body_bytes - _ENVELOPE_BYTES for request in requests)
        if step.prompt_tokens and body_bytes > 0 and len(requests) == step.first_tokens:
            ratio = max(0.5, body_bytes / step.prompt_tokens)
            # The bound must not come out too small: follow smaller ratios fast, larger ones slowly.
            weight = 0.2 if ratio < self._bytes_per_token else 0.02
            self._bytes_per_token += weight * (ratio - self._bytes_per_token)

    def _answered_by(self, step: EngineStep, now_ns: int) -> list[int]:
        keys: list[int] = []
        for ttft_s in step.ttft_s:
            arrival_s = step.wall_s - ttft_s
            if any(abs(arrival_s - other_s) < _SAME_ARRIVAL_S for other_s in self._answered):
                continue
            self._answered.append(arrival_s)
            # The middleware sees a request before vLLM does.
            latest_ns = now_ns - int((ttft_s - _SAME_ARRIVAL_S) * 1e9)
            found = None
            for key, request in self._waiting.items():
                if request.arrival_ns > latest_ns + _BURST_NS:
                    break
                if key not in keys:
                    found = key
                    if request.arrival_ns >= latest_ns - _BURST_NS:
                        break
            if found is not None:
                keys.append(found)
        return keys
