"""Every name of vLLM that the adapters touch, and how: one table, checked in every version.

An adapter may import, override, call or read only names of this table. A row says which versions
have the name in the stated form, in terms of the capability table; in all others it must be absent
or different, so that neither table can drift from upstream. The rows for `weightsync` are in
upstream_weights.py, those for HTTP in upstream_routes.py. Decides nothing at run time and imports
neither vllm nor torch.
"""

from tests.compat.symbol import Symbol, Use, asks, overrides, reads
from tests.compat.upstream_routes import ROUTES
from tests.compat.upstream_weights import ADAPTERS, WEIGHTS

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler"
_POOL = "vllm.v1.core.block_pool"
_CORE = "vllm.v1.engine.core"
_ENGINE = "vllm.v1.engine"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_REQUEST = "vllm.v1.request"
_STATS = "vllm.v1.metrics.stats"
_LOGGERS = "vllm.v1.metrics.loggers"
_WORKER = "vllm.v1.worker.gpu_worker"
_EXECUTOR = "vllm.v1.executor.abstract"
_SLEEP = "vllm.device_allocator.sleep_mode_backend"

SCHEDULER: tuple[Symbol, ...] = (
    Symbol(Use.SUBCLASS, _ASYNC_SCHEDULER, "AsyncScheduler", ("Scheduler",)),
    *overrides(_ASYNC_SCHEDULER, "AsyncScheduler", {"__init__": ("*args", "**kwargs")}),
    *overrides(
        _ASYNC_SCHEDULER,
        "AsyncScheduler",
        {
            "schedule": ("throttle_prefills",),
            "has_requests": (),
            "has_unfinished_requests": (),
            "has_finished_requests": (),
            "get_num_unfinished_requests": (),
            "get_request_counts": (),
            "add_request": ("request",),
            "finish_requests": ("request_ids", "finished_status"),
            "update_from_output": ("scheduler_output", "model_runner_output"),
            "reset_prefix_cache": ("reset_running_requests", "reset_connector"),
            "set_pause_state": ("pause_state",),
            "shutdown": (),
        },
    ),
    *reads(
        _SCHEDULER,
        "Scheduler.running",
        "Scheduler.waiting",
        "Scheduler.requests",
        "Scheduler.finished_req_ids",
        "Scheduler.max_num_scheduled_tokens",
        "Scheduler.max_num_running_reqs",
        "Scheduler.kv_cache_manager",
        "Scheduler.pause_state",
        "Scheduler.block_size",
    ),
    Symbol(
        Use.READ,
        _SCHEDULER,
        "Scheduler.skipped_waiting",
        when=lambda table: table.skipped_waiting_queue,
    ),
    Symbol(
        Use.CALL,
        _SCHEDULER,
        "Scheduler._preempt_request",
        ("request", "timestamp", "drop_stale_output"),
        lambda table: table.preempt_drops_output,
    ),
    *reads(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.block_pool",
        "KVCacheManager.enable_caching",
        "KVCacheManager.num_kv_cache_groups",
    ),
    *reads(_POOL, "BlockPool.num_gpu_blocks"),
    *reads("vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_id"),
    Symbol(Use.CALL, _POOL, "BlockPool.get_num_free_blocks"),
    Symbol(Use.CALL, _POOL, "BlockPool.get_new_blocks", ("num_blocks",)),
    Symbol(Use.CALL, _POOL, "BlockPool.free_blocks", ("ordered_blocks",)),
    Symbol(Use.CALL, _POOL, "BlockPool.get_cached_block", ("block_hash", "kv_cache_group_ids")),
    Symbol(Use.CALL, _POOL, "BlockPool.touch", ("blocks",)),
    *reads(
        "vllm.v1.core.sched.output",
        "SchedulerOutput.total_num_scheduled_tokens",
        "SchedulerOutput.num_scheduled_tokens",
    ),
    *reads(
        "vllm.v1.core.sched.interface",
        "PauseState.UNPAUSED",
        "PauseState.PAUSED_NEW",
        "PauseState.PAUSED_ALL",
    ),
    *reads(
        _REQUEST,
        "Request.request_id",
        "Request.arrival_time",
        "Request.num_computed_tokens",
        "Request.num_tokens",
        "Request.block_hashes",
        "Request.sampling_params",
        "Request.status",
        "RequestStatus.FINISHED_ABORTED",
        "RequestStatus.FINISHED_LENGTH_CAPPED",
        "RequestStatus.FINISHED_STOPPED",
    ),
    *reads("vllm.sampling_params", "SamplingParams.extra_args"),
    *reads("vllm.config.scheduler", "SchedulerConfig.scheduler_cls"),
)
"""Base classes, overrides and attributes of the gated scheduler."""

ENGINE_LOOP: tuple[Symbol, ...] = (
    *overrides(
        _QUEUES,
        "SpinCondition",
        {"wait": ("timeout_ms",)},
    ),
    *reads(_QUEUES, "SpinCondition.busy_loop_s", "SpinCondition.last_read"),
    Symbol(Use.SUBCLASS, _CORE, "EngineCoreProc", ("EngineCore",)),
    *overrides(
        _CORE,
        "EngineCoreProc",
        {
            "run_busy_loop": (),
            "_process_input_queue": (),
            "_process_engine_step": (),
            "has_work": (),
            "is_running": (),
            "_handle_client_request": ("request_type", "request"),
            "_send_abort_outputs": ("aborted_reqs",),
        },
    ),
    *asks(
        _CORE,
        {
            "EngineCoreProc.run_busy_loop": ("_process_input_queue", "_process_engine_step"),
            "EngineCoreProc._process_input_queue": (
                "has_work",
                "is_running",
                "input_queue",
                "_handle_client_request",
                "_notify_idle_state_callbacks",
            ),
            "EngineCoreProc._process_engine_step": ("step_fn",),
            "EngineCoreProc.has_work": ("has_requests", "batch_queue"),
            "EngineCoreProc.pause_scheduler": ("_pause_complete", "_idle_state_callbacks"),
            "EngineCoreProc._pause_complete": ("has_work",),
            "EngineCore.step": ("has_requests", "schedule"),
            "EngineCore.step_with_batch_queue": ("has_requests", "schedule", "batch_queue"),
        },
    ),
    *reads(_CORE, "EngineCore.step_fn"),
    Symbol(
        Use.CALL,
        "vllm.utils.watch_dog",
        "get_watch_dog",
        when=lambda table: table.capabilities.loop_watch_dog,
    ),
    *reads(
        _CORE,
        "EngineCoreProc.input_queue",
        "EngineCoreProc.aborts_queue",
        "EngineCore.batch_queue",
        "EngineCore.scheduler",
        "EngineCore.model_executor",
    ),
    Symbol(
        Use.CALL,
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        ("method", "timeout", "args", "kwargs"),
    ),
    *overrides(_EXECUTOR, "Executor", {"__init__": ("vllm_config",)}),
    *reads(
        "vllm.config",
        "ParallelConfig.worker_extension_cls",
        "ParallelConfig.world_size",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.data_parallel_index",
    ),
    Symbol(Use.READ, "vllm.distributed.parallel_state", "GroupCoordinator.__init__", ("gloo",)),
    *reads("vllm.platforms.cuda", "NvmlCudaPlatform.get_device_uuid"),
    *reads("vllm.platforms.interface", "Platform.is_cuda"),
    *reads("vllm.v1.worker.worker_base", "WorkerBase.device"),
    *reads(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model", "GPUModelRunner._dummy_run"
    ),
    *reads(
        "vllm.third_party.pynvml",
        "nvmlInit",
        "nvmlShutdown",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetComputeRunningProcesses",
        "NVMLError",
    ),
    *reads(_WORKER, "Worker.model_runner"),
    *reads("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.kv_caches"),
    Symbol(
        Use.READ, _CORE, "EngineCore._weight_version", when=lambda table: table.weight_version_api
    ),
    Symbol(
        Use.OVERRIDE,
        _CORE,
        "EngineCoreProc._maybe_publish_request_counts",
        when=lambda table: table.request_counts_published,
    ),
    *reads(_ENGINE, "EngineCoreRequestType.WAKEUP", "EngineCoreRequestType.ABORT"),
)
"""Hooks that wake the engine loop of a guest and let it sleep."""

STATISTICS: tuple[Symbol, ...] = (
    *overrides(
        _LOGGERS,
        "StatLoggerBase",
        {
            "__init__": ("vllm_config", "engine_index"),
            "record": ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
            "log_engine_initialized": (),
        },
    ),
    *reads("vllm.config", "VllmConfig.scheduler_config", "SchedulerConfig.max_num_batched_tokens"),
    *reads(
        "vllm.config",
        "ParallelConfig._api_process_count",
        "ParallelConfig._api_process_rank",
        "ParallelConfig.data_parallel_external_lb",
        "ParallelConfig.data_parallel_rank",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.data_parallel_size_local",
        "ParallelConfig.data_parallel_backend",
        "ParallelConfig.distributed_executor_backend",
        "ParallelConfig.nnodes",
        "VllmConfig.kv_transfer_config",
        "KVTransferConfig.kv_connector",
        "KVTransferConfig.kv_role",
        "KVTransferConfig.kv_connector_extra_config",
        "KVTransferConfig.kv_connector_module_path",
        "ParallelConfig.tensor_parallel_size",
        "ParallelConfig.pipeline_parallel_size",
        "ModelConfig.architecture",
        "ModelConfig.is_moe",
        "ModelConfig.hf_text_config",
        "ModelConfig.quantization",
        "ModelConfig.dtype",
    ),
    *reads("vllm.platforms.interface", "Platform.device_name", "Platform.is_cpu"),
    *reads("vllm.platforms.cuda", "NvmlCudaPlatform.get_device_name"),
    *reads("vllm.config", "ParallelConfig.data_parallel_rank_local"),
    *reads("vllm.third_party.pynvml", "nvmlDeviceGetMigMode", "NVML_ERROR_NOT_SUPPORTED"),
    *reads(
        "vllm.third_party.pynvml",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetName",
    ),
    *reads(_STATS, "SchedulerStats.num_running_reqs", "SchedulerStats.num_waiting_reqs"),
    *reads(
        _STATS,
        "SchedulerStats.kv_cache_usage",
        "FinishedRequestStats.num_prompt_tokens",
        "FinishedRequestStats.num_cached_tokens",
        "IterationStats.prompt_token_stats",
        "PromptTokenStats.total",
        "PromptTokenStats.cached_tokens",
        "IterationStats.num_generation_tokens",
        "IterationStats.time_to_first_tokens_iter",
        "IterationStats.iteration_timestamp",
        "IterationStats.inter_token_latencies_iter",
        "IterationStats.finished_requests",
    ),
)
"""Sources of a production engine's pulse."""

PLUGINS: tuple[Symbol, ...] = (
    Symbol(Use.READ, "vllm.plugins", "DEFAULT_PLUGINS_GROUP", ("vllm.general_plugins",)),
    Symbol(Use.READ, "vllm.plugins", "STAT_LOGGER_PLUGINS_GROUP", ("vllm.stat_logger_plugins",)),
    Symbol(
        Use.READ,
        "vllm.plugins",
        "ENDPOINT_PLUGINS_GROUP",
        ("vllm.endpoint_plugins",),
        lambda table: table.endpoint_plugins,
    ),
    Symbol(Use.READ, _SLEEP, "SleepModeBackend", when=lambda table: table.sleep_backends),
    Symbol(Use.CALL, _EXECUTOR, "Executor.sleep", ("level",)),
    Symbol(Use.CALL, _EXECUTOR, "Executor.wake_up", ("tags",)),
    *reads(_EXECUTOR, "Executor.is_sleeping"),
    *overrides(_WORKER, "Worker", {"sleep": ("level",), "wake_up": ("tags",)}),
    *reads(
        "vllm.config",
        "ModelConfig.enable_sleep_mode",
        "ModelConfig.get_vocab_size",
        "ModelConfig.logprobs_mode",
        "ModelConfig.max_model_len",
        "ModelConfig.served_model_name",
        "ModelConfig.hf_config",
        "ModelConfig.dtype",
    ),
    *reads("vllm.v1.worker.cpu_worker", "CPUWorker"),
    Symbol(
        Use.READ,
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        (
            "--scheduler-cls",
            "--worker-extension-cls",
            "--weight-transfer-config",
            "--stream-interval",
            "--logprobs-mode",
            "--load-format",
            "--served-model-name",
            "--enforce-eager",
            "--max-model-len",
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--kv-cache-memory-bytes",
            "--gpu-memory-utilization",
            "--enable-sleep-mode",
        ),
    ),
)
"""Entry points and flags that load RoseMux into an engine."""

CONTINUATION: tuple[Symbol, ...] = (
    *asks(
        "vllm.v1.engine.input_processor",
        {"InputProcessor.process_inputs": ("model_config",)},
    ),
    Symbol(
        Use.CALL,
        "vllm.v1.engine.output_processor",
        "RequestState.from_new_request",
        (
            "tokenizer",
            "request",
            "prompt",
            "parent_req",
            "request_index",
            "queue",
            "log_stats",
            "stream_interval",
        ),
    ),
    *asks(
        "vllm.v1.engine.output_processor",
        {
            "RequestState.from_new_request": ("from_new_request", "sampling_params"),
            "RequestState.make_request_output": ("sent_tokens_offset", "detokenizer"),
        },
    ),
    Symbol(
        Use.CALL,
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer.update",
        ("new_token_ids", "stop_terminated"),
    ),
    Symbol(
        Use.CALL,
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer.get_next_output_text",
        ("finished", "delta"),
    ),
    Symbol(Use.CALL, _REQUEST, "Request.append_output_token_ids", ("token_ids",)),
    *reads(_REQUEST, "Request.num_preemptions", "Request.structured_output_request"),
    *reads(_REQUEST, "Request.prompt_token_ids", "Request.all_token_ids"),
    *overrides("vllm.v1.worker.gpu_input_batch", "CachedRequestState", {"__post_init__": ()}),
    *asks(
        "vllm.v1.worker.gpu_input_batch",
        {"InputBatch.add_request": ("output_token_ids", "num_tokens_no_spec")},
    ),
    *overrides(
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder",
        {"_update_think_state": ("state",), "sync_batch": ("batch_update",)},
    ),
    *reads("vllm.v1.sample.thinking_budget_state", "ThinkingBudgetStateHolder._state"),
    *reads("vllm.v1.sample.logits_processor.interface", "BatchUpdate.moved"),
    *reads("vllm.v1.sample.logits_processor.interface", "MoveDirectionality.SWAP"),
    *reads(
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder.think_start_token_ids",
        "ThinkingBudgetStateHolder.think_end_token_ids",
    ),
    Symbol(
        Use.READ,
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder._init_state_entry",
        ("in_end", "check_count_down", "prev_output_length", "start_thinking"),
    ),
    Symbol(
        Use.READ,
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder._update_think_state",
        ("output_tok_ids", "spec_token_ids"),
    ),
    *overrides(
        "vllm.v1.structured_output",
        "StructuredOutputManager",
        {"_create_grammar": ("request",), "_get_reasoner": ("request",)},
    ),
    *reads("vllm.v1.structured_output", "StructuredOutputManager.enable_in_reasoning"),
    Symbol(
        Use.CALL,
        "vllm.v1.structured_output.backend_types",
        "StructuredOutputGrammar.accept_tokens",
        ("request_id", "tokens"),
    ),
    *reads("vllm.v1.structured_output.request", "StructuredOutputRequest.reasoning_ended"),
    Symbol(
        Use.CALL,
        "vllm.reasoning.abs_reasoning_parsers",
        "ReasoningParser.is_reasoning_end",
        ("input_ids",),
    ),
    Symbol(
        Use.CALL,
        "vllm.reasoning.abs_reasoning_parsers",
        "ReasoningParser.extract_content_ids",
        ("input_ids",),
    ),
)
"""Hooks by which a request brings output of another engine."""

TABLE: tuple[Symbol, ...] = (
    *SCHEDULER,
    *ENGINE_LOOP,
    *STATISTICS,
    *PLUGINS,
    *CONTINUATION,
    *WEIGHTS,
    *ADAPTERS,
    *ROUTES,
)
