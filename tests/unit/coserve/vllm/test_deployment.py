"""Deployments beside which no guest may run, from configurations with vLLM's fields."""

from types import SimpleNamespace
from typing import Any

import pytest

from coserve.vllm.pulse_reporter import unfit_deployment

ALONE = {
    "nnodes": 1,
    "distributed_executor_backend": "mp",
    "data_parallel_backend": "mp",
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
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
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


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
        (config(transfer("LMCacheConnectorV1", "kv_producer")), "LMCacheConnectorV1", "own host"),
        (config(transfer("HF3FSKVConnector", "kv_producer")), "HF3FSKVConnector", "own host"),
        (config(transfer("MooncakeStoreConnector", "kv_producer")), "MooncakeStore", "own host"),
        (config(transfer("LMCacheConnectorV1", "kv_both")), "LMCacheConnectorV1", "own host"),
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
