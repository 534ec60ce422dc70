"""Deployments beside which no guest may run, and guests that may not, from configurations with
vLLM's fields."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.vllm.guest_start import unfit_guest
from coserve.vllm.pulse_reporter import unfit_deployment

ALONE = {
    "nnodes": 1,
    "distributed_executor_backend": "mp",
    "data_parallel_backend": "mp",
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "data_parallel_index": 0,
}


def config(transfer: Any = None, *, experts: bool = False, **parallel: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=experts),
        parallel_config=SimpleNamespace(**(ALONE | parallel)),
        kv_transfer_config=transfer,
    )


def transfer(
    connector: str | None, role: str | None, *, module: str | None = None, **extra: Any
) -> Any:
    return SimpleNamespace(
        kv_connector=connector,
        kv_role=role,
        kv_connector_module_path=module,
        kv_connector_extra_config=extra,
    )


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """A MultiConnector's entry in the list of another."""
    extra = {"connectors": connectors}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


LOCAL = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
LMCACHE = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"lmcache.enable_p2p": True},
}


@pytest.fixture(autouse=True)
def _no_settings_of_lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "fitting",
    [
        config(),
        config(distributed_executor_backend="uni"),
        config(distributed_executor_backend=None),
        config(data_parallel_size=4, data_parallel_size_local=2),
        config(data_parallel_size=4, data_parallel_size_local=4, experts=True),
        config(transfer(None, None)),
        config(transfer("NixlConnector", "kv_producer")),
        config(transfer("OffloadingConnector", "kv_both")),
        config(transfer("OffloadingConnector", "kv_both", spec_name="CPUOffloadingSpec")),
        config(transfer("SimpleCPUOffloadConnector", "kv_both", kv_offload_backend="disk")),
        config(transfer("HiSparseConnector", "kv_both", host_pool_gib=64)),
        config(transfer("MooncakeConnector", "kv_producer")),
        config(transfer("MultiConnector", "kv_both", connectors=[LOCAL, several(LOCAL)])),
    ],
)
def test_engines_of_one_machine_that_make_their_own_kv_fit(fitting: Any) -> None:
    assert unfit_deployment(fitting) == ""


WIDE = {"data_parallel_size": 16, "data_parallel_size_local": 8}


@pytest.mark.parametrize(
    ("unfit", "reason", "remedy"),
    [
        (config(nnodes=2), "over 2 nodes", "one node"),
        (config(distributed_executor_backend="ray"), "backend ray", "mp"),
        (config(distributed_executor_backend="vllm.RayExecutor"), "vllm.RayExecutor", "mp"),
        (config(data_parallel_backend="ray", data_parallel_size=2), "Ray", "mp"),
        (config(experts=True, **WIDE), "over 16 ranks", "one API server"),
        (config(transfer("LMCacheConnectorV1", "kv_consumer")), "wait for KV", "kv_producer"),
        (config(transfer("OffloadingConnector", "kv_consumer")), "wait for KV", "kv_producer"),
        (config(transfer("NixlPullConnector", "kv_both")), "NixlPullConnector", "kv_producer"),
        (config(transfer("HF3FSKVConnector", "kv_producer")), "HF3FSKVConnector", "own host"),
        (config(transfer("MooncakeStoreConnector", "kv_producer")), "MooncakeStore", "own host"),
        (
            config(
                transfer("LMCacheConnectorV1", "kv_both", **{"lmcache.remote_url": "redis://h"})
            ),
            "LMCacheConnectorV1 with remote_url",
            "LMCache's CPU and disk",
        ),
        (
            config(transfer("LMCacheConnectorV1", "kv_both", module="house.kv")),
            "LMCacheConnectorV1",
            "own host",
        ),
        (config(transfer("LMCacheMPConnector", "kv_both")), "LMCacheMPConnector", "own host"),
        (config(transfer("HouseConnector", "kv_both", module="house.kv")), "House", "own host"),
        (
            config(transfer("OffloadingConnector", "kv_both", module="house.kv")),
            "OffloadingConnector",
            "own host",
        ),
        (
            config(transfer("OffloadingConnector", "kv_both", spec_name="TieringOffloadingSpec")),
            "TieringOffloadingSpec",
            "own host",
        ),
        (
            config(transfer("MultiConnector", "kv_both", connectors=[LOCAL, several(LMCACHE)])),
            "LMCacheConnectorV1",
            "own host",
        ),
        (
            config(
                transfer(
                    "MultiConnector",
                    "kv_both",
                    connectors=[LOCAL, {"kv_connector": "MooncakeConnector"}],
                )
            ),
            "MooncakeConnector",
            "kv_producer",
        ),
    ],
)
def test_an_engine_that_waits_for_other_machines_is_refused_with_a_remedy(
    unfit: Any, reason: str, remedy: str
) -> None:
    found = unfit_deployment(unfit)
    assert reason in found
    assert remedy in found


@pytest.mark.parametrize("backend", [None, "mp", "uni"])
def test_a_guest_whose_workers_descend_from_it_fits(backend: str | None) -> None:
    shape = config(distributed_executor_backend=backend).parallel_config
    assert unfit_guest(shape) == ""


@pytest.mark.parametrize(
    ("shape", "reason", "remedy"),
    [
        ({"nnodes": 2}, "ranks are on 2 nodes", "production's node"),
        ({"distributed_executor_backend": "ray"}, "backend ray", "leave out"),
        ({"distributed_executor_backend": "house.Executor"}, "house.Executor", "leave out"),
        ({"data_parallel_size": 2}, "data-parallel", "one rank"),
        ({"data_parallel_index": 1}, "data-parallel", "one rank"),
    ],
)
def test_a_guest_with_ranks_that_its_gate_or_isolation_does_not_hold_is_refused(
    shape: dict[str, Any], reason: str, remedy: str
) -> None:
    found = unfit_guest(config(**shape).parallel_config)
    assert reason in found
    assert remedy in found


ALIASES = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
LAUGHS = f"chunk_size: [&a0 [x, x], {ALIASES}]\nhouse: *a11\n"
"""Aliases of aliases: the text of `house` would have 9^11 words."""

LOCAL_FILE = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 40.0
local_disk: file:///var/cache/kv/
max_local_disk_size: 200
remote_url: null
enable_p2p: false
"""


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize(
    ("extra", "environment", "file"),
    [
        ({}, {}, None),
        ({"lmcache.local_cpu": True, "use_native": True}, {}, None),
        ({}, {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_REMOTE_URL": ""}, None),
        ({}, {"LMCACHE_ENABLE_P2P": "False", "LMCACHE_LOG_LEVEL": "INFO"}, None),
        ({}, {}, LOCAL_FILE),
        ({}, {}, ""),
    ],
)
def test_lmcache_whose_every_setting_keeps_kv_on_this_host_fits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    role: str,
    extra: dict[str, Any],
    environment: dict[str, str],
    file: str | None,
) -> None:
    set_up(monkeypatch, tmp_path, environment, file)
    assert unfit_deployment(config(transfer("LMCacheConnectorV1", role, **extra))) == ""
    nested = {**LMCACHE, "kv_connector_extra_config": extra}
    several_of_them = transfer("MultiConnector", "kv_both", connectors=[LOCAL, nested])
    assert unfit_deployment(config(several_of_them)) == ""


@pytest.mark.parametrize(
    ("environment", "file", "reason"),
    [
        ({"LMCACHE_REMOTE_URL": "lm://cache:65432"}, None, "remote_url"),
        ({"LMCACHE_REMOTE_URL": "lm://cache:65432"}, LOCAL_FILE, "remote_url"),
        ({"LMCACHE_REMOTE_CONFIG_URL": "http://h"}, None, "remote_config_url"),
        ({"LMCACHE_SETTING_OF_TOMORROW": "1"}, None, "setting_of_tomorrow"),
        ({}, LOCAL_FILE + "storage_plugins: [house]\n", "storage_plugins"),
        ({}, LOCAL_FILE + "extra_config: {enable_nixl_storage: true}\n", "extra_config"),
        ({}, "- no mapping", "cannot be read"),
        ({}, "a: [", "cannot be read"),
        ({"LMCACHE_CONFIG_FILE": "/no/such/file"}, None, "cannot be read"),
        ({"LMCACHE_CONFIG_FILE": "/dev/zero"}, None, "cannot be read"),
        ({}, f"# {'x' * (1 << 17)}", "cannot be read"),
        ({}, LAUGHS, "house"),
    ],
)
def test_lmcache_with_any_other_setting_is_refused_and_the_setting_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    file: str | None,
    reason: str,
) -> None:
    set_up(monkeypatch, tmp_path, environment, file)
    found = unfit_deployment(config(transfer("LMCacheConnectorV1", "kv_both")))
    assert reason in found


def test_a_pipe_for_lmcache_holds_production_up_as_little_as_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(writer, LOCAL_FILE.encode())
    found = unfit_deployment(config(transfer("LMCacheConnectorV1", "kv_both")))
    assert "cannot be read" in found
    assert os.read(writer, 4096) == LOCAL_FILE.encode(), "it is still there for LMCache"
    os.close(writer)


def set_up(
    monkeypatch: pytest.MonkeyPatch, folder: Path, environment: dict[str, str], file: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if file is not None:
        (folder / "lmcache.yaml").write_text(file)
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(folder / "lmcache.yaml"))
