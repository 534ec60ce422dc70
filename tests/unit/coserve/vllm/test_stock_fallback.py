"""A fault of RoseMux in a production process leaves a stock vLLM; a guest does not start."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coserve.vllm import plugin, pulse_reporter
from coserve.vllm.middleware import EpochMiddleware, PulseMiddleware, Receive, Scope, Send
from harvester.contracts import stock_fallback
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.page import PageDirectory
from harvester.contracts.stock_fallback import guarded
from weightsync.vllm import plugin as weights_plugin

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

Environment = dict[str, str | None]
BAD: dict[str, Environment] = {
    "a misspelt role": {"ROSEMUX_ROLE": "prodution"},
    "a role in capitals": {"ROSEMUX_ROLE": "Production"},
    "an engine name that no file can bear": {"ROSEMUX_ENGINE": "qwen/2.5"},
    "an engine name of nothing": {"ROSEMUX_ENGINE": ""},
    "no page directory": {"ROSEMUX_PAGE_DIR": None},
    "an empty page directory": {"ROSEMUX_PAGE_DIR": ""},
    "an unknown isolation": {"ROSEMUX_ISOLATION": "green-contexts"},
    "MPS without its pipe": {"ROSEMUX_ISOLATION": "mps", "CUDA_MPS_PIPE_DIRECTORY": None},
}


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh production process, with every variable valid."""
    monkeypatch.setattr(pulse_reporter, "_reporter", None)
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(weights_plugin, "_registered", True)
    monkeypatch.setattr(stock_fallback, "_reported", set())
    for name, value in {
        "ROSEMUX_ROLE": "production",
        "ROSEMUX_ENGINE": "prod",
        "ROSEMUX_PAGE_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)


def change(monkeypatch: pytest.MonkeyPatch, environment: Environment) -> None:
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


async def served_by(middleware: Any) -> bool:
    """Whether a request reaches the app and its reply the client."""
    replies: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        replies.append(message["status"])

    await middleware(app)(SCOPE, receive, send)
    return replies == [200]


@pytest.mark.parametrize("environment", BAD.values(), ids=BAD)
async def test_a_typo_leaves_production_as_stock_and_says_so_once(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(monkeypatch, environment)
    plugin.register()
    weights_plugin.register()
    assert await served_by(PulseMiddleware)
    assert await served_by(PulseMiddleware)
    assert not plugin._registered
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "vLLM serves as stock: ConfigError: ROSEMUX_" in line.getMessage()
    assert line.exc_info is None, "one line"


@pytest.mark.parametrize("environment", BAD.values(), ids=BAD)
def test_with_the_same_typo_no_guest_starts(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the role itself is invalid, the components that only a guest loads refuse."""
    monkeypatch.setenv("ROSEMUX_ROLE", "guest")
    change(monkeypatch, environment)
    with pytest.raises(ConfigError):
        EpochMiddleware(None)  # type: ignore[arg-type]
    if environment.get("ROSEMUX_ROLE") is None:
        with pytest.raises(ConfigError):
            plugin.register()


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of ours")


@pytest.mark.parametrize(
    "part", ["PulseReporter", "PageDirectory", "threading.Thread.start", "slot_environment"]
)
async def test_an_error_of_ours_at_the_start_leaves_production_as_stock(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"coserve.vllm.pulse_reporter.{part}", broken)
    assert await served_by(PulseMiddleware)
    assert "vLLM serves as stock: RuntimeError: of ours" in caplog.text


@pytest.mark.parametrize(
    ("module", "part"),
    [(plugin, "slot_environment"), (weights_plugin.importlib.util, "find_spec")],
)
def test_an_error_of_ours_in_a_plugin_stops_a_guest_alone(
    module: Any, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_plugin, "_registered", False)
    monkeypatch.setattr(module, part, broken)
    register = plugin.register if module is plugin else weights_plugin.register
    register()
    assert "serves as stock" in caplog.text
    monkeypatch.setattr(weights_plugin, "_registered", False)
    monkeypatch.setenv("ROSEMUX_ROLE", "guest")
    with pytest.raises(RuntimeError):
        register()


def test_an_unsupported_vllm_serves_production_and_no_guest(
    monkeypatch: pytest.MonkeyPatch, set_role: Callable[[str, Path], None], tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "installed_vllm_version", lambda: "9.9.9")
    plugin.register()
    set_role("guest", tmp_path)
    with pytest.raises(Unsupported, match=r"9\.9\.9"):
        plugin.register()


@pytest.mark.parametrize("mode", [0o500, None], ids=["not writable", "missing"])
async def test_without_a_page_production_serves_and_goes_on_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError("pulse.prod.0")

    pages = tmp_path / "pages"
    if mode is not None:
        pages.mkdir(mode=mode)
        # Root may write anywhere.
        monkeypatch.setattr(PageDirectory, "pulse_writer", refused)
    monkeypatch.setenv("ROSEMUX_PAGE_DIR", str(pages))
    assert await served_by(PulseMiddleware)


def test_a_foreign_error_passes() -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(stopped)
    assert guarded(lambda: 7) == 7


@pytest.mark.parametrize("broken_module", ["msgspec", "numpy", "harvester.contracts.page"])
def test_a_broken_installation_is_a_fault_like_others(broken_module: str) -> None:
    """vLLM imports the module that `--middleware` names without a guard."""
    look = (
        f"import sys; sys.modules[{broken_module!r}] = None\n"
        "from coserve.vllm.middleware import PulseMiddleware\n"
        "async def app(scope, receive, send): print('served')\n"
        "import asyncio\n"
        "scope = {'type': 'http', 'method': 'POST', 'path': '/v1/completions', 'headers': []}\n"
        "asyncio.run(PulseMiddleware(app)(scope, None, None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "served\n", done.stderr
    assert "vLLM serves as stock: ModuleNotFoundError" in done.stderr
