"""What one API-server process of a production engine knows of it, kept as the pulse to publish.

Fed by two read-only hooks of stock vLLM: the ASGI middleware says when a request arrives and ends,
the statistics logger says what each engine step did. Neither names the other's requests, so first
tokens are matched to arrivals in order. Touches no clock and no page.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from math import ceil

from coserve.production_time import ProductionTime
from harvester.contracts.page import Calibration, Pulse

_RECENT = 32
_PROMPTS = 512
# Exponential weight of the newest step in the mean step time.
_STEP_WEIGHT = 0.05
# Before the first prompt was counted: a byte-level tokenizer at worst, four bytes a token usually.
_INITIAL_BYTES_PER_TOKEN = 2.0
# Bytes of a request around its prompt (model name, sampling parameters).
_ENVELOPE_BYTES = 100
# An engine that never catches up still teaches, a little less exactly: a step that gives the last
# first token of such a run may hold a piece of the next prompt.
_RUN_STEPS_MAX = 16


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request without a first token."""

    arrival_ns: int
    prompt_tokens_bound: int
    body_bytes: int


@dataclass(slots=True)
class _PrefillRun:
    """Prefills without a pause: from when the first could begin until no request waits.

    Requests that come together share steps, and a prompt is cut where a step is full, so that
    single ones cannot be timed; all of them together can.
    """

    arrival_ns: int
    begun_ns: int
    """When the first came to an idle engine, else when the step ended that ran; 0 until then."""
    engine_steps: int = 0
    steps: int = 0
    """Those that gave first tokens."""
    tokens: int = 0
    decodes: int = 0
    """Requests that were decoding beside, summed over `steps`."""
    whole: bool = True
    """False once a request went away before its first token: its share is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """One iteration as the statistics logger reports it."""

    running: int | None
    """None where this process got no scheduler statistics for the step."""
    kv_usage_ratio: float | None
    first_tokens: int
    prompt_tokens: int
    generation_tokens: int
    inter_token_s: tuple[float, ...]
    finished_prompt_tokens: tuple[int, ...]


@dataclass(slots=True)
class PulseBook:
    step_tokens: int = 0
    """The engine's limit per step; 0 where it is not known."""
    times: ProductionTime = field(default_factory=ProductionTime)
    alone_since_ns: int | None = 0
    """Since when no guest may step beside this engine; None while one may. Only what began and
    ended in such a time teaches `times`."""
    _open: set[int] = field(default_factory=set)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    """In order of arrival."""
    _run: _PrefillRun | None = None
    _busy_since_ns: int = 0
    _busy_ns: int = 0
    _last_step_ns: int = 0
    _steps: int = 0
    _step_s: float = 0.0
    _running: int = 0
    _kv_usage_ratio: float = 0.0
    _prompt_tokens: int = 0
    _generation_tokens: int = 0
    _requests: int = 0
    _bytes_per_token: float = _INITIAL_BYTES_PER_TOKEN
    _prompts: deque[int] = field(default_factory=lambda: deque(maxlen=_PROMPTS))
    _ttft: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _itl: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _ttft_total: int = 0
    _itl_total: int = 0
    _calibrations: tuple[Calibration, Calibration] = (Calibration(), Calibration())
    """Of prefills and of decodes."""
    _prompt_p99: int = 0

    def arrive(self, key: int, *, body_bytes: int, now_ns: int) -> None:
        idle = not self._open
        if idle:
            self._busy_since_ns = now_ns
        if self._run is None:
            self._run = _PrefillRun(now_ns, begun_ns=now_ns if idle else 0)
        bound = max(1, int((body_bytes - _ENVELOPE_BYTES) / self._bytes_per_token))
        self._open.add(key)
        self._waiting[key] = _Waiting(now_ns, bound, body_bytes)
        self._requests += 1

    def finish(self, key: int, *, now_ns: int) -> None:
        if key not in self._open:
            return
        self._open.remove(key)
        if not self._open:
            self._busy_ns += now_ns - self._busy_since_ns
        if self._waiting.pop(key, None) is not None and self._run is not None:
            self._run.whole = False
            if not self._waiting:
                self._run = None

    def step(self, step: EngineStep, *, now_ns: int) -> None:
        previous_ns, self._last_step_ns = self._last_step_ns, now_ns
        self._steps += 1
        if previous_ns and self._open and previous_ns > self._busy_since_ns:
            step_s = (now_ns - previous_ns) * 1e-9
            self._step_s += _STEP_WEIGHT * (step_s - self._step_s)
        if step.running is not None:
            self._running = step.running
        if step.kv_usage_ratio is not None:
            self._kv_usage_ratio = step.kv_usage_ratio
        self._prompt_tokens += step.prompt_tokens
        self._generation_tokens += step.generation_tokens
        self._prompts.extend(step.finished_prompt_tokens)
        self._follow_run(step, now_ns)
        self._first_tokens(step, now_ns)
        if step.inter_token_s:
            self._itl.extend(step.inter_token_s[-_RECENT:])
            self._itl_total += len(step.inter_token_s)
            # While a request waits, a step without a first token may hold a piece of its prompt.
            prefilling = step.first_tokens or self._waiting
            if not prefilling and self._alone_since(previous_ns):
                batch = sorted(step.inter_token_s)
                self.times.observe_decode(requests=len(batch), seconds=batch[len(batch) // 2])

    def refit(self) -> None:
        """Renew the slow figures; about once a second is enough."""
        self.times.fit()
        times = self.times
        self._calibrations = (
            times.prefill_calibration.summary(),
            times.decode_calibration.summary(),
        )
        if self._prompts:
            ordered = sorted(self._prompts)
            self._prompt_p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    def pulse(self, *, now_ns: int) -> Pulse:
        waiting = self._waiting.values()
        busy_ns = self._busy_ns + (now_ns - self._busy_since_ns if self._open else 0)
        return Pulse(
            in_flight=len(self._open),
            waiting=len(waiting),
            running=self._running,
            decoding=len(self._open) - len(waiting),
            oldest_waiting_arrival_ns=next((r.arrival_ns for r in waiting), 0),
            largest_waiting_prompt_tokens=max((r.prompt_tokens_bound for r in waiting), default=0),
            last_step_end_ns=self._last_step_ns,
            steps_total=self._steps,
            busy_s_total=busy_ns * 1e-9,
            step_s_mean=self._step_s,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            requests_total=self._requests,
            kv_usage_ratio=self._kv_usage_ratio,
            prompt_tokens_p99=self._prompt_p99,
            ttft_s_recent=tuple(self._ttft),
            itl_s_recent=tuple(self._itl),
            samples_total=self._ttft_total,
            itl_samples_total=self._itl_total,
            model=self.times.model,
            model_samples=self.times.learned,
            prefill_calibration=self._calibrations[0],
            decode_calibration=self._calibrations[1],
        )

    def _alone_since(self, begun_ns: int) -> bool:
        return self.alone_since_ns is not None and begun_ns >= self.alone_since_ns

    def _follow_run(self, step: EngineStep, now_ns: int) -> None:
        run = self._run
        if run is None:
            return
        if run.begun_ns == 0 and not step.first_tokens:
            run.begun_ns = now_ns
            return
        run.engine_steps += 1
        if not step.first_tokens:
            return
        run.steps += 1
        run.tokens += step.prompt_tokens
        run.decodes += len(self._open) - len(self._waiting)
        caught_up = step.first_tokens >= len(self._waiting)
        if caught_up or run.steps == _RUN_STEPS_MAX:
            self._observe(run, now_ns)
            self._run = None if caught_up else _PrefillRun(now_ns, begun_ns=now_ns)

    def _observe(self, run: _PrefillRun, now_ns: int) -> None:
        """Its steps served the running decodes too; what these took is left out."""
        begun_ns = run.begun_ns or run.arrival_ns
        if not (run.whole and self._alone_since(begun_ns)):
            return
        if self.step_tokens and run.engine_steps > run.steps + ceil(run.tokens / self.step_tokens):
            return  # It waited for room, not for prefills.
        seconds = (now_ns - begun_ns) * 1e-9 - run.decodes * self.times.model.decode_s_per_request
        self.times.observe_prefill(
            tokens=round(run.tokens / run.steps), seconds=max(0.0, seconds / run.steps)
        )

    def _first_tokens(self, step: EngineStep, now_ns: int) -> None:
        body_bytes = 0
        given = list(islice(self._waiting.items(), step.first_tokens))
        for key, request in given:
            del self._waiting[key]
            body_bytes += request.body_bytes - _ENVELOPE_BYTES
            self._ttft.append((now_ns - request.arrival_ns) * 1e-9)
        self._ttft_total += len(given)
        if step.prompt_tokens and body_bytes > 0 and len(given) == step.first_tokens:
            ratio = max(0.5, body_bytes / step.prompt_tokens)
            # The bound must not come out too small: follow smaller ratios fast, larger ones slowly.
            weight = 0.2 if ratio < self._bytes_per_token else 0.02
            self._bytes_per_token += weight * (ratio - self._bytes_per_token)
