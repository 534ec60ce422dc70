"""CPU cost of the node agent, in cores: `python -m benchmarks.agent_cost --json PATH`.

A real agent process that harvests on slots with pages written by this program, as if by live,
idle engines. One slot and eight, in turn.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.reporting import report
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import Guest, PageDirectory, Pulse

WINDOWS = 10
WINDOW_S = 3.0
SETTLE_S = 3.0
SLOTS = (1, 8)
_BEAT_S = 0.1
_TTL_NS = 500_000_000


class Engines:
    """The pages of idle engines, written at the pace of real ones."""

    def __init__(self, root: Path, slots: int) -> None:
        pages = [PageDirectory.create(root / f"slot{slot}") for slot in range(slots)]
        self._pulses = [page.pulse_writer("prod", 0) for page in pages]
        self._guests = [page.guest_writer() for page in pages]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_BEAT_S):
            now_ns = monotonic_ns()
            for pulse, guest in zip(self._pulses, self._guests, strict=True):
                pulse.write(Pulse(model_samples=1000), now_ns=now_ns, ttl_ns=_TTL_NS)
                guest.write(Guest(), now_ns=now_ns, ttl_ns=_TTL_NS)


class Agent:
    def __init__(self, root: Path, slots: int) -> None:
        config = root / "agent.yaml"
        config.write_text(yaml.safe_dump(_config(root, slots)))
        self._engines = Engines(root / "pages", slots)
        self._log = (root / "agent.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harvester.cli", "agent", "--config", str(config)],
            stderr=self._log,
        )
        self._times = psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        times = self._times.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._engines.end()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.agent_cost", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report(
        "agent_cost",
        lambda: {"beat_s": _BEAT_S, "core_share": measured()},
        given.json,
        engines=False,
    )


def measured() -> dict[str, dict[str, float]]:
    """Share of a core, by the number of slots."""
    clock, wait = MonotonicClock(), threading.Event()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        agents = {}
        for slots in SLOTS:
            root = Path(directory) / str(slots)
            (root / "pages").mkdir(parents=True)
            agents[slots] = Agent(root, slots)
        shares: dict[int, list[float]] = {slots: [] for slots in SLOTS}
        try:
            wait.wait(SETTLE_S)
            for _ in range(WINDOWS):
                for slots, agent in agents.items():
                    start_s, used_s = clock.now(), agent.cpu_s()
                    wait.wait(WINDOW_S)
                    shares[slots].append((agent.cpu_s() - used_s) / (clock.now() - start_s))
        finally:
            for agent in agents.values():
                agent.end()
    return {
        str(slots): {
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        for slots, values in shares.items()
    }


def _config(root: Path, slots: int) -> dict[str, Any]:
    return {
        "node": "node",
        "mode": "harvest",
        "page_root": str(root / "pages"),
        "state_dir": str(root / "state"),
        "http": {"port": free_ports(1)[0]},
        "slots": [
            {"name": f"slot{slot}", "engine_url": "http://127.0.0.1:1"} for slot in range(slots)
        ],
    }


if __name__ == "__main__":
    main()
