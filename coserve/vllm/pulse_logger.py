"""Entry point `vllm.stat_logger_plugins`: feeds each engine iteration into the pulse."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from coserve.law.engine_step import EngineStep
from coserve.vllm.engine_shape import engine_shape
from coserve.vllm.pulse import EngineShape, process_reporter
from harvester.contracts.stock_fallback import guarded


class PulseStatLogger(StatLoggerBase):
    """One per engine core. Does nothing in a vLLM that belongs to no slot."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._rank = engine_index
        self._reporter = guarded(lambda: process_reporter(lambda: _shape(vllm_config)))

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


def _shape(vllm_config: Any) -> EngineShape:
    parallel = vllm_config.parallel_config
    count, index = parallel._api_process_count, max(0, parallel._api_process_rank)
    alone = parallel.data_parallel_external_lb
    return EngineShape(
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        # Behind a balancer of the operator's each rank is a server of its own, and how many of
        # them share this directory is not for one of them to know.
        processes=0 if alone else count,
        process=parallel.data_parallel_rank * count + index if alone else index,
        shape=engine_shape(vllm_config),
    )


def _engine_step(scheduler_stats: Any, iteration_stats: Any, rank: int) -> EngineStep:
    if iteration_stats is None:
        first_tokens, prompt_tokens, generation_tokens = 0, 0, 0
        inter_token_s: tuple[float, ...] = ()
        finished: tuple[int, ...] = ()
    else:
        first_tokens = len(iteration_stats.time_to_first_tokens_iter)
        prompt_tokens = iteration_stats.num_prompt_tokens
        generation_tokens = iteration_stats.num_generation_tokens
        inter_token_s = tuple(iteration_stats.inter_token_latencies_iter)
        finished = tuple(r.num_prompt_tokens for r in iteration_stats.finished_requests)
    return EngineStep(
        running=None if scheduler_stats is None else scheduler_stats.num_running_reqs,
        kv_usage_ratio=None if scheduler_stats is None else scheduler_stats.kv_cache_usage,
        first_tokens=first_tokens,
        prompt_tokens=prompt_tokens,
        generation_tokens=generation_tokens,
        inter_token_s=inter_token_s,
        finished_prompt_tokens=finished,
        rank=rank,
        ours=iteration_stats is not None,
        waiting=None if scheduler_stats is None else scheduler_stats.num_waiting_reqs,
    )
