"""From an order to stop to the closed grant: by the kill file, by the scheduler, and by its death.

The scheduler is a real gateway with the agent's slot; for its death it holds the slot's lease, for
a turn that waits for an engine.
"""

import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.agent.agent_child import AgentChild, clock, wait_for
from benchmarks.agent.evidence import GrantLog
from benchmarks.testbed.page_beats import PageBeats
from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import GrantMode, PageDirectory
from harvester.platform.parent import end_with

FILE_TRIALS, CLUSTER_TRIALS, DEATHS = 30, 20, 3
LEASE_TTL_S = 10.0
_OPEN_S = 30.0


class GatewayChild:
    """A gateway process with one agent and no dedicated engine."""

    def __init__(self, root: Path, agent: AgentChild) -> None:
        self._port = free_ports(1)[0]
        self._file = root / "gateway.yaml"
        self._log = root / "gateway.log"
        settings = {
            "port": self._port,
            "agents": [{"id": "agent", "url": f"http://127.0.0.1:{agent.port}"}],
            "jobs": [{"id": "job", "active": True}],
            "capacity": {"duration_s": LEASE_TTL_S},
            "timeouts": {"queue_s": 3600},
        }
        self._file.write_text(json.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises ConfigError if it does not answer."""
        parent = os.getpid()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harvester.cli", "gateway", "--config", str(self._file)],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: end_with(parent),  # noqa: PLW1509 - only makes system calls
            )
        if not wait_for(self._answers, seconds=60.0, every_s=0.1):
            raise ConfigError(f"the gateway does not answer; its log: {self._log}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def order(self, order: str) -> None:
        """Raises ConfigError if the agent does not obey."""
        reply = self._post("/v1/stops", {"order": order, "by": "benchmark", "reason": "measured"})
        if any(reply["agents"].values()):
            raise ConfigError(f"the order reached no agent: {reply['agents']}")

    def ask_for_a_turn(self) -> None:
        """One that no engine can serve yet, so that the slot is leased; its reply is never read."""
        body = {
            "request_id": f"turn-{clock.now()}",
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 8},
        }
        threading.Thread(target=self._ask, args=(body,), daemon=True).start()

    def _ask(self, body: dict[str, Any]) -> None:
        # Its gateway is killed.
        with suppress(OSError, http.client.HTTPException, ValueError):
            self._post("/inference/v1/generate", body, timeout_s=3600.0)

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1.0)
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        return False

    def _post(self, path: str, body: dict[str, Any], *, timeout_s: float = 10.0) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        connection.request("POST", path, body=json.dumps(body))
        return json.loads(connection.getresponse().read())


def kill(*, share: float = 1.0) -> dict[str, Any]:
    """`share` of the trials."""
    found: dict[str, Any] = {"lease_ttl_s": LEASE_TTL_S, "load_average": os.getloadavg()[0]}
    rng = random.Random(0)
    with TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as stack:
        root = Path(directory)
        pages = PageDirectory.create(root / "pages" / "slot0")
        policy = {"cooldown_s": 0.1, "proof": {"share_ratio": 0}}
        slot = {"name": "slot0", "engine_url": "http://127.0.0.1:9", "policy": policy}
        agent = AgentChild(root, {"lease_ttl_s": LEASE_TTL_S, "slots": [slot]})
        stack.callback(PageBeats([pages]).stop)
        stack.callback(agent.end)
        agent.start()
        log = GrantLog([pages.path], every_s=1e-3)
        stack.callback(log.stop)
        scheduler = GatewayChild(root, agent)
        stack.callback(scheduler.kill)
        scheduler.start()
        switch, number = root / "pages" / "kill", 0

        def opened() -> bool:
            nonlocal number
            number += 1
            agent.take(f"k{number}", "slot0")
            return _is_open(log)

        def measured(
            name: str, order: Callable[[], None], lift: Callable[[], None], trials: int
        ) -> None:
            times_s = []
            for _ in range(max(1, round(trials * share))):
                _until(opened, f"{name}: the slot stays closed")
                wait_for(lambda: False, seconds=rng.uniform(0.0, 0.1), every_s=0.005)
                times_s.append(_time_to_close_s(log, order))
                lift()
            found[name] = _spread(times_s)

        measured("file", lambda: _write(switch), switch.unlink, FILE_TRIALS)
        measured(
            "cluster",
            lambda: scheduler.order("drain"),
            lambda: scheduler.order("none"),
            CLUSTER_TRIALS,
        )
        # The lease's holder so far is silent now.
        _until(lambda: not _is_open(log), "the benchmark's own lease does not end")
        times_s = []
        for _ in range(max(1, round(DEATHS * share))):
            scheduler.ask_for_a_turn()
            _until(lambda: _is_open(log), "the gateway takes no lease")
            wait_for(lambda: False, seconds=rng.uniform(4.0, 8.0), every_s=0.05)
            if not _is_open(log):
                raise ConfigError("the gateway does not keep its lease")
            times_s.append(_time_to_close_s(log, scheduler.kill))
            scheduler.start()
        found["scheduler_dead"] = _spread(times_s)
    return found


def _write(switch: Path) -> None:
    switch.write_text("drain")


def _is_open(log: GrantLog) -> bool:
    seen = log.latest("slot0")
    return seen is not None and seen.grant.mode is GrantMode.OPEN


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    if not wait_for(holds, seconds=_OPEN_S, every_s=0.05):
        raise ConfigError(otherwise)


def _time_to_close_s(log: GrantLog, order: Callable[[], None]) -> float:
    """From before the order, which may take its time, to the closed grant on its page."""
    begin_s = clock.now()
    thread = threading.Thread(target=order)
    thread.start()
    closed = wait_for(lambda: not _is_open(log), seconds=3 * LEASE_TTL_S, every_s=1e-3)
    took_s = clock.now() - begin_s
    thread.join()
    if not closed:
        raise ConfigError(f"the grant is still open after {took_s:.0f} s")
    return took_s


def _spread(times_s: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times_s), 3),
        "most": round(max(times_s), 3),
        "trials": len(times_s),
    }
