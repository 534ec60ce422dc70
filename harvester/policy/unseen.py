"""Steps of an engine while none of its API servers has a request in flight; a WebSocket is none.

One at the end of a request is nothing: a reply may end while its last step is being counted. Steps
in two beats in a row of evidence, with no request seen in between, are requests that no sensor
sees arrive: their prefills have no slack that could be known, so the slot closes.

    no middleware      the flag was lost at a restart; certain before the first step
    with a middleware  responses in the background, or another door than HTTP
"""

from collections.abc import Sequence

import msgspec

from harvester.contracts.page import Pulse

_BEATS_MIN = 2
_STEPS_MIN = 3
_FLAG = "--middleware coserve.vllm.middleware.PulseMiddleware"


class UnseenSteps(msgspec.Struct, kw_only=True):
    """Evidence about one engine since it was last seen to have a request."""

    requests_total: int = 0
    steps_total: int = 0
    """Unseen ones, when the last request was seen."""
    last_steps_total: int = 0
    beats: int = 0
    """In which the engine took such steps."""
    stepped_at_s: float | None = None


class UnseenWatch:
    def __init__(self, state: dict[str, UnseenSteps]) -> None:
        self._state = state

    def observe(
        self, engine: str, pulses: Sequence[Pulse], *, patience_s: float, now: float
    ) -> str:
        """Why the engine serves unseen requests, "" where it does not.

        `pulses` are all of the engine's, `patience_s` is longer than any step of it.
        """
        requests = sum(pulse.requests_total for pulse in pulses)
        steps = sum(pulse.unseen_steps_total for pulse in pulses)
        known = self._state.get(engine)
        seen = any(pulse.in_flight > pulse.sockets for pulse in pulses)
        if known is None or seen or requests != known.requests_total:
            known = self._state[engine] = UnseenSteps(
                requests_total=requests, steps_total=steps, last_steps_total=steps
            )
        if steps > known.last_steps_total:
            known.beats += 1
            known.stepped_at_s = now
        known.last_steps_total = steps
        if any(pulse.middleware is False for pulse in pulses):
            return f"{engine}: no middleware says when requests arrive: start it with {_FLAG}"
        if known.stepped_at_s is None or now - known.stepped_at_s > patience_s:
            # Quiet for longer than a step: what came before is over.
            known.beats, known.steps_total, known.stepped_at_s = 0, steps, None
            return ""
        taken = steps - known.steps_total
        if known.beats < _BEATS_MIN or taken < _STEPS_MIN:
            return ""
        return f"{engine}: {taken} steps while nothing is in flight: {_cause(pulses)}"


def _cause(pulses: Sequence[Pulse]) -> str:
    if any(pulse.middleware is None for pulse in pulses):
        return f"{_FLAG} is missing, or requests come by another door"
    return "responses in the background, or requests by another door than HTTP"
