"""Production and guest of one small model on one GPU: the tests of the two on CPUs, and what only
a GPU has. Needs vLLM beside RoseMux."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from coserve.guest.gpus import gpus
from coserve.guest.launch_lock import LaunchLock
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec, GpuShare
from harvester.contracts.errors import Unsupported
from harvester.contracts.page import GrantMode
from tests.integration.engine_slot import GPU_SHARE, EngineSlot, completed
from tests.integration.test_guest_engine import (
    slot,
    test_a_raised_epoch_ends_the_turns_of_the_one_before,
    test_a_stale_epoch_is_refused,
    test_after_the_grace_every_request_ends_with_what_it_has,
    test_requests_wait_while_the_agent_keeps_the_gate_closed,
    test_with_a_grant_it_generates_tokens_with_their_logprobs,
    test_without_its_agent_it_takes_no_step_and_goes_on_when_one_is_back,
)
from tests.integration.test_guest_weights import (
    test_versions_pass_a_closed_gate_and_a_waiting_turn_samples_with_the_newest,
)

__all__ = [
    "slot",
    "test_a_raised_epoch_ends_the_turns_of_the_one_before",
    "test_a_stale_epoch_is_refused",
    "test_after_the_grace_every_request_ends_with_what_it_has",
    "test_requests_wait_while_the_agent_keeps_the_gate_closed",
    "test_versions_pass_a_closed_gate_and_a_waiting_turn_samples_with_the_newest",
    "test_with_a_grant_it_generates_tokens_with_their_logprobs",
    "test_without_its_agent_it_takes_no_step_and_goes_on_when_one_is_back",
]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

MIB = 1 << 20


async def test_the_guest_says_what_it_holds_on_its_gpu(engine_slot: EngineSlot) -> None:
    await engine_slot.guest_becomes(lambda guest: guest.memory.weights_bytes, "it has reported")
    memory = engine_slot.guest().memory
    assert 0 < memory.kv_bytes <= GPU_SHARE.kv_cache_bytes
    assert memory.kv_bytes > GPU_SHARE.kv_cache_bytes - 16 * MIB
    assert memory.graphs_bytes == 0, "it is eager"
    assert memory.whole, "NVML does not list the worker by its process id"
    assert memory.other_bytes > 32 * MIB, "CUDA's context"


def test_the_guest_started_under_the_launch_lock_and_released_it(engine_slot: EngineSlot) -> None:
    locks = Path(engine_slot.pages.path).parent
    (gpu,) = gpus()
    holder = int((locks / f"{gpu.uuid}.launch").read_text())
    assert holder in {process.pid for process in engine_slot.guest_child.tree()}
    again = LaunchLock(locks, [gpu.uuid])
    again.acquire(timeout_s=1.0)
    again.release()


async def test_production_serves_while_the_guest_s_gate_is_closed(engine_slot: EngineSlot) -> None:
    engine_slot.agent.raise_epoch()
    engine_slot.agent.say(GrantMode.CLOSED)
    steps = engine_slot.pulse().steps_total
    assert await completed(engine_slot.production_url, "production", 16) == 16
    assert engine_slot.pulse().steps_total > steps


def test_sleep_is_refused_where_this_vllm_could_not_follow_versions(tmp_path: Path) -> None:
    vllm = capabilities(installed_vllm_version())
    spec = EngineSpec(
        name="guest", model=tmp_path, port=8001, max_model_len=64, max_num_seqs=1, vllm=vllm,
        gpu=GpuShare(kv_cache_bytes=64 * MIB, sleeps=True),
    )  # fmt: skip
    if vllm.kv_memory_release:
        command = launch.guest(spec, pages=tmp_path, weights=tmp_path)
        assert "--enable-sleep-mode" in command.arguments
        return
    with pytest.raises(Unsupported, match=r"use 0\.31 or later"):
        launch.guest(spec, pages=tmp_path, weights=tmp_path)
