"""The engine steps that the statistics logger makes of vLLM's own statistics."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefillStats

from coserve.pulse.engine_cores import EngineStep
from coserve.vllm import pulse_logger


def test_prompt_tokens_that_a_cache_had_are_not_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[EngineStep] = []

    class Reporter:
        def step(self, read: Callable[[], EngineStep]) -> None:
            steps.append(read())

    monkeypatch.setattr(pulse_logger, "process_reporter", lambda shape: Reporter())
    prefill, found = PrefillStats(), IterationStats()
    prefill.set(2000, num_local_cached_tokens=1900, num_external_cached_tokens=84)
    found.prompt_token_stats.update_from_output(prefill)
    ended: dict[str, Any] = {"finish_reason": FinishReason.STOP, "num_prompt_tokens": 2000}
    found.finished_requests = [
        FinishedRequestStats(**ended, num_cached_tokens=cached) for cached in (0, 1984, 2000)
    ]
    pulse_logger.PulseStatLogger(None).record(None, found)
    (step,) = steps
    assert (step.prompt_tokens, step.cached_tokens) == (2000, 1984)
    assert step.finished_prompt_tokens == (2000, 16, 1)
