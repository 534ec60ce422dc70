"""A production engine's state as one of its API-server processes sees it; source of its pulse.

Fed by two read-only hooks of stock vLLM: the ASGI middleware reports when a request arrives and
ends, the statistics logger reports each engine step with vLLM's own latencies. Their requests share
no ids, so a first token ends the wait of the request whose arrival fits vLLM's time for it. Steps
that cannot be attributed to this process's requests alone (other API servers, several engine cores)
teach no step time. Steps that serve requests while none is in flight are published as unseen steps:
the middleware misses requests whose flag is lost, that come by another entry point than HTTP, or
that outlive their reply. Touches no clock and no page.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil

import msgspec

from coserve.law.phantom import quantiles_of
from coserve.law.production_time import ProductionTime
from coserve.pulse.engine_cores import NO_SIBLINGS, CoreTable, EngineStep, Siblings
from harvester.contracts.page import Calibration, Pulse
from harvester.contracts.process import ProcessId

_RECENT = 32
_LATE_RECENT = 8
_PROMPTS = 512
# Exponential weight of the newest step in the mean step time.
_STEP_WEIGHT = 0.05
# Before the first prompt was counted: a byte-level tokenizer at worst, four bytes a token usually.
_INITIAL_BYTES_PER_TOKEN = 2.0
# Bytes of a request around its prompt (model name, sampling parameters).
_ENVELOPE_BYTES = 100
# Runs of an engine that never catches up are used too, less exactly: the step with a run's last
# first token may hold a piece of the next prompt.
_RUN_STEPS_MAX = 16
# Longest pause between steps of unseen requests that still counts as busy.
_UNSEEN_PAUSE_NS = 300_000_000
_SAME_ARRIVAL_S = 2e-6
"""Precision of vLLM's arrivals. All samples (n) and prompts (a list) of a request have one."""
_ARRIVALS = 64
_SPARE_BOUNDS = 64
_BURST_NS = 20_000_000
"""Requests that come within this time get their first tokens in order of arrival."""
_SPEECH_NS = 5_000_000_000
"""Steps within this time after a WebSocket message may serve it: a streaming client sends more
often than this."""


class _Waiting(msgspec.Struct, frozen=True):
    """A request that has no first token yet."""

    arrival_ns: int
    prompt_tokens_bound: int
    body_bytes: int


@dataclass(slots=True)
class _PrefillRun:
    """Back-to-back prefills, from the earliest start of the first until no request waits.

    Requests that come together share steps, and a prompt is cut where a step is full, so single
    prefills cannot be timed; the run as a whole can.
    """

    arrival_ns: int
    begun_ns: int
    """Arrival of the first request if the engine was idle, else the end of the step then running; 0
    until then."""
    beside: Siblings | None
    """State of the siblings at the start of the run; None if it was unknown."""
    from_idle: bool = False
    engine_steps: int = 0
    steps: int = 0
    """Steps that gave first tokens."""
    tokens: int = 0
    decodes: int = 0
    """Decoding requests in the same steps, summed over `steps`."""
    whole: bool = True
    """False once a request left before its first token, or a request of another process took part:
    its share of the time is unknown."""


@dataclass(slots=True)
class PulseState:
    step_tokens: int = 0
    """The engine's token limit per step; 0 if unknown."""
    times: ProductionTime = field(default_factory=ProductionTime)
    processes: int = 0
    """API servers of the engine; 0 if unknown."""
    shape: str = ""
    """Model, parallelism and accelerator that the step times belong to."""
    unfit: str = ""
    """Why no guest may run beside the engine."""
    root: ProcessId | None = None
    """Root process of the engine."""
    middleware: bool | None = None
    """Whether middleware reports arrivals; None if unknown."""
    alone_since_ns: int | None = 0
    """Start of the present interval in which no guest may step beside this engine; None while one
    may. Only steps wholly within such an interval teach `times`."""
    spoken_ns: int = 0
    """Time of the last message over a WebSocket."""
    itl_slo_s: float = 0.0
    """Times between tokens above it are late; 0 if unknown."""
    _open: set[int] = field(default_factory=set)
    _sockets: set[int] = field(default_factory=set)
    """Open WebSockets. Only the cores show their work. Each may have one request in a step while
    messages flow; further requests came by another entry point."""
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    """In order of arrival."""
    _bounds: list[tuple[int, int]] = field(default_factory=list)
    """Heap of the waiting requests' prompts, the largest first, and their keys; with some that wait
    no more. A pulse is made at every event, and thousands may wait."""
    _answered: deque[float] = field(default_factory=lambda: deque(maxlen=_ARRIVALS))
    """Arrivals by vLLM's wall clock, in s, of the latest first tokens."""
    _run: _PrefillRun | None = None
    _busy_since_ns: int = 0
    _busy_ns: int = 0
    _busy_until_ns: int = 0
    """Time up to which busy time has been counted."""
    _unseen_steps: int = 0
    _unseen_step_ns: int = 0
    _served_ns: int = 0
    """End of the last step that served a request."""
    _cores: CoreTable = field(default_factory=CoreTable)
    _beside: Siblings | None = NO_SIBLINGS
    """State of the siblings at the last step."""
    _steps: int = 0
    _step_s: float = 0.0
    _prompt_tokens: int = 0
    _generation_tokens: int = 0
    _requests: int = 0
    _bytes_per_token: float = _INITIAL_BYTES_PER_TOKEN
    _prompts: deque[int] = field(default_factory=lambda: deque(maxlen=_PROMPTS))
    _ttft: tuple[float, ...] = ()
    _itl: tuple[float, ...] = ()
    _ttft_total: int = 0
    _itl_total: int = 0
    _late: tuple[float, ...] = ()
    _late_total: int = 0
    _unanswered: tuple[float, ...] = ()
    _unanswered_total: int = 0
    _calibrations: tuple[Calibration, Calibration] = (Calibration(), Calibration())
    """Calibrations of prefills and of decodes."""
    _prompt_p99: int = 0
    _prompt_quantiles: tuple[int, ...] = ()

    def arrive(
        self, key: int, *, body_bytes: int, now_ns: int, beside: Siblings | None = NO_SIBLINGS
    ) -> None:
        """Record a request whose body is complete. `beside` is the present state of the other API
        servers; None if unknown."""
        if not self._open:
            self._busy_since_ns = now_ns
        if self._run is None:
            idle = not self._open and beside is not None and beside.in_flight == 0
            self._run = _PrefillRun(
                now_ns,
                begun_ns=now_ns if idle else 0,
                beside=beside,
                from_idle=idle,
            )
        bound = max(1, int((body_bytes - _ENVELOPE_BYTES) / self._bytes_per_token))
        self._open.add(key)
        self._waiting[key] = _Waiting(now_ns, bound, body_bytes)
        heappush(self._bounds, (-bound, key))
        if len(self._bounds) > 2 * len(self._waiting) + _SPARE_BOUNDS:
            self._bounds = [(-one.prompt_tokens_bound, key) for key, one in self._waiting.items()]
            heapify(self._bounds)
        self._requests += 1

    def connect(self, key: int) -> None:
        """Record an opened WebSocket: in flight until its end, with work only at times."""
        self._sockets.add(key)
        self._requests += 1

    def finish(self, key: int, *, now_ns: int, outlived: bool = False) -> None:
        """Record the end of a reply. `outlived` means that the engine may go on with the
        request.
        """
        self._sockets.discard(key)
        if key not in self._open:
            return
        self._open.remove(key)
        if not self._open:
            self._count_busy(self._busy_since_ns, now_ns)
        request = self._waiting.pop(key, None)
        if request is None:
            return
        waited_s = (now_ns - request.arrival_ns) * 1e-9
        self._unanswered = (*self._unanswered, waited_s)[-_RECENT:]
        self._unanswered_total += 1
        if outlived:
            # The request's prefill may be in the next step, which no core has reported yet.
            self._unseen_step_ns = now_ns
        if self._run is not None:
            self._run.whole = False
            if not self._waiting:
                self._run = None

    def step(self, step: EngineStep, *, now_ns: int, beside: Siblings | None = NO_SIBLINGS) -> None:
        """Record an engine step. `beside` is as in `arrive`."""
        going_on = step.first_tokens + len(step.inter_token_s) - len(step.finished_prompt_tokens)
        if step.ours and step.served:
            requests = step.first_tokens + len(step.inter_token_s)
            self._note_served(max(1, requests, len(step.finished_prompt_tokens)), now_ns)
        previous_ns = self._cores.step(
            step.rank,
            running=step.running,
            kv_usage_ratio=step.kv_usage_ratio,
            ours=max(0, going_on) if step.ours else None,
            now_ns=now_ns,
            waiting=step.waiting,
        )
        before, self._beside = self._beside, beside
        self._steps += 1
        if previous_ns and self._open and previous_ns > self._busy_since_ns:
            step_s = (now_ns - previous_ns) * 1e-9
            self._step_s += _STEP_WEIGHT * (step_s - self._step_s)
        self._prompt_tokens += step.prompt_tokens
        self._generation_tokens += step.generation_tokens
        self._prompts.extend(step.finished_prompt_tokens)
        answered = self._answered_by(step, now_ns)
        self._follow_run(step, beside, answered=len(answered), now_ns=now_ns)
        self._first_tokens(step, answered)
        if step.inter_token_s:
            self._itl = (self._itl + step.inter_token_s)[-_RECENT:]
            batch = sorted(step.inter_token_s)
            self._itl_total += len(batch)
            if 0 < self.itl_slo_s < batch[-1]:
                late = batch[bisect_right(batch, self.itl_slo_s) :]
                self._late = (*self._late, *late)[-_LATE_RECENT:]
                self._late_total += len(late)
            # While a request waits, a step without a first token may hold a piece of its prompt.
            prefilling = step.first_tokens or self._waiting
            others = self._decoding_beside(before, beside)
            if not prefilling and others is not None and self._alone_since(previous_ns):
                seconds = batch[len(batch) // 2]
                self.times.observe_decode(requests=len(batch) + others, seconds=seconds)

    def _note_served(self, requests: int, now_ns: int) -> None:
        if not self._open:
            speaking = now_ns - self.spoken_ns <= _SPEECH_NS
            if not speaking or requests > len(self._sockets):
                self._unseen_steps += 1
            self._unseen_step_ns = now_ns
            went_on = self._cores.running > 0 or now_ns - self._served_ns <= _UNSEEN_PAUSE_NS
            if self._served_ns and went_on:
                self._count_busy(self._served_ns, now_ns)
        self._served_ns = now_ns

    def _count_busy(self, since_ns: int, now_ns: int) -> None:
        since_ns = max(since_ns, self._busy_until_ns)
        self._busy_ns += max(0, now_ns - since_ns)
        self._busy_until_ns = now_ns

    def refit(self) -> None:
        """Recompute model and percentiles; about once a second is enough."""
        self.times.fit()
        times = self.times
        self._calibrations = (
            times.prefill_calibration.summary(),
            times.decode_calibration.summary(),
        )
        if self._prompts:
            ordered = sorted(self._prompts)
            self._prompt_p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            self._prompt_quantiles = quantiles_of(ordered)

    def pulse(self, *, now_ns: int) -> Pulse:
        waiting, oldest = self._waiting, next(iter(self._waiting.values()), None)
        decoding = len(self._open) - len(waiting)
        busy_ns = self._busy_ns + (now_ns - self._busy_since_ns if self._open else 0)
        return Pulse(
            in_flight=len(self._open) + len(self._sockets),
            waiting=len(waiting),
            running=self._cores.running,
            decoding=decoding,
            oldest_waiting_arrival_ns=0 if oldest is None else oldest.arrival_ns,
            largest_waiting_prompt_tokens=self._largest_bound(),
            last_step_end_ns=self._cores.last_step_ns(decoding=decoding, now_ns=now_ns),
            steps_total=self._steps,
            busy_s_total=busy_ns * 1e-9,
            step_s_mean=self._step_s,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            requests_total=self._requests,
            kv_usage_ratio=self._cores.kv_usage_ratio,
            prompt_tokens_p99=self._prompt_p99,
            prompt_tokens_quantiles=self._prompt_quantiles,
            ttft_s_recent=self._ttft,
            itl_s_recent=self._itl,
            samples_total=self._ttft_total,
            itl_samples_total=self._itl_total,
            model=self.times.model,
            model_samples=self.times.learned,
            prefill_calibration=self._calibrations[0],
            decode_calibration=self._calibrations[1],
            processes=self.processes,
            cores=self._cores.reported,
            shape=self.shape,
            root=self.root,
            sockets=len(self._sockets),
            unseen_step_ns=self._unseen_step_ns,
            unseen_steps_total=self._unseen_steps,
            middleware=self.middleware,
            unfit=self.unfit,
            unanswered_s_recent=self._unanswered,
            unanswered_total=self._unanswered_total,
            itl_slo_s=self.itl_slo_s,
            itl_late_s_recent=self._late,
            itl_late_total=self._late_total,
        )

    def _largest_bound(self) -> int:
        bounds, waiting = self._bounds, self._waiting
        while bounds:
            bound, request = -bounds[0][0], waiting.get(bounds[0][1])
            if request is not None and request.prompt_tokens_bound == bound:
                return bound
            heappop(bounds)
        return 0

    def _alone_since(self, begun_ns: int) -> bool:
        return self.alone_since_ns is not None and begun_ns >= self.alone_since_ns

    def _decoding_beside(self, before: Siblings | None, beside: Siblings | None) -> int | None:
        """Decoding requests of other processes in the step that just ended; None if the step may
        have held their prefills too, or if their core is unknown."""
        if before is None or beside is None or not _only_decoding(before, beside):
            return None
        if len(self._cores) > 1 and (before.in_flight or beside.in_flight):
            return None  # On which core they decode is not known.
        return beside.decoding

    def _answered_by(self, step: EngineStep, now_ns: int) -> list[int]:
        """Keys of the waiting requests that get their first token in this step."""
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

    def _follow_run(
        self, step: EngineStep, beside: Siblings | None, *, answered: int, now_ns: int
    ) -> None:
        run = self._run
        if run is None:
            return
        if not _only_decoding(run.beside, beside):
            run.whole = False
        if run.begun_ns == 0 and not step.first_tokens:
            run.begun_ns = now_ns
            return
        run.engine_steps += 1
        if not step.first_tokens:
            return
        run.steps += 1
        run.tokens += step.prompt_tokens - step.cached_tokens
        run.decodes += len(self._open) - len(self._waiting)
        run.decodes += 0 if beside is None else beside.decoding
        caught_up = answered >= len(self._waiting)
        if caught_up or run.steps == _RUN_STEPS_MAX:
            self._observe(run, beside, now_ns)
            self._run = None if caught_up else _PrefillRun(now_ns, begun_ns=now_ns, beside=beside)

    def _observe(self, run: _PrefillRun, beside: Siblings | None, now_ns: int) -> None:
        """Teach the prefill time of a run, less the share of the decodes in its steps."""
        begun_ns = run.begun_ns or run.arrival_ns
        if not (run.whole and self._alone_since(begun_ns)):
            return
        if len(self._cores) > 1 and not (run.from_idle and run.steps == 1):
            return  # Cores that prefill side by side.
        steps = run.steps + (ceil(run.tokens / self.step_tokens) if self.step_tokens else 0)
        others = beside.steps_total - run.beside.steps_total if beside and run.beside else 0
        if self.step_tokens and max(run.engine_steps, others) > steps:
            return  # The request waited for room, not for prefills.
        seconds = (now_ns - begun_ns) * 1e-9 - run.decodes * self.times.model.decode_s_per_request
        self.times.observe_prefill(
            tokens=round(run.tokens / run.steps), seconds=max(0.0, seconds / run.steps)
        )

    def _first_tokens(self, step: EngineStep, answered: list[int]) -> None:
        requests = [self._waiting.pop(key) for key in answered]
        body_bytes = sum(request.body_bytes - _ENVELOPE_BYTES for request in requests)
        self._ttft = (self._ttft + step.ttft_s)[-_RECENT:]
        self._ttft_total += len(step.ttft_s)
        if step.prompt_tokens and body_bytes > 0 and len(requests) == step.first_tokens:
            ratio = max(0.5, body_bytes / step.prompt_tokens)
            # The bound must not come out too small: follow smaller ratios fast, larger ones slowly.
            weight = 0.2 if ratio < self._bytes_per_token else 0.02
            self._bytes_per_token += weight * (ratio - self._bytes_per_token)


def _only_decoding(before: Siblings | None, after: Siblings | None) -> bool:
    """Whether the siblings had no prefill in between, as far as is known."""
    if before is None or after is None or before.waiting or after.waiting:
        return False
    return before.requests_total == after.requests_total
