"""Entry point `vllm.stat_logger_plugins`: feeds each engine iteration into the pulse."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from coserve.pulse.engine_cores import EngineStep
from coserve.vllm.pulse_reporter import process_reporter, shape_of
from harvester.contracts.stock_fallback import guarded


class PulseStatLogger(StatLoggerBase):
    """One logger per engine core. Does nothing in a vLLM outside any slot."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._rank = engine_index
        self._reporter = guarded(lambda: process_reporter(lambda: shape_of(vllm_config)))

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        if self._reporter is None or (scheduler_stats is None and iteration_stats is None):
            return
        self._reporter.step(lambda: _engine_step(scheduler_stats, iteration_stats, self._rank))

    def log_engine_initialized(self) -> None:
        pass


def _engine_step(scheduler_stats: Any, iteration_stats: Any, rank: int) -> EngineStep:
    facts: dict[str, Any] = {"running": None, "kv_usage_ratio": None}
    if scheduler_stats is not None:
        facts = {
            "running": scheduler_stats.num_running_reqs,
            "kv_usage_ratio": scheduler_stats.kv_cache_usage,
            "waiting": scheduler_stats.num_waiting_reqs,
        }
    if iteration_stats is None:
        return EngineStep(rank=rank, ours=False, **facts)
    return EngineStep(
        rank=rank,
        ttft_s=tuple(iteration_stats.time_to_first_tokens_iter),
        wall_s=iteration_stats.iteration_timestamp,
        prompt_tokens=iteration_stats.prompt_token_stats.total,
        cached_tokens=iteration_stats.prompt_token_stats.cached_tokens,
        generation_tokens=iteration_stats.num_generation_tokens,
        inter_token_s=tuple(iteration_stats.inter_token_latencies_iter),
        finished_prompt_tokens=tuple(
            max(1, r.num_prompt_tokens - r.num_cached_tokens)
            for r in iteration_stats.finished_requests
        ),
        **facts,
    )
