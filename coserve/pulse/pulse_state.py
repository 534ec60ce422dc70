"""A production engine's state as one of its API-server processes sees it; source of its pulse.

Fed by two read-only hooks of stock vLLM: the ASGI middleware reports when a request arrives and
ends, the statistics logger reports each engine step with vLLM's own latencies. Steps that cannot be
attributed to this process's requests alone (other API servers, several engine cores) teach no step
time. Steps that serve requests while none is in flight are published as unseen steps: the
middleware misses requests whose flag is lost, that come by another entry point than HTTP, or that
outlive their reply. Touches no clock and no page.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

import msgspec

from coserve.law.phantom import quantiles_of
from coserve.law.production_time import ProductionTime
from coserve.pulse.engine_cores import NO_SIBLINGS, CoreTable, EngineStep, Siblings, only_decoding
from coserve.pulse.prefill_run import PrefillRun
from coserve.pulse.waiting_requests import WaitingRequests
from harvester.contracts.page import Calibration, Pulse
from harvester.contracts.process import ProcessId

_RECENT = 32
_LATE_RECENT = 8
_PROMPTS = 512
# Exponential weight of the newest step in the mean step time.
_STEP_WEIGHT = 0.05
# Longest pause between steps of unseen requests that still counts as busy.
_UNSEEN_PAUSE_NS = 300_000_000
_SPEECH_NS = 5_000_000_000
"""Steps within this time after a WebSocket message may serve it: a streaming client sends more
often than this."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine that one of its API servers knows, and that server's place in it."""

    step_tokens: int = 0
    """The engine's token limit per step; 0 if unknown."""
    processes: int = 0
    """API servers of the engine; 0 if unknown."""
    process: int | None = None
    """Index of this API server; None takes the index from the process's name."""
    shape: str = ""
    """Model, parallelism and accelerator, to which the step times belong: at most 120 characters;
    "" if unknown."""
    unfit: str = ""
    """Why no guest may run beside it; "" if one may."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its ranks' GPUs; empty on a CPU, and if unknown."""


class _Told(msgspec.Struct):
    """Counts and samples of past events, under the page's names."""

    steps_total: int = 0
    step_s_mean: float = 0.0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    requests_total: int = 0
    ttft_s_recent: tuple[float, ...] = ()
    samples_total: int = 0
    itl_s_recent: tuple[float, ...] = ()
    itl_samples_total: int = 0
    itl_late_s_recent: tuple[float, ...] = ()
    itl_late_total: int = 0
    unanswered_s_recent: tuple[float, ...] = ()
    unanswered_total: int = 0
    unseen_step_ns: int = 0
    unseen_steps_total: int = 0
    prompt_tokens_p99: int = 0
    prompt_tokens_quantiles: tuple[int, ...] = ()
    prefill_calibration: Calibration = Calibration()
    decode_calibration: Calibration = Calibration()


@dataclass(slots=True)
class PulseState:
    engine: EngineShape = field(default_factory=EngineShape)
    times: ProductionTime = field(default_factory=ProductionTime)
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
    _waiting: WaitingRequests = field(default_factory=WaitingRequests)
    _run: PrefillRun | None = None
    _busy_since_ns: int = 0
    _busy_ns: int = 0
    _busy_until_ns: int = 0
    """Time up to which busy time has been counted."""
    _served_ns: int = 0
    """End of the last step that served a request."""
    _cores: CoreTable = field(default_factory=CoreTable)
    _beside: Siblings | None = NO_SIBLINGS
    """State of the siblings at the last step."""
    _prompts: deque[int] = field(default_factory=lambda: deque(maxlen=_PROMPTS))
    _told: _Told = field(default_factory=_Told)

    def arrive(
        self, key: int, *, body_bytes: int, now_ns: int, beside: Siblings | None = NO_SIBLINGS
    ) -> None:
        """Record a request whose body is complete. `beside` is the present state of the other API
        servers; None if unknown."""
        if not self._open:
            self._busy_since_ns = now_ns
        if self._run is None:
            idle = not self._open and beside is not None and beside.in_flight == 0
            begun_ns = now_ns if idle else 0
            self._run = PrefillRun(now_ns, begun_ns=begun_ns, beside=beside, from_idle=idle)
        self._open.add(key)
        self._waiting.add(key, body_bytes=body_bytes, now_ns=now_ns)
        self._told.requests_total += 1

    def connect(self, key: int) -> None:
        """Record an opened WebSocket: in flight until its end, with work only at times."""
        self._sockets.add(key)
        self._told.requests_total += 1

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
        arrival_ns = self._waiting.remove(key)
        if arrival_ns is None:
            return
        waited_s = (now_ns - arrival_ns) * 1e-9
        self._told.unanswered_s_recent = (*self._told.unanswered_s_recent, waited_s)[-_RECENT:]
        self._told.unanswered_total += 1
        if outlived:
            # The request's prefill may be in the next step, which no core has reported yet.
            self._told.unseen_step_ns = now_ns
        if self._run is not None:
            self._run.whole = False
            if not self._waiting:
                self._run = None

    def step(self, step: EngineStep, *, now_ns: int, beside: Siblings | None = NO_SIBLINGS) -> None:
        """Record an engine step. `beside` is as in `arrive`."""
        if step.ours and step.served:
            requests = step.first_tokens + len(step.inter_token_s)
            self._note_served(max(1, requests, len(step.finished_prompt_tokens)), now_ns)
        previous_ns = self._cores.step(step, now_ns=now_ns)
        before, self._beside, told = self._beside, beside, self._told
        told.steps_total += 1
        if previous_ns and self._open and previous_ns > self._busy_since_ns:
            step_s = (now_ns - previous_ns) * 1e-9
            told.step_s_mean += _STEP_WEIGHT * (step_s - told.step_s_mean)
        told.prompt_tokens_total += step.prompt_tokens
        told.generation_tokens_total += step.generation_tokens
        self._prompts.extend(step.finished_prompt_tokens)
        decoding = len(self._open) - len(self._waiting)
        self._waiting.answer(step, now_ns=now_ns)
        self._follow_run(step, beside, decoding=decoding, now_ns=now_ns)
        told.ttft_s_recent = (told.ttft_s_recent + step.ttft_s)[-_RECENT:]
        told.samples_total += len(step.ttft_s)
        if step.inter_token_s:
            told.itl_s_recent = (told.itl_s_recent + step.inter_token_s)[-_RECENT:]
            batch = sorted(step.inter_token_s)
            told.itl_samples_total += len(batch)
            if 0 < self.itl_slo_s < batch[-1]:
                late = batch[bisect_right(batch, self.itl_slo_s) :]
                told.itl_late_s_recent = (*told.itl_late_s_recent, *late)[-_LATE_RECENT:]
                told.itl_late_total += len(late)
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
                self._told.unseen_steps_total += 1
            self._told.unseen_step_ns = now_ns
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
        self._told.prefill_calibration = times.prefill_calibration.summary()
        self._told.decode_calibration = times.decode_calibration.summary()
        if self._prompts:
            ordered = sorted(self._prompts)
            self._told.prompt_tokens_p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            self._told.prompt_tokens_quantiles = quantiles_of(ordered)

    def pulse(self, *, now_ns: int) -> Pulse:
        waiting = self._waiting
        decoding = len(self._open) - len(waiting)
        busy_ns = self._busy_ns + (now_ns - self._busy_since_ns if self._open else 0)
        return Pulse(
            **msgspec.structs.asdict(self._told),
            in_flight=len(self._open) + len(self._sockets),
            waiting=len(waiting),
            running=self._cores.running,
            decoding=decoding,
            oldest_waiting_arrival_ns=waiting.oldest_arrival_ns,
            largest_waiting_prompt_tokens=waiting.largest_prompt_tokens,
            last_step_end_ns=self._cores.last_step_ns(decoding=decoding, now_ns=now_ns),
            busy_s_total=busy_ns * 1e-9,
            kv_usage_ratio=self._cores.kv_usage_ratio,
            model=self.times.model,
            model_samples=self.times.learned,
            processes=self.engine.processes,
            cores=self._cores.reported,
            shape=self.engine.shape,
            root=self.root,
            sockets=len(self._sockets),
            middleware=self.middleware,
            unfit=self.engine.unfit,
            gpus=self.engine.gpus,
            itl_slo_s=self.itl_slo_s,
        )

    def _alone_since(self, begun_ns: int) -> bool:
        return self.alone_since_ns is not None and begun_ns >= self.alone_since_ns

    def _decoding_beside(self, before: Siblings | None, beside: Siblings | None) -> int | None:
        """Decoding requests of other processes in the step that just ended; None if the step may
        have held their prefills too, or if their core is unknown."""
        if before is None or beside is None or not only_decoding(before, beside):
            return None
        if len(self._cores) > 1 and (before.in_flight or beside.in_flight):
            return None  # On which core they decode is not known.
        return beside.decoding

    def _follow_run(
        self, step: EngineStep, beside: Siblings | None, *, decoding: int, now_ns: int
    ) -> None:
        run, caught_up = self._run, not self._waiting
        if run is None or not run.follow(
            step, beside, decoding=decoding, caught_up=caught_up, now_ns=now_ns
        ):
            return
        # Cores may prefill side by side.
        apart = len(self._cores) <= 1 or (run.from_idle and run.steps == 1)
        waited = run.has_waited(beside, step_tokens=self.engine.step_tokens)
        if run.whole and self._alone_since(run.since_ns) and apart and not waited:
            decode_s = self.times.model.decode_s_per_request
            self.times.observe_prefill(
                tokens=round(run.tokens / run.steps),
                seconds=run.step_s(decode_s=decode_s, now_ns=now_ns),
            )
        self._run = None if caught_up else PrefillRun(now_ns, begun_ns=now_ns, beside=beside)
