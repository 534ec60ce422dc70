"""Steps of an engine while none of its API servers has a request in flight, WebSockets excluded.

One step at the end of a request does not count: a reply may end while its last step is counted.
Steps in two beats without a seen request serve requests that arrive unseen. Their prefills have no
known slack, so the slot closes.

    no middleware      the flag was lost at a restart; certain before the first step
    with a middleware  responses in the background, or requests not over HTTP
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
    """Unseen steps when the last request was seen."""
    last_steps_total: int = 0
    beats: int = 0
    """Beats in which the engine took unseen steps."""
    stepped_at_s: float | None = None


def unseen_requests(
    state: dict[str, UnseenSteps],
    engine: str,
    pulses: Sequence[Pulse],
    *,
    patience_s: float,
    now: float,
) -> str:
    """Why the engine serves unseen requests, "" where it does not; updates the engine's evidence.

    `pulses` are all of the engine's, `patience_s` is longer than any step of it.
    """
    requests = sum(pulse.requests_total for pulse in pulses)
    steps = sum(pulse.unseen_steps_total for pulse in pulses)
    known = state.get(engine)
    seen = any(pulse.in_flight > pulse.sockets for pulse in pulses)
    if known is None or seen or requests != known.requests_total:
        known = state[engine] = UnseenSteps(
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
        return f"{_FLAG} is missing, or requests do not come over HTTP"
    return "responses in the background, or requests that do not come over HTTP"
