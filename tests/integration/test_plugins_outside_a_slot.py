"""RoseMux beside a vLLM that belongs to no slot: its plugins are loaded and do nothing."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

LOOK = """
import asyncio, json, threading
from importlib.metadata import entry_points
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.plugins import load_general_plugins
from vllm.v1.engine.core import EngineCoreProc

stock = EngineCoreProc.run_busy_loop, SpinCondition.__init__
load_general_plugins()
loggers = {point.name: point.load() for point in entry_points(group="vllm.stat_logger_plugins")}
logger = loggers["rosemux_pulse"](None)
logger.record(None, None)

from coserve.vllm.middleware import EpochMiddleware, PulseMiddleware

seen = []

async def app(scope, receive, send):
    seen.append((scope["path"], send))

async def send(message):
    raise AssertionError(message)

scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
for middleware in (PulseMiddleware, EpochMiddleware):
    asyncio.run(middleware(app)(scope, None, send))
print(json.dumps({
    "methods_are_stock": (EngineCoreProc.run_busy_loop, SpinCondition.__init__) == stock,
    "passed": [path for path, given in seen if given is send],
    "threads": [thread.name for thread in threading.enumerate()],
}))
"""


def test_loop_requests_and_threads_are_those_of_stock_vllm() -> None:
    stock = {name: value for name, value in os.environ.items() if not name.startswith("ROSEMUX_")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env=stock | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["methods_are_stock"]
    assert seen["passed"] == ["/v1/completions"] * 2
    assert not [name for name in seen["threads"] if "rosemux" in name]
