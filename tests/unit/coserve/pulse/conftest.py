"""A production engine in virtual time."""

from typing import Any

import pytest

from coserve.pulse.engine_cores import NO_SIBLINGS, EngineStep, Siblings
from coserve.pulse.pulse_state import PulseState
from harvester.contracts.page import Pulse

START_NS = 1_000_000_000_000


class Production:
    """An engine whose clock advances by the duration of each event."""

    def __init__(self) -> None:
        self.state = PulseState()
        self.now_ns = START_NS
        self.waiting_ns: dict[int, int] = {}
        self.arrivals = 0

    def after(self, seconds: float) -> "Production":
        self.now_ns += round(seconds * 1e9)
        return self

    def arrive(self, key: int, *, body_bytes: int = 300) -> None:
        # vLLM has each request a little later than the middleware, and each at its own time.
        self.arrivals += 1
        self.waiting_ns[key] = self.now_ns + 3_000 * self.arrivals
        self.state.arrive(key, body_bytes=body_bytes, now_ns=self.now_ns)

    def finish(self, key: int) -> None:
        self.waiting_ns.pop(key, None)
        self.state.finish(key, now_ns=self.now_ns)

    def step(
        self,
        beside: Siblings | None = NO_SIBLINGS,
        *,
        first_tokens: int = 0,
        ttft_s: tuple[float, ...] = (),
        **fields: Any,
    ) -> None:
        """`first_tokens` of the requests that wait longest; `ttft_s` of others, as vLLM has it."""
        for key in list(self.waiting_ns)[:first_tokens]:
            ttft_s += ((self.now_ns - self.waiting_ns.pop(key)) * 1e-9,)
        defaults: dict[str, Any] = {
            "running": None,
            "kv_usage_ratio": None,
            "ttft_s": ttft_s,
            "wall_s": self.now_ns * 1e-9,
            "prompt_tokens": 0,
            "generation_tokens": 0,
            "inter_token_s": (),
            "finished_prompt_tokens": (),
        }
        step = EngineStep(**(defaults | fields))
        self.state.step(step, now_ns=self.now_ns, beside=beside)

    def pulse(self) -> Pulse:
        return self.state.pulse(now_ns=self.now_ns)


@pytest.fixture
def production() -> Production:
    return Production()
