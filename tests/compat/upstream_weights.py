"""The rows of upstream.py for `weightsync`: its base classes, reads and weight packing in vLLM."""

from collections.abc import Mapping

from tests.compat.symbol import Symbol, Use, overrides, reads
from tests.compat.upstream_versions import WeightEngineApi

_WORKER = "vllm.v1.worker.gpu_worker"
_TRANSFER = "vllm.distributed.weight_transfer"
_LINEAR = "vllm.model_executor.layers.linear"
_LATENT = "vllm.model_executor.layers.attention.mla_attention"
_PATCHES = "vllm.model_executor.model_loader.checkpoint_weight_patch"
_RELOAD = "vllm.model_executor.model_loader.reload"
_LORA = "vllm.lora"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"


def _weight_engine(api: WeightEngineApi, methods: Mapping[str, tuple[str, ...]]) -> list[Symbol]:
    return [
        Symbol(
            Use.OVERRIDE,
            f"{_TRANSFER}.base",
            f"WeightTransferEngine.{name}",
            parameters,
            lambda table: table.weight_engine_api is api,
        )
        for name, parameters in methods.items()
    ]


WEIGHTS: tuple[Symbol, ...] = (
    Symbol(
        Use.CALL,
        f"{_TRANSFER}.factory",
        "WeightTransferEngineFactory.register_engine",
        ("name", "module_path_or_cls", "class_name"),
    ),
    *overrides(
        f"{_TRANSFER}.base",
        "WeightTransferEngine",
        {
            "parse_init_info": ("init_dict",),
            "parse_update_info": ("update_dict",),
            "init_transfer_engine": ("init_info",),
            "shutdown": (),
        },
    ),
    *_weight_engine(
        WeightEngineApi.LOADER,
        {
            "__init__": ("config", "parallel_config", "model"),
            "receive_weights": ("update_info", "load_weights"),
        },
    ),
    *_weight_engine(
        WeightEngineApi.WORKER,
        {
            "__init__": ("config", "vllm_config", "device", "model"),
            "receive_weights": ("update_info",),
            "start_weight_update": (),
            "update_weights": ("update_info",),
            "finish_weight_update": (),
        },
    ),
    Symbol(
        Use.OVERRIDE,
        _WORKER,
        "Worker.start_weight_update",
        ("is_checkpoint_format",),
        lambda table: table.weight_engine_api is WeightEngineApi.LOADER,
    ),
    Symbol(
        Use.OVERRIDE,
        _WORKER,
        "Worker.start_draft_weight_update",
        when=lambda table: table.draft_weight_updates,
    ),
    *overrides(_WORKER, "Worker", {"update_weights": ("update_info",), "finish_weight_update": ()}),
    *reads(_WORKER, "Worker._weight_update_active", "Worker.vllm_config", "Worker.device"),
    Symbol(
        Use.OVERRIDE,
        f"{_TRANSFER}.base",
        "WeightTransferEngine.trainer_send_weights",
        ("iterator", "trainer_args"),
        lambda table: table.weight_engine_sends,
    ),
    *reads(f"{_TRANSFER}.base", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
    *(
        Symbol(Use.READ, f"{_TRANSFER}.{module}", name, when=lambda t: t.weight_sync_client)
        for module, name in (
            ("base", "VLLMWeightSyncClient"),
            ("base", "TrainerInitInfo"),
            ("base", "TrainerWeightTransferEngine"),
            ("factory", "WeightTransferTrainerFactory"),
        )
    ),
    *(
        Symbol(
            Use.READ,
            _LINEAR,
            "UnquantizedLinearMethod.process_weights_after_loading",
            (flag,),
            lambda table, flag=flag: table.plain_weight_flag == flag,  # type: ignore[misc]
        )
        for flag in ("_cpu_skip_gemm_dispatch", "skip_weight_relayout")
    ),
    Symbol(
        Use.OVERRIDE,
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
    ),
    Symbol(Use.CALL, "vllm.config", "get_current_vllm_config_or_none"),
    *reads(
        "vllm.config",
        "VllmConfig.weight_transfer_config",
        "VllmConfig.model_config",
        "VllmConfig.parallel_config",
        "VllmConfig.load_config",
        "LoadConfig.load_format",
        "ModelConfig.enforce_eager",
        "ParallelConfig.world_size",
        "ParallelConfig.pipeline_parallel_size",
        "ParallelConfig.enable_expert_parallel",
        "ParallelConfig.enable_eplb",
    ),
    *reads("vllm.config.weight_transfer", "WeightTransferConfig.backend"),
    *reads("vllm.platforms", "current_platform"),
    *reads(_WORKER, "Worker.weight_transfer_engine"),
    Symbol(Use.CALL, f"{_RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    Symbol(Use.CALL, f"{_RELOAD}.layerwise", "finalize_layerwise_reload"),
    Symbol(
        Use.CALL,
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        ("layer",),
    ),
    *reads(_LATENT, "MLAAttention.kv_b_proj", "MLAAttention.process_weights_after_loading"),
    Symbol(
        Use.CALL,
        _EXECUTOR,
        "MultiprocExecutor.collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank"),
    ),
    *reads(_EXECUTOR, "MultiprocExecutor.response_mqs"),
    *reads("vllm.v1.executor.abstract", "Executor.uses_ray"),
    Symbol(
        Use.CALL,
        "vllm.v1.executor.ray_executor",
        "RayDistributedExecutor.collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block"),
    ),
    Symbol(
        Use.CALL,
        _PATCHES,
        "load_checkpoint_weight_patches",
        ("model", "patches"),
        lambda table: table.capabilities.checkpoint_patches,
    ),
)
"""Bases of the weight backend, packing of weights on a CPU, and replies of ranks."""

ADAPTERS: tuple[Symbol, ...] = (
    *overrides(
        f"{_LORA}.worker_manager", "WorkerLoRAManager", {"_load_adapter": ("lora_request",)}
    ),
    Symbol(
        Use.CALL,
        f"{_LORA}.worker_manager",
        "WorkerLoRAManager.__init__",
        ("vllm_config", "device", "embedding_modules"),
    ),
    *reads(f"{_LORA}.worker_manager", "LRUCacheWorkerLoRAManager._adapter_manager"),
    *reads("vllm.config", "VllmConfig.lora_config"),
    *reads("vllm.triton_utils", "HAS_TRITON"),
    *reads(
        f"{_LORA}.model_manager",
        "LoRAModelManager.model",
        "LoRAModelManager.modules",
        "LoRAModelManager.packed_modules",
    ),
    *(
        Symbol(Use.CALL, f"{_LORA}.model_manager", f"LRUCacheLoRAModelManager.{name}", details)
        for name, details in (
            ("add_adapter", ("lora",)),
            ("activate_adapter", ("lora_id",)),
            ("remove_adapter", ("adapter_id",)),
            ("list_adapters", ()),
        )
    ),
    *reads(f"{_LORA}.lora_model", "LoRAModel.id", "LoRAModel.loras"),
    *reads(f"{_LORA}.layers.fused_moe", "FusedMoEWithLoRA", "FusedMoE3DWithLoRA"),
    *reads(
        f"{_LORA}.request",
        "LoRARequest.lora_name",
        "LoRARequest.lora_int_id",
        "LoRARequest.lora_path",
    ),
    *overrides(
        f"{_LORA}.resolver", "LoRAResolver", {"resolve_lora": ("base_model_name", "lora_name")}
    ),
    *reads(f"{_LORA}.resolver", "LoRAResolverRegistry"),
    *reads("vllm.envs", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    Symbol(
        Use.READ,
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        ("--enable-lora", "--max-lora-rank"),
    ),
)
"""Loading of adapters that follow a store into vLLM's LoRA manager, and their names."""
