"""The account of a guest's steps: launched steps, their durations, and what the model learns.

Reads no clock and no page: production's state at the start and end of a step is an argument.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from coserve.law.gate import GuestLoad
from coserve.law.phantom import rest_s
from coserve.law.step_time import StepTimeModel
from harvester.contracts.page import Calibration, Grant

# The least pause before a probe in multiples of the last step: a probe takes 1 % of time.
_PROBE_RATIO = 100.0
_OWN_RATIO = 4.0
"""Longest own time of a preempted step, over its prediction: outliers of the model, as there."""
_REST_MAX_S = 3600.0
"""Bound on a rest after a stall, whose harm to production error budget and proof account for."""
_CALIBRATIONS_NS = 1_000_000_000
"""Interval at which the published calibrations are recomputed."""
_LATEST_STEPS = 32
"""More than end between two pages (50 ms), unless steps are shorter than 2 ms."""
_MOST_MET = 4
"""The last of the counts holds requests that met as many steps or more."""


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
class StepsMet:
    """Guest steps that ran between a production request's arrival and its first token, counted for
    each request from production's counters at the start and end of each step. First tokens are
    assumed to come in order of arrival."""

    counts: list[int] = field(default_factory=lambda: [0] * (_MOST_MET + 1))
    """Requests by the number of steps that they met: 0, 1, 2, ..."""
    _seen: int | None = None
    """Requests that had ever arrived, at the last look."""
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Requests without a first token, oldest first: how many, and the steps that each has met."""

    def observe(self, requests: int, waiting: int, *, under_way: int, begins: bool) -> None:
        """Record the begin or end of a step. `requests` counts production's requests so far,
        `waiting` those without a first token, `under_way` other steps that ran since the last
        call."""
        if requests == self._seen and not self._waiting:
            return
        if self._seen is None or requests < self._seen:
            self.forget()
            self._seen = requests - waiting
            under_way = 0
        if requests > self._seen:
            self._waiting.append((requests - self._seen, under_way))
            self._seen = requests
        self._answer(sum([count for count, _ in self._waiting]) - waiting)
        if begins:
            self._waiting = deque([(count, met + 1) for count, met in self._waiting])

    def forget(self) -> None:
        """Production's state is unknown: requests that wait now are never counted."""
        self._seen = None
        self._waiting.clear()

    def _answer(self, answered: int) -> None:
        while answered > 0:
            count, met = self._waiting.popleft()
            taken = min(count, answered)
            self.counts[min(met, _MOST_MET)] += taken
            answered -= taken
            if taken < count:
                self._waiting.appendleft((count - taken, met))


@dataclass(slots=True)
class GuestSteps:
    model: StepTimeModel = field(default_factory=StepTimeModel)
    load: GuestLoad = field(init=False)
    """State that decides the next step."""
    met: StepsMet = field(default_factory=StepsMet)
    launched_total: int = 0
    finished_total: int = 0
    tokens_total: int = 0
    last_tokens: int = 0
    last_step_s: float = 0.0
    last_predicted_s: float = 0.0
    latest_ns: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_LATEST_STEPS))
    """Start and end of the latest steps."""
    probe_ns: int = 0
    """Earliest time of the next probe."""
    _launched: deque[_Launched] = field(default_factory=deque)
    _calibrations: tuple[Calibration, Calibration] = (Calibration(), Calibration())
    _calibrated_ns: int = 0

    def __post_init__(self) -> None:
        self.load = GuestLoad(self.model)

    @property
    def owes(self) -> bool:
        """Whether a step runs, or the last one still owes a rest."""
        return bool(self._launched) or self.load.quiet_s > 0.0

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

    def finish(
        self, *, production: ProductionMoment | None, now_ns: int, preempted: bool = False
    ) -> None:
        """Record the end of the oldest launched step. `preempted`: production interrupts steps, so
        that one lasts as long as production is busy; its own time comes from the model."""
        load = self.load
        load.rest_s = load.quiet_s = 0.0
        if not self._launched:
            return
        self._meet(production, begins=False)
        step = self._launched.popleft()
        # A queued step begins when the step before it ends.
        start_ns = max(step.start_ns, load.last_end_ns)
        self.last_step_s = (now_ns - start_ns) * 1e-9
        most_s = _OWN_RATIO * step.predicted_s if preempted else math.inf
        load.last_own_s = min(self.last_step_s, most_s)
        self.last_predicted_s = step.predicted_s
        self.last_tokens = step.decodes + step.prefill_tokens
        load.last_end_ns = load.rested_ns = now_ns
        self.probe_ns = now_ns + int(_PROBE_RATIO * load.last_own_s * 1e9)
        self.latest_ns.append((start_ns, now_ns))
        self.finished_total += 1
        self.tokens_total += self.last_tokens
        self._learn(step, production)

    def rest(self, mean_wait_s: float, grant: Grant, *, chance: float) -> None:
        """Set the last step's rest, so that arrivals wait for `mean_wait_s` in the mean. `chance`,
        uniform in [0, 1), spreads rests over the length of a cycle: otherwise a client that sends
        at a constant interval could meet a step each time."""

        def spread_s(step_s: float) -> float:
            owed_s = min(_REST_MAX_S, rest_s(step_s, mean_wait_s, grant))
            return owed_s + (chance - 0.5) * (step_s + owed_s)

        self.load.rest_s = spread_s(self.load.last_own_s)
        self.load.quiet_s = min(self.load.rest_s, spread_s(self.last_predicted_s))

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
