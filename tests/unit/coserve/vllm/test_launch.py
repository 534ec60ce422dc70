"""The command lines that an operator would have to write."""

import sys
from pathlib import Path
from typing import Any

import pytest

from coserve.guest.isolation import TIME_SLICING, Isolation
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities
from coserve.vllm.launch import (
    HUGE_PAGES,
    EngineCommand,
    EngineSpec,
    GpuOwner,
    GpuShare,
    dedicated,
    guest,
    production,
)
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import IsolationBackend

IDENTITY = "coserve.vllm.identity.IdentityMiddleware"
MODEL, PAGES, WEIGHTS = Path("/models/tiny"), Path("/dev/shm/rosemux/s"), Path("/weights")


def spec(**changes: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "name": "prod",
        "model": MODEL,
        "port": 8001,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "vllm": capabilities("0.32.0"),
    }
    return EngineSpec(**(fields | changes))


def flag(command: EngineCommand, name: str) -> str:
    return command.arguments[command.arguments.index(name) + 1]


def flags(command: EngineCommand, name: str) -> list[str]:
    given = command.arguments
    return [given[at + 1] for at, each in enumerate(given) if each == name]


def test_production_is_stock_but_for_one_flag_and_three_variables() -> None:
    command = production(spec(), pages=PAGES)
    assert flags(command, "--middleware") == ["coserve.vllm.middleware.PulseMiddleware"]
    rosemux = {k: v for k, v in command.environment.items() if k.startswith("ROSEMUX_")}
    assert rosemux == {
        "ROSEMUX_ROLE": "production",
        "ROSEMUX_ENGINE": "prod",
        "ROSEMUX_PAGE_DIR": str(PAGES),
    }
    assert "--scheduler-cls" not in command.arguments
    assert "VLLM_SERVER_DEV_MODE" not in command.environment


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_production_computes_in_what_its_cpu_is_fast_in_and_rollouts_in_what_is_published(
    monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: str
) -> None:
    monkeypatch.setattr(launch, "_fast_bf16", lambda: fast)
    assert flag(production(spec(), pages=PAGES), "--dtype") == dtype
    assert flag(production(spec(gpu=GPU), pages=PAGES), "--dtype") == "bfloat16"
    assert flag(guest(spec(), pages=PAGES, weights=WEIGHTS), "--dtype") == "bfloat16"
    assert flag(dedicated(spec(), weights=WEIGHTS), "--dtype") == "bfloat16"


def test_a_guest_is_gated_fenced_and_takes_weights() -> None:
    command = guest(spec(name="guest"), pages=PAGES, weights=WEIGHTS)
    assert flag(command, "--scheduler-cls") == "coserve.vllm.scheduler.CoserveScheduler"
    assert flags(command, "--middleware") == ["coserve.vllm.middleware.EpochMiddleware", IDENTITY]
    assert flag(command, "--weight-transfer-config") == '{"backend": "rosemux"}'
    assert command.environment["ROSEMUX_ROLE"] == "guest"
    assert command.environment["ROSEMUX_WEIGHT_ROOT"] == str(WEIGHTS)


def test_a_dedicated_engine_takes_weights_and_belongs_to_no_slot() -> None:
    command = dedicated(spec(), weights=WEIGHTS)
    assert flag(command, "--weight-transfer-config") == '{"backend": "rosemux"}'
    assert "--scheduler-cls" not in command.arguments
    assert flag(command, "--middleware") == IDENTITY
    assert "ROSEMUX_ROLE" not in command.environment


@pytest.mark.parametrize(("context", "step"), [(512, "2048"), (8192, "8192")])
def test_a_dedicated_engine_on_a_cpu_cuts_no_prompt(context: int, step: str) -> None:
    command = dedicated(spec(max_model_len=context), weights=WEIGHTS)
    assert "--no-enable-chunked-prefill" in command.arguments
    assert flag(command, "--max-num-batched-tokens") == step
    on_gpu = dedicated(spec(gpu=GpuOwner(memory_ratio=0.9)), weights=WEIGHTS)
    assert "--no-enable-chunked-prefill" not in on_gpu.arguments


def test_a_guest_that_gives_pages_back_uses_small_ones() -> None:
    keeping = (production(spec(), pages=PAGES), dedicated(spec(), weights=WEIGHTS))
    giving = guest(spec(name="guest"), pages=PAGES, weights=WEIGHTS)
    assert all(HUGE_PAGES.items() <= command.environment.items() for command in keeping)
    assert not HUGE_PAGES.keys() & giving.environment.keys()


def test_serves_on_loopback_only() -> None:
    for command in (
        production(spec(), pages=PAGES),
        guest(spec(), pages=PAGES, weights=WEIGHTS),
        dedicated(spec(), weights=WEIGHTS),
    ):
        assert flag(command, "--host") == "127.0.0.1"
        assert flag(command, "--port") == "8001"
        assert flag(command, "--model") == str(MODEL)


def test_a_core_pins_the_engine() -> None:
    assert production(spec(core=1), pages=PAGES).arguments[:3] == ("taskset", "-c", "1")
    assert production(spec(), pages=PAGES).arguments[0] == sys.executable


GPU = GpuShare(kv_cache_bytes=8 << 30, devices=("GPU-1", "GPU-2"))


def test_a_guest_on_a_gpu_takes_a_fixed_kv_and_leaves_profiling_out() -> None:
    command = guest(spec(gpu=GPU), pages=PAGES, weights=WEIGHTS)
    assert flag(command, "--kv-cache-memory-bytes") == str(8 << 30)
    # Production has nine tenths of the GPU: vLLM must not ask for more than is left.
    assert float(flag(command, "--gpu-memory-utilization")) <= 0.05
    assert "--enforce-eager" not in command.arguments
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert not {"VLLM_CPU_KVCACHE_SPACE", "TORCHDYNAMO_DISABLE"} & command.environment.keys()
    eager = guest(spec(gpu=GpuShare(kv_cache_bytes=1, eager=True)), pages=PAGES, weights=WEIGHTS)
    assert "--enforce-eager" in eager.arguments
    assert "CUDA_VISIBLE_DEVICES" not in eager.environment
    with pytest.raises(ConfigError, match="above 0"):
        GpuShare(kv_cache_bytes=0)


def test_production_beside_a_guest_takes_its_part_of_the_gpu_and_profiles_it() -> None:
    part = GpuOwner(memory_ratio=0.5, devices=("GPU-1",))
    command = production(spec(gpu=part), pages=PAGES)
    assert flag(command, "--gpu-memory-utilization") == "0.5"
    assert not {"--kv-cache-memory-bytes", "--enforce-eager"} & {*command.arguments}
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert not {"VLLM_CPU_KVCACHE_SPACE", "KVCACHED_IPC_NAME"} & command.environment.keys()
    with pytest.raises(ConfigError, match="between 0 and 1"):
        GpuOwner(memory_ratio=90.0)


def test_a_guest_gets_its_isolation_backend() -> None:
    mps = Isolation(
        IsolationBackend.MPS, 1.0, fault_isolated=False, environment=(("CUDA_MPS_X", "1"),)
    )
    command = guest(spec(gpu=GPU), pages=PAGES, weights=WEIGHTS, isolation=mps)
    assert command.environment["ROSEMUX_ISOLATION"] == "mps"
    assert command.environment["CUDA_MPS_X"] == "1"
    sliced = guest(spec(gpu=GPU), pages=PAGES, weights=WEIGHTS, isolation=TIME_SLICING)
    assert sliced.environment["ROSEMUX_ISOLATION"] == "time-slicing"
    said_nothing = guest(spec(), pages=PAGES, weights=WEIGHTS)
    assert "ROSEMUX_ISOLATION" not in said_nothing.environment


def test_shared_memory_is_three_variables_in_either_engine_and_none_without_consent() -> None:
    shared = {
        "ENABLE_KVCACHED": "true",
        "KVCACHED_AUTOPATCH": "1",
        "KVCACHED_IPC_NAME": "slot0_kv",
    }
    share = GpuShare(kv_cache_bytes=1 << 30, shared_kv="slot0_kv")
    sharing = (
        production(spec(), pages=PAGES, shared_kv="slot0_kv"),
        guest(spec(gpu=share), pages=PAGES, weights=WEIGHTS),
    )
    for command in sharing:
        assert shared.items() <= command.environment.items()
    keeping = (
        production(spec(), pages=PAGES),
        guest(spec(gpu=GPU), pages=PAGES, weights=WEIGHTS),
    )
    for command in keeping:
        assert not shared.keys() & command.environment.keys()


def test_sleep_mode_is_for_versions_that_can_follow_weights_asleep() -> None:
    sleeping = GpuShare(kv_cache_bytes=1 << 30, sleeps=True)
    command = guest(spec(gpu=sleeping), pages=PAGES, weights=WEIGHTS)
    assert "--enable-sleep-mode" in command.arguments
    assert "--enable-sleep-mode" not in guest(spec(gpu=GPU), pages=PAGES, weights=WEIGHTS).arguments
    with pytest.raises(Unsupported, match=r"0\.30\.0"):
        guest(spec(gpu=sleeping, vllm=capabilities("0.30.0")), pages=PAGES, weights=WEIGHTS)
    both = GpuShare(kv_cache_bytes=1, sleeps=True, shared_kv="kv")
    with pytest.raises(ConfigError, match="choose one"):
        guest(spec(gpu=both), pages=PAGES, weights=WEIGHTS)


def test_an_operators_own_arguments_are_kept() -> None:
    extra = ("--seed", "7")
    command = production(spec(extra_arguments=extra), pages=PAGES)
    assert flag(command, "--seed") == "7"


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0"])
def test_opens_the_token_routes_where_the_version_keeps_them_shut(version: str) -> None:
    vllm = capabilities(version)
    command = dedicated(spec(vllm=vllm), weights=WEIGHTS)
    if vllm.token_routes_flag is not None:
        assert vllm.token_routes_flag in command.arguments
    assert None not in command.arguments
