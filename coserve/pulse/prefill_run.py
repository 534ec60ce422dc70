"""Back-to-back prefills, from the earliest start of the first until no request waits.

Requests that come together share steps, and a prompt is cut where a step is full, so single
prefills cannot be timed; the run as a whole can.
"""

from dataclasses import dataclass
from math import ceil

from coserve.pulse.engine_cores import EngineStep, Siblings, only_decoding

# Runs of an engine that never catches up are used too, less exactly: the step with a run's last
# first token may hold a piece of the next prompt.
_STEPS_MAX = 16


@dataclass(slots=True)
class PrefillRun:
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

    @property
    def since_ns(self) -> int:
        return self.begun_ns or self.arrival_ns

    def follow(
        self,
        step: EngineStep,
        beside: Siblings | None,
        *,
        decoding: int,
        caught_up: bool,
        now_ns: int,
    ) -> bool:
        """Record an engine step beside `decoding` requests; True if it was the run's last."""
        if not only_decoding(self.beside, beside):
            self.whole = False
        if self.begun_ns == 0 and not step.first_tokens:
            self.begun_ns = now_ns
            return False
        self.engine_steps += 1
        if not step.first_tokens:
            return False
        self.steps += 1
        self.tokens += step.prompt_tokens - step.cached_tokens
        self.decodes += decoding + (0 if beside is None else beside.decoding)
        return caught_up or self.steps == _STEPS_MAX

    def has_waited(self, beside: Siblings | None, *, step_tokens: int) -> bool:
        """Whether a request waited for room, not for prefills. `step_tokens` is the engine's token
        limit per step, 0 if unknown."""
        if not step_tokens:
            return False
        others = beside.steps_total - self.beside.steps_total if beside and self.beside else 0
        return max(self.engine_steps, others) > self.steps + ceil(self.tokens / step_tokens)

    def step_s(self, *, decode_s: float, now_ns: int) -> float:
        """Time of a prefill step in s, less the share of the decodes in it, `decode_s` each."""
        seconds = (now_ns - self.since_ns) * 1e-9 - self.decodes * decode_s
        return max(0.0, seconds / self.steps)
