"""A guest engine without vLLM: endless rollouts behind the real `GuestSlot` and `Waker`.

Decodes come first and fill the step up to what the gate admits; now and then a prompt of a new turn
is prefilled in their place. A step is the largest that was captured and is admitted.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random

from benchmarks.gpu_slot.device import Device, Work
from benchmarks.gpu_slot.engines.step_log import GuestLog, LoggedStep
from coserve.guest.guest_slot import GuestSlot
from coserve.vllm.waker import BEAT_S, Waker
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.process import process_ids

_PREFILL_EVERY = 16


class SyntheticGuest:
    def __init__(
        self,
        device: Device,
        *,
        pages: Path,
        prefills: Mapping[int, Work],
        decodes: Mapping[int, Work],
        context_tokens: int,
        isolation: IsolationBackend,
        pid: int,
    ) -> None:
        self._device = device
        self._works = {("prefill", size): work for size, work in prefills.items()}
        self._works |= {("decode", size): work for size, work in decodes.items()}
        self._slot = GuestSlot(pages, token_limit=max(*prefills, *decodes))
        batch, load = max(decodes), self._slot.load
        load.running, load.kv_tokens = batch, batch * context_tokens
        load.kv_tokens_total = load.kv_tokens
        load.processes = tuple(process_ids([pid]))
        load.isolation = isolation
        watch = self._slot.isolation_watch()
        if watch is not None:
            watch.start()
        self._woken = threading.Event()
        # This guest has no memory that it could give back, so no deadline may end it.
        self._waker = Waker(self._slot, self._woken.set, end=None)
        self._waker.start()

    def roll(self, *, seconds: float, mixed: bool = False, seed: int = 0) -> GuestLog:
        """Steps for so long, as the gate admits them. `mixed`: steps of all sizes by turns."""
        until_ns = monotonic_ns() + int(seconds * 1e9)
        steps, closed, rng = list[LoggedStep](), Counter[str](), Random(seed)
        probes = 0
        while monotonic_ns() < until_ns:
            decision = self._slot.decide(for_step=True)
            form = self._form(decision.tokens, len(steps), rng if mixed else None)
            if form is None:
                closed[decision.reason or "no_step_so_small"] += 1
                self._waker.arm()
                self._woken.wait(BEAT_S)
                self._woken.clear()
                continue
            probes += decision.probe
            steps.append(self._run(form))
        smallest_s = self._slot.steps.model.predict_s(
            decodes=1, prefill_tokens=0, context_tokens=self._slot.load.kv_tokens
        )
        return GuestLog(
            steps=tuple(steps),
            closed=dict(closed),
            probes=probes,
            smallest_step_s=smallest_s,
        )

    def _form(self, tokens: int, number: int, rng: Random | None) -> tuple[str, int] | None:
        """The step to run among the admitted forms; None if none fits."""
        fitting = sorted(form for form in self._works if form[1] <= tokens)
        if not fitting:
            return None
        if rng is not None:
            return rng.choice(fitting)
        kinds = ("prefill", "decode") if number % _PREFILL_EVERY == 0 else ("decode", "prefill")
        return next(max(f for f in fitting if f[0] == k) for k in kinds if _has(fitting, k))

    def _run(self, form: tuple[str, int]) -> LoggedStep:
        kind, size = form
        prefill = kind == "prefill"
        self._slot.launched(decodes=0 if prefill else size, prefill_tokens=size if prefill else 0)
        start_ns = monotonic_ns()
        self._works[form]()
        self._device.synchronize()
        end_ns = monotonic_ns()
        self._slot.finished()
        self._slot.publish()
        return LoggedStep(kind=kind, size=size, start_ns=start_ns, end_ns=end_ns)


def _has(forms: list[tuple[str, int]], kind: str) -> bool:
    return any(form[0] == kind for form in forms)
