"""The plan shown to an operator before a guest starts, without substitutes for refused choices."""

from dataclasses import replace
from pathlib import Path

import pytest

from coserve.guest import isolation
from coserve.guest.gpus import ComputeMode, Gpu
from coserve.guest.isolation import MpsShare
from coserve.vllm import kv_shared
from coserve.vllm.capabilities import capabilities
from coserve.vllm.guest_plan import GuestSettings, MemoryPlacement, PlanOption, plan, plan_options
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.platform.kv_segment import KVCACHED_VERSION
from tests.mps_daemon import MpsDaemon

NEWEST, WITH_KVCACHED = capabilities("0.32.0"), capabilities("0.30.0")
GIB = 1 << 30
CPU = GuestSettings(kv_cache_bytes=2 * GIB)
GPU = replace(CPU, gpus=(Gpu("GPU-1", ComputeMode.DEFAULT), Gpu("GPU-2", ComputeMode.DEFAULT)))


@pytest.fixture
def daemon(tmp_path: Path) -> MpsDaemon:
    return MpsDaemon(tmp_path)


@pytest.fixture
def with_kvcached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_shared.metadata, "version", lambda name: KVCACHED_VERSION)


def of(choice: str, said: tuple[PlanOption, ...]) -> PlanOption:
    return next(one for one in said if one.choice == choice)


def taken(said: tuple[PlanOption, ...]) -> list[str]:
    return [one.choice for one in said if one.taken]


def test_without_consent_a_gpu_is_shared_by_turns_and_memory_is_static() -> None:
    said, chosen = plan_options(GPU, NEWEST), plan(GPU, NEWEST)
    assert taken(said) == ["time-slicing", "static"]
    assert (chosen.isolation.backend, chosen.memory) == (
        IsolationBackend.TIME_SLICING,
        MemoryPlacement.STATIC,
    )
    assert chosen.gpu is not None
    assert (chosen.gpu.devices, chosen.gpu.kv_cache_bytes) == (("GPU-1", "GPU-2"), 2 * GIB)
    assert not chosen.gpu.shared_kv
    assert not chosen.gpu.sleeps
    for choice in ("mps", "shared"):
        assert not of(choice, said).possible
        assert "consent" in of(choice, said).why
    assert of("weights leave", said).possible
    assert not of("weights leave", said).taken


def test_without_a_gpu_threads_are_idle_and_pages_come_back() -> None:
    said, chosen = plan_options(CPU, NEWEST), plan(CPU, NEWEST)
    assert taken(said) == [isolation.choose().backend, "pages"]
    assert (chosen.gpu, chosen.kv_cache_gib) == (None, 2)
    assert "NVIDIA" in of("time-slicing", said).why
    with pytest.raises(ConfigError, match="at least one"):
        plan(replace(CPU, kv_cache_bytes=GIB - 1), NEWEST)
    assert plan(replace(CPU, memory_bytes=2 * GIB), NEWEST).kv_cache_gib == 2
    small = replace(CPU, memory_bytes=2 * GIB - 1)
    assert not of("pages", plan_options(small, NEWEST)).possible
    with pytest.raises(ConfigError, match=r"2.00 GiB of KV do not fit into the 2.00 GiB"):
        plan(small, NEWEST)
    assert plan(replace(GPU, memory_bytes=1), NEWEST).gpu is not None


def test_mps_needs_consent_and_a_request(daemon: MpsDaemon) -> None:
    agreed = replace(GPU, mps=MpsShare(daemon.control))
    assert of("mps", plan_options(agreed, NEWEST)).possible
    assert taken(plan_options(agreed, NEWEST))[0] == "time-slicing", "consent is no choice"
    asked = replace(agreed, isolation=IsolationBackend.MPS)
    assert taken(plan_options(asked, NEWEST))[0] == "mps"
    assert "fault of the guest ends production" in of("mps", plan_options(asked, NEWEST)).why
    assert not plan(asked, NEWEST).isolation.fault_isolated
    with pytest.raises(ConfigError, match="consent"):
        plan(replace(asked, mps=None), NEWEST)


def test_an_impossible_request_is_reported_and_not_replaced(
    daemon: MpsDaemon,
) -> None:
    daemon.stop()
    asked = replace(GPU, mps=MpsShare(daemon.control), isolation=IsolationBackend.MPS)
    said = plan_options(asked, NEWEST)
    assert "no MPS daemon answers" in of("mps", said).why
    assert taken(said) == ["static"]
    with pytest.raises(Unsupported, match="no MPS daemon answers"):
        plan(asked, NEWEST)


def test_kv_is_shared_by_consent_where_kvcached_knows_this_vllm(with_kvcached: None) -> None:
    agreed = replace(GPU, shared_kv="guest_kv")
    assert taken(plan_options(agreed, WITH_KVCACHED)) == ["time-slicing", "shared"]
    shared = plan(agreed, WITH_KVCACHED).gpu
    assert shared is not None
    assert shared.shared_kv == "guest_kv"
    said = plan_options(agreed, NEWEST)
    assert r"up to 0.30.0, this is 0.32.0" in of("shared", said).why
    assert not of("static", said).taken, "production maps its pages out of one budget"
    with pytest.raises(Unsupported, match=r"0\.32\.0"):
        plan(agreed, NEWEST)
    with pytest.raises(Unsupported, match="NVIDIA"):
        plan(replace(CPU, shared_kv="guest_kv"), WITH_KVCACHED)


def test_kvcached_that_is_not_installed_is_missed_before_anything_starts() -> None:
    with pytest.raises(Unsupported, match="kvcached"):
        plan(replace(GPU, shared_kv="guest_kv"), WITH_KVCACHED)


def test_weights_leave_where_they_can_follow_versions(with_kvcached: None) -> None:
    asked = replace(GPU, sleeps=True)
    chosen = plan(asked, NEWEST).gpu
    assert chosen is not None
    assert chosen.sleeps
    assert of("weights leave", plan_options(asked, NEWEST)).taken
    assert "use 0.31 or later" in of("weights leave", plan_options(asked, WITH_KVCACHED)).why
    with pytest.raises(Unsupported, match=r"0\.30\.0"):
        plan(asked, WITH_KVCACHED)
    with pytest.raises(ConfigError, match="choose one"):
        plan(replace(asked, shared_kv="guest_kv"), WITH_KVCACHED)
    with pytest.raises(Unsupported, match="CPU"):
        plan(replace(CPU, sleeps=True), NEWEST)
