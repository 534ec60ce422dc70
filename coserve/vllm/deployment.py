"""Deployments of production beside which no guest may run, from the engine's own configuration.

The slack law knows one machine: pulses in one directory, steps that begin when a request is there.
Where a rank waits for other machines, a guest step on one of them delays all, unseen by its gate.
"""

from collections.abc import Iterator
from typing import Any

_REMOTE_CONNECTORS = ("Nixl", "Mooncake", "MoRIIO", "P2pNccl")
"""Beginnings of the names of vLLM's connectors over which KV arrives from another engine."""


def unfit_deployment(vllm_config: Any) -> str:
    """Why no guest may run beside this engine, and the remedy; "" if one may."""
    parallel = vllm_config.parallel_config
    ranks = parallel.data_parallel_size
    if parallel.nnodes > 1:
        return f"a replica over {parallel.nnodes} nodes; harvest replicas of one node"
    if parallel.distributed_executor_backend == "ray":
        return "Ray may place its ranks on other nodes; start it with the executor backend mp"
    if parallel.data_parallel_backend == "ray" and ranks > 1:
        return "Ray may place its data-parallel ranks on other nodes; take the backend mp"
    if vllm_config.model_config.is_moe and ranks > parallel.data_parallel_size_local:
        # Steps of such ranks are one forward pass each, with expert parallelism or without.
        return (
            f"a mixture of experts over {ranks} ranks, of which this API server has "
            f"{parallel.data_parallel_size_local}: all wait for each; harvest replicas whose ranks "
            "one API server of one node has"
        )
    for connector, role in _connectors(vllm_config.kv_transfer_config):
        remote = connector.startswith(_REMOTE_CONNECTORS) and role == "kv_both"
        if role == "kv_consumer" or remote:
            return (
                f"its requests wait for KV of another engine ({connector}, {role}); harvest "
                "prefill engines (kv_producer), or engines that take no KV from others"
            )
    return ""


def _connectors(transfer: Any) -> Iterator[tuple[str, str]]:
    """Name and role of each connector; a MultiConnector's own are in its extra configuration."""
    if transfer is None or transfer.kv_connector is None:
        return
    yield transfer.kv_connector, transfer.kv_role
    for each in transfer.kv_connector_extra_config.get("connectors", ()):
        yield each.get("kv_connector", ""), each.get("kv_role", transfer.kv_role)
