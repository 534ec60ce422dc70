"""A production engine without vLLM: continuous batching over replayed steps, and a real pulse.

Requests arrive in a thread of their own, as they do in an API server, so that the pulse tells of an
arrival while a step runs. Prompts go first, one a step; then all requests decode together.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_slot.device import Device, Work
from benchmarks.gpu_slot.engines.orders import ENGINE
from benchmarks.gpu_slot.engines.request_load import Request
from benchmarks.gpu_slot.engines.step_log import LoggedStep, ProductionLog, ServedRequest
from coserve.pulse.engine_cores import EngineStep
from coserve.pulse.pulse_state import EngineShape
from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.pulse_reporter import PulseReporter
from harvester.contracts.clock import monotonic_ns

_BYTES_PER_TOKEN = 4
_ENVELOPE_BYTES = 100
_LATE_S = 20.0
"""Requests that are not served so long after the load's end are given up."""


@dataclass(slots=True)
class _Running:
    key: int
    number: int
    request: Request
    arrival_ns: int
    token_ns: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.token_ns) >= self.request.output_tokens


class ProductionEngine:
    def __init__(
        self,
        device: Device,
        *,
        pages: Path,
        prefills: Mapping[int, Work],
        decodes: Mapping[int, Work],
        shape: str,
    ) -> None:
        """`prefills` by tokens, `decodes` by requests; a batch takes the next larger one."""
        self._device = device
        self._prefills, self._decodes = prefills, dict(sorted(decodes.items()))
        self._batch_max = max(decodes)
        self._arrived: deque[_Running] = deque()
        self._bell = threading.Event()
        self._reporter = PulseReporter(
            SlotEnvironment(Role.PRODUCTION, ENGINE, pages),
            lambda: EngineShape(step_tokens=max(prefills), processes=1, process=0, shape=shape),
        )
        self._reporter.attach_middleware()

    def serve(self, load: Sequence[Request], *, seconds: float) -> ProductionLog:
        """Serves the whole load; at least `seconds` pass, as for a load that is over earlier."""
        begun_ns = monotonic_ns()
        until_ns = begun_ns + int(seconds * 1e9)
        arrivals = threading.Thread(target=self._arrive, args=(load, begun_ns), daemon=True)
        arrivals.start()
        steps, served = list[LoggedStep](), list[ServedRequest]()
        running: list[_Running] = []
        while len(served) < len(load) and monotonic_ns() < until_ns + _LATE_S * 1e9:
            if self._arrived and len(running) < self._batch_max:
                one = self._arrived.popleft()
                steps.append(self._prefill(one, len(running)))
                running.append(one)
            elif running:
                steps.append(self._decode(running))
            else:
                self._bell.wait(0.05)
                self._bell.clear()
                continue
            for one in [one for one in running if one.done]:
                running.remove(one)
                self._reporter.finish(one.key)
                served.append(_served(one))
        arrivals.join(_LATE_S)
        for one in (*running, *self._arrived):
            self._reporter.finish(one.key)
        self._arrived.clear()
        threading.Event().wait(max(0.0, (until_ns - monotonic_ns()) * 1e-9))
        return ProductionLog(steps=tuple(steps), requests=tuple(served))

    def _arrive(self, load: Sequence[Request], begun_ns: int) -> None:
        pause = threading.Event()
        for number, request in enumerate(load):
            due_ns = begun_ns + int(request.at_s * 1e9)
            pause.wait(max(0.0, (due_ns - monotonic_ns()) * 1e-9))
            body_bytes = _ENVELOPE_BYTES + _BYTES_PER_TOKEN * request.prompt_tokens
            arrival_ns = monotonic_ns()
            key = self._reporter.arrive(body_bytes=body_bytes)
            self._arrived.append(_Running(key, number, request, arrival_ns))
            self._bell.set()

    def _prefill(self, one: _Running, beside: int) -> LoggedStep:
        step = self._run("prefill", one.request.prompt_tokens)
        one.token_ns.append(step.end_ns)
        finished = (one.request.prompt_tokens,) if one.done else ()
        ttft_s = (step.end_ns - one.arrival_ns) * 1e-9
        running = beside + 1 - len(finished)
        self._tell(running, ttft_s=(ttft_s,), prompt=step.size, finished=finished)
        return step

    def _decode(self, running: Sequence[_Running]) -> LoggedStep:
        size = next(rows for rows in self._decodes if rows >= len(running))
        step = self._run("decode", size)
        itl_s = tuple((step.end_ns - one.token_ns[-1]) * 1e-9 for one in running)
        for one in running:
            one.token_ns.append(step.end_ns)
        finished = tuple(one.request.prompt_tokens for one in running if one.done)
        self._tell(len(running) - len(finished), itl_s=itl_s, finished=finished)
        return step

    def _run(self, kind: str, size: int) -> LoggedStep:
        work = (self._prefills if kind == "prefill" else self._decodes)[size]
        start_ns = monotonic_ns()
        work()
        self._device.synchronize()
        return LoggedStep(kind=kind, size=size, start_ns=start_ns, end_ns=monotonic_ns())

    def _tell(
        self,
        running: int,
        *,
        ttft_s: tuple[float, ...] = (),
        prompt: int = 0,
        itl_s: tuple[float, ...] = (),
        finished: tuple[int, ...] = (),
    ) -> None:
        waiting, now_s = len(self._arrived), monotonic_ns() * 1e-9
        self._reporter.step(
            lambda: EngineStep(
                running=running,
                kv_usage_ratio=running / self._batch_max,
                ttft_s=ttft_s,
                wall_s=now_s,
                prompt_tokens=prompt,
                generation_tokens=len(ttft_s) + len(itl_s),
                inter_token_s=itl_s,
                finished_prompt_tokens=finished,
                waiting=waiting,
            )
        )


def _served(one: _Running) -> ServedRequest:
    pairs = zip(one.token_ns, one.token_ns[1:], strict=False)
    return ServedRequest(
        number=one.number,
        arrival_ns=one.arrival_ns,
        first_ns=one.token_ns[0],
        end_ns=one.token_ns[-1],
        prompt_tokens=one.request.prompt_tokens,
        itl_s=tuple((after - before) * 1e-9 for before, after in pairs),
    )
