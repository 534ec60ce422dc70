"""The account of a guest's steps: launched steps, their durations, and what the model learns.

Reads no clock and no page: production's state at the start and end of a step is an argument.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from coserve.guest.steps_met import StepsMet
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Calibration

# The pause before a probe in multiples of the last step: a probe takes 1 % of idle time.
_PROBE_RATIO = 100.0
_PROBE_MAX_S = 10.0
_CALIBRATIONS_NS = 1_000_000_000
"""Interval at which the published calibrations are recomputed."""


class ProductionMoment(msgspec.Struct, frozen=True):
    """State of all engines of a slot at one moment."""

    idle: bool
    requests: int
    """Requests that ever arrived."""
    waiting: int
    """Requests without a first token."""


class _Launched(msgspec.Struct, frozen=True):
    decodes: int
    prefill_tokens: int
    context_tokens: int
    predicted_s: float
    start_ns: int
    production: ProductionMoment | None


@dataclass(slots=True)
class GuestSteps:
    model: StepTimeModel = field(default_factory=StepTimeModel)
    met: StepsMet = field(default_factory=StepsMet)
    launched_total: int = 0
    finished_total: int = 0
    tokens_total: int = 0
    last_tokens: int = 0
    last_step_s: float = 0.0
    last_end_ns: int = 0
    probe_ns: int = 0
    """Earliest time of the next probe."""
    rest_s: float = 0.0
    """Idle time of production that the last step owes."""
    _launched: deque[_Launched] = field(default_factory=deque)
    _calibrations: tuple[Calibration, Calibration] = (Calibration(), Calibration())
    _calibrated_ns: int = 0

    @property
    def launched_s(self) -> float:
        """Predicted time of all launched, unfinished steps."""
        launched = self._launched
        return sum([step.predicted_s for step in launched]) if launched else 0.0

    def launch(
        self,
        *,
        decodes: int,
        prefill_tokens: int,
        context_tokens: int,
        production: ProductionMoment | None,
        now_ns: int,
    ) -> None:
        """Record a launch. `production` is None if a pulse cannot be read."""
        predicted_s = self.model.predict_s(
            decodes=decodes, prefill_tokens=prefill_tokens, context_tokens=context_tokens
        )
        self._meet(production, begins=True)
        self._launched.append(
            _Launched(decodes, prefill_tokens, context_tokens, predicted_s, now_ns, production)
        )
        self.launched_total += 1

    def finish(self, *, production: ProductionMoment | None, now_ns: int) -> None:
        """Record the end of the oldest launched step."""
        if not self._launched:
            return
        self._meet(production, begins=False)
        step = self._launched.popleft()
        # A queued step begins when the step before it ends.
        start_ns = max(step.start_ns, self.last_end_ns)
        self.last_step_s = (now_ns - start_ns) * 1e-9
        self.last_tokens = step.decodes + step.prefill_tokens
        self.last_end_ns = now_ns
        self.probe_ns = now_ns + int(min(_PROBE_MAX_S, _PROBE_RATIO * self.last_step_s) * 1e9)
        self.finished_total += 1
        self.tokens_total += self.last_tokens
        self._learn(step, production)

    def calibrations(self, *, now_ns: int) -> tuple[Calibration, Calibration]:
        """Calibrations of steps alone and of steps beside production; at most a second old."""
        if now_ns - self._calibrated_ns > _CALIBRATIONS_NS:
            self._calibrated_ns = now_ns
            self._calibrations = (self.model.alone.summary(), self.model.beside.summary())
        return self._calibrations

    def _meet(self, production: ProductionMoment | None, *, begins: bool) -> None:
        if production is None:
            self.met.forget()
            return
        self.met.observe(
            production.requests,
            production.waiting,
            under_way=len(self._launched),
            begins=begins,
        )

    def _learn(self, step: _Launched, after: ProductionMoment | None) -> None:
        before, model, step_s = step.production, self.model, self.last_step_s
        if before is None or after is None:
            return  # Production's state was unknown.
        if not (before.idle and before == after):
            model.beside.observe(predicted_s=step.predicted_s, step_s=step_s)
            return
        model.alone.observe(predicted_s=step.predicted_s, step_s=step_s)
        model.observe(
            decodes=step.decodes,
            prefill_tokens=step.prefill_tokens,
            context_tokens=step.context_tokens,
            step_s=step_s,
        )
