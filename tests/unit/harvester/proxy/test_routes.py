"""The engine proxy's table: routes that the gateway uses, each for its role, and no other."""

import json

import pytest

from harvester.contracts.errors import PeerProtocolError
from harvester.proxy.routes import ROUTES, CallerRole, EngineRoute, Refused, route_for, worker_call


def status(method: str, path: str, role: CallerRole | None, *parameters: str) -> int:
    found = route_for(method, path, parameters, role=role)
    return found.status if isinstance(found, Refused) else 200


def test_each_route_is_for_its_role() -> None:
    for (method, path), route in ROUTES.items():
        assert status(method, path, CallerRole.CONTROL) == 200
        assert status(method, path, CallerRole.DATA) == (
            200 if route.role is CallerRole.DATA else 403
        )
        assert status(method, path, None) == 401


def test_routes_that_change_weights_or_stop_an_engine_are_for_control() -> None:
    reading = {
        "/inference/v1/generate", "/health", "/version", "/v1/models", "/rosemux/engine",
        "/metrics", "/metrics/", "/tokenize", "/detokenize", "/collective_rpc",
        *(f"/v1/{kind}completions/{way}render" for kind in ("", "chat/") for way in ("", "de")),
    }  # fmt: skip
    assert {path for (_, path), route in ROUTES.items() if route.role is CallerRole.DATA} == reading


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/server_info"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/start_profile"),
        ("POST", "/scale_elastic_ep"),
        ("GET", "/inference/v1/generate"),
        ("POST", "/health"),
        ("GET", "/docs"),
        ("POST", "/pause/"),
        ("POST", "//pause"),
        ("POST", "/v1/../pause"),
        ("POST", "/PAUSE"),
        ("HEAD", "/health"),
    ],
)
def test_any_other_route_is_unknown_to_every_role(method: str, path: str) -> None:
    assert {status(method, path, role) for role in CallerRole} == {404}


def test_a_route_takes_its_own_parameters_alone() -> None:
    assert status("POST", "/pause", CallerRole.CONTROL, "mode") == 200
    assert status("POST", "/pause", CallerRole.CONTROL, "mode", "clear_cache") == 400
    assert status("GET", "/metrics/", CallerRole.DATA, "name[]") == 200
    assert status("POST", "/resume", CallerRole.CONTROL, "mode") == 400
    assert isinstance(route_for("POST", "/pause", ("mode",), role=CallerRole.CONTROL), EngineRoute)


@pytest.mark.parametrize(
    "call",
    [
        {"method": "rosemux_weights"},
        {"method": "rosemux_stage", "kwargs": {"store": "s", "version": 3}},
    ],
)
def test_workers_report_their_weights_or_stage_a_version(call: dict[str, object]) -> None:
    passed = worker_call(json.dumps(call).encode(), role=CallerRole.CONTROL)
    assert json.loads(passed) == call


def test_a_caller_for_data_may_ask_for_the_weights_and_no_more() -> None:
    assert worker_call(b'{"method": "rosemux_weights"}', role=CallerRole.DATA) == (
        b'{"method":"rosemux_weights"}'
    )
    staging = b'{"method": "rosemux_stage"}'
    for call in (staging, b'{"method": "rosemux_weights", "kwargs": {"a": 1}}'):
        refused = worker_call(call, role=CallerRole.DATA)
        assert isinstance(refused, Refused)
        assert refused.status == 403


@pytest.mark.parametrize(
    "body",
    [
        b'{"method": "load_model"}',
        b'{"method": "rosemux_weights", "method": "shutdown"}',
        b'{"method": "rosemux_weights", "args": [1]}',
        b'{"method": "rosemux_weights", "timeout": 1e9}',
        b'{"method": ["rosemux_weights"]}',
        b"[]",
        b"",
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_any_other_worker_call_is_refused(body: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="/collective_rpc"):
        worker_call(body, role=CallerRole.CONTROL)
