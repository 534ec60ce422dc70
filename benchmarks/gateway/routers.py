"""The routers under test as processes, each over the same stub engines, and the load's arms."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.gateway.dialects import COMPLETIONS, GENERATE, SGLANG, TurnRoute
from benchmarks.testbed.processes import Child, Processes
from harvester.contracts.errors import ConfigError

ENGINE_PLACES = 2048
"""Turns at once on one engine, as the gateway's configuration says."""
_ROUTERS_AT = Path("build/routers")
VERSIONS = {"rosemux": "", "vllm-router": "0.1.17", "sglang-router": "0.3.2"}


@dataclass(frozen=True, slots=True)
class RouterArm:
    """One router and one of its routes; without a router the load goes to an engine itself."""

    router: str
    route: TurnRoute

    @property
    def name(self) -> str:
        return f"{self.router} {self.route.path}"

    @property
    def direct(self) -> "RouterArm":
        return RouterArm("direct", self.route)


ARMS = (
    RouterArm("rosemux", GENERATE),
    RouterArm("vllm-router", GENERATE),
    RouterArm("rosemux", SGLANG),
    RouterArm("sglang-router", SGLANG),
    RouterArm("rosemux", COMPLETIONS),
    RouterArm("vllm-router", COMPLETIONS),
    RouterArm("sglang-router", COMPLETIONS),
)


def start(
    processes: Processes,
    router: str,
    port: int,
    engines: Sequence[int],
    *,
    core: int,
    run: Path,
    metrics: int,
) -> Child:
    """Starts it on `core`. Raises ConfigError where a Rust router is not installed."""
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    if router == "rosemux":
        config = run / "gateway.yaml"
        config.write_text(yaml.safe_dump(_gateway(port, urls, run)))
        gateway = [sys.executable, "-m", "harvester.cli", "gateway", "--config", str(config)]
        return processes.start(router, gateway, core=core)
    if not (_ROUTERS_AT / "installed-lock").exists():
        raise ConfigError(f"{router} is not installed; run benchmarks/gateway/install")
    module = router.replace("-", "_") + ".launch_router"
    arguments = [
        *(sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *urls, "--log-level", "warning" if router == "vllm-router" else "warn"),
        *("--prometheus-port", str(metrics)),
    ]
    search = os.pathsep.join((str(_ROUTERS_AT), os.environ.get("PYTHONPATH", "")))
    return processes.start(router, arguments, core=core, environment={"PYTHONPATH": search})


def _gateway(port: int, engines: Sequence[str], run: Path) -> dict[str, object]:
    """As `examples/gateway.yaml`, without its agent; state and journals on this machine's disk."""
    return {
        "port": port,
        "engines": [
            {"id": f"dedicated-{index}", "url": url, "concurrency": ENGINE_PLACES}
            for index, url in enumerate(engines)
        ],
        "jobs": [{"id": "job-a"}],
        "state_file": str(run / "gateway.sqlite"),
        "journal_dir": str(run / "journal"),
    }
