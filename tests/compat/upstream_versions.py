"""Names of the upstream table that each supported vLLM version has.

One entry per version, each written as its difference from the previous one, so that the file reads
as the history of upstream's changes. Every entry is checked against the wheel of its version by
`make compat`. Flags that the packages or the benchmarks read are in coserve/vllm/capabilities.py.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from coserve.vllm.capabilities import Capabilities, capabilities


class WeightEngineApi(StrEnum):
    """The shape of upstream's `WeightTransferEngine`, the base class of a weight backend."""

    LOADER = "loader"
    """`__init__(config, parallel_config, model)`; `receive_weights` is handed a loader, and the
    worker does the rest of an update: weightsync/vllm/loader_engine.py takes that over."""

    WORKER = "worker"
    """`__init__(config, vllm_config, device, model)`; the engine has its own start and finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamVersion:
    version: str
    torch_version: str
    """The torch that this version pins, without a build suffix."""

    weight_engine_api: WeightEngineApi
    weight_engine_sends: bool
    """The engine class must also define `trainer_send_weights`, which is abstract until 0.27."""

    rl_routes_module: str
    """Module that defines `/pause`, `/resume`, `/update_weights` and related routes."""

    token_routes_module: str
    """Module that defines `/inference/v1/generate` (ids in, ids out)."""

    plain_weight_flag: str | None = None
    """Attribute of a linear layer that keeps its CPU weight unpacked; None: packing is fixed."""

    sleep_backends: bool = False
    endpoint_plugins: bool = False
    weight_sync_client: bool = False
    draft_weight_updates: bool = False
    """An update of a speculative draft model begins with a separate call."""

    abort_route: bool = False
    """`/abort_requests` is among the RL routes (before, only beside the token routes)."""

    weight_version_api: bool = False
    """`/update_weight_version`, `/weight_info`, and a version given to `finish_weight_update`."""

    preempt_drops_output: bool = False
    """A preemption can discard the output of steps that are still in flight."""

    request_counts_published: bool = False
    """The engine loop publishes its request counts by itself before and after a step."""

    skipped_waiting_queue: bool
    """Requests passed over by a step wait in a separate queue; gone from 0.31."""

    weight_version_spans: bool = False
    weight_checker: bool = False

    @property
    def capabilities(self) -> Capabilities:
        return capabilities(self.version)


_0_24_0 = UpstreamVersion(
    version="0.24.0",
    torch_version="2.11.0",
    weight_engine_api=WeightEngineApi.LOADER,
    weight_engine_sends=True,
    rl_routes_module="vllm.entrypoints.serve.dev.rlhf.api_router",
    token_routes_module="vllm.entrypoints.serve.disagg.api_router",
    skipped_waiting_queue=True,
)
_0_25_0 = replace(
    _0_24_0,
    version="0.25.0",
    weight_engine_api=WeightEngineApi.WORKER,
    token_routes_module="vllm.entrypoints.scale_out.token_in_token_out.api_router",
    sleep_backends=True,
)
_0_25_1 = replace(_0_25_0, version="0.25.1")
_0_26_0 = replace(
    _0_25_1,
    version="0.26.0",
    endpoint_plugins=True,
    weight_sync_client=True,
    draft_weight_updates=True,
    abort_route=True,
)
_0_27_0 = replace(
    _0_26_0,
    version="0.27.0",
    torch_version="2.13.0",
    weight_version_api=True,
    preempt_drops_output=True,
    request_counts_published=True,
)
_0_27_1 = replace(_0_27_0, version="0.27.1")
_0_28_0 = replace(_0_27_1, version="0.28.0", weight_engine_sends=False)
_0_29_0 = replace(_0_28_0, version="0.29.0", plain_weight_flag="_cpu_skip_gemm_dispatch")
_0_30_0 = replace(_0_29_0, version="0.30.0", plain_weight_flag="skip_weight_relayout")
_0_31_0 = replace(
    _0_30_0,
    version="0.31.0",
    plain_weight_flag="_cpu_skip_gemm_dispatch",
    skipped_waiting_queue=False,
)
_0_32_0 = replace(
    _0_31_0,
    version="0.32.0",
    rl_routes_module="vllm.entrypoints.rl.online.api_router",
    weight_version_spans=True,
    weight_checker=True,
)
_0_33_0 = replace(_0_32_0, version="0.33.0", torch_version="2.14.0")

UPSTREAM_VERSIONS: dict[str, UpstreamVersion] = {
    table.version: table
    for table in (
        _0_24_0,
        _0_25_0,
        _0_25_1,
        _0_26_0,
        _0_27_0,
        _0_27_1,
        _0_28_0,
        _0_29_0,
        _0_30_0,
        _0_31_0,
        _0_32_0,
        _0_33_0,
    )
}
"""Every supported version, oldest first."""
