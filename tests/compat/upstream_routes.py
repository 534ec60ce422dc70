"""Routes that gateway and agent call on an engine over HTTP: rows of the upstream table."""

from collections.abc import Callable

from tests.compat.symbol import Symbol, Use, always
from tests.compat.upstream_versions import UpstreamVersion

_RL_ROUTES = (
    "vllm.entrypoints.serve.dev.rlhf.api_router",
    "vllm.entrypoints.rl.online.api_router",
)
_TOKEN_ROUTES = (
    "vllm.entrypoints.serve.disagg.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
)


def _rl_route(
    path: str, method: str = "post", when: Callable[[UpstreamVersion], bool] = always
) -> list[Symbol]:
    def is_in(module: str) -> Callable[[UpstreamVersion], bool]:
        return lambda table: table.rl_routes_module == module and when(table)

    return [Symbol(Use.ROUTE, module, path, (method,), is_in(module)) for module in _RL_ROUTES]


def _token_route(module: str) -> list[Symbol]:
    def is_there(table: UpstreamVersion) -> bool:
        return table.token_routes_module == module

    protocol = module.replace("api_router", "protocol")
    return [
        Symbol(Use.ROUTE, module, "/inference/v1/generate", ("post",), is_there),
        Symbol(Use.READ, protocol, "GenerateRequest.cache_salt", when=is_there),
    ]


ROUTES: tuple[Symbol, ...] = (
    *_rl_route("/pause"),
    *_rl_route("/resume"),
    *_rl_route("/is_paused", "get"),
    *_rl_route("/init_weight_transfer_engine"),
    *_rl_route("/start_weight_update"),
    *_rl_route("/update_weights"),
    *_rl_route("/finish_weight_update"),
    *_rl_route("/abort_requests", when=lambda table: table.abort_route),
    *_rl_route("/update_weight_version", when=lambda table: table.weight_version_api),
    *_rl_route("/weight_info", "get", lambda table: table.weight_version_api),
    Symbol(
        Use.ROUTE,
        _RL_ROUTES[1],
        "/weight_checker",
        ("post",),
        lambda table: table.weight_checker,
    ),
    *(symbol for module in _TOKEN_ROUTES for symbol in _token_route(module)),
    Symbol(
        Use.READ,
        "vllm.outputs",
        "WeightVersionSpan",
        when=lambda table: table.weight_version_spans,
    ),
    Symbol(Use.ROUTE, "vllm.entrypoints.serve.dev.rpc.api_router", "/collective_rpc", ("post",)),
    Symbol(
        Use.ROUTE, "vllm.entrypoints.serve.dev.cache.api_router", "/reset_prefix_cache", ("post",)
    ),
    Symbol(
        Use.ROUTE,
        "vllm.entrypoints.serve.dev.sleep.api_router",
        "/release_kv_cache_memory",
        ("post",),
        lambda table: table.capabilities.kv_memory_release,
    ),
    Symbol(Use.ROUTE, "vllm.entrypoints.serve.instrumentator.health", "/health", ("get",)),
)
"""Routes that gateway and agent call on an engine over HTTP."""
