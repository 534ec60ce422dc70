"""Cost of an agent: cores, memory, bytes of production's metrics page; one beat of 16 slots.

Real agents with open grants; their engines are pages that this program writes, alive and idle.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.agent.agent_child import AgentChild, StandInChild, clock, wait_for
from benchmarks.agent.evidence import GrantLog, GrantSeen
from benchmarks.testbed.core_time import account, used
from benchmarks.testbed.page_beats import PageBeats
from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.page import PageDirectory

SLOTS = (1, 8)
WINDOWS, WINDOW_S = 10, 3.0
_SETTLE_S = 3.0
_LEASE_S = 300.0
_POLICY = {"proof": {"share_ratio": 0}}


@contextmanager
def harvesting(root: Path, slots: int) -> Iterator[AgentChild]:
    """An agent that has lent all of its slots."""
    names = [f"slot{number}" for number in range(slots)]
    config = {
        "lease_ttl_s": _LEASE_S,
        "slots": [{"name": name, "policy": _POLICY} for name in names],
    }
    pages = [PageDirectory.create(root / "pages" / name) for name in names]
    beats, agent = PageBeats(pages), AgentChild(root, config)
    try:
        agent.start()
        agent.lease_all(duration_s=_LEASE_S)
        yield agent
        statuses = {name: agent.call("GET", "/v1/slots")[1]["slots"] for name in names[:1]}
        if any(slot["state"] != "leased" for one in statuses.values() for slot in one):
            raise RuntimeError("a lease ended in the middle of the measurement")
    finally:
        beats.stop()
        agent.end()


def cost(*, windows: int = WINDOWS) -> dict[str, Any]:
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(dir="/dev/shm"))
        agents = {
            str(slots): stack.enter_context(harvesting(_folder(directory, slots), slots))
            for slots in SLOTS
        }
        _rest(_SETTLE_S)
        shares: dict[str, list[float]] = {name: [] for name in agents}
        for _ in range(windows):
            for name, agent in agents.items():
                shares[name].append(core_share(agent.pid))
        return {
            "core_share": {name: _spread(values) for name, values in shares.items()},
            "rss_mb": {
                name: round(psutil.Process(agent.pid).memory_info().rss / 2**20, 1)
                for name, agent in agents.items()
            },
            "scrape_bytes_s": scrape_bytes_s(),
            "load_average": os.getloadavg()[0],
        }


def core_share(pid: int) -> float:
    """Core seconds a second, over one window."""
    process = [psutil.Process(pid)]
    before, begin_s = account(process), clock.now()
    _rest(WINDOW_S)
    spent_s = sum(used(before, account(process)).values())
    return spent_s / (clock.now() - begin_s)


def scrape_bytes_s() -> float:
    """Bytes that a metrics server sends the agent, at consent level `metrics`."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        root, (port,) = Path(directory), free_ports(1)
        pages = PageDirectory.create(root / "pages" / "slot0")
        log = root / "production.log"
        production = StandInChild("production", pages.path, log, metrics=port)
        url = f"http://127.0.0.1:{port}/metrics"
        agent = AgentChild(root, {"slots": [{"name": "slot0", "metrics_url": url}]})
        try:
            agent.start()
            _rest(10.0)
        finally:
            agent.end()
            production.end()
        answers = [fact for fact in production.facts() if "answer" in fact]
        lasted_s = float(answers[-1]["answer"] - answers[0]["answer"])
        return round(sum(int(fact["bytes"]) for fact in answers[1:]) / lasted_s, 1)


def scale(slots: int = 16, *, windows: int = WINDOWS) -> dict[str, Any]:
    """`loop_p99_ms`: from the first slot's sample to the last slot's, and its part of it more."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        root = _folder(directory, slots)
        with harvesting(root, slots) as agent:
            _rest(_SETTLE_S)
            log = GrantLog([root / "pages" / name for name in agent.slots])
            shares = [core_share(agent.pid) for _ in range(windows)]
            log.stop()
    loops_ms = sorted(loop_times_ms(log.grants, slots))
    return {
        "core_share": _spread(shares),
        "loop_p50_ms": round(statistics.median(loops_ms), 2),
        "loop_p99_ms": round(loops_ms[int(0.99 * len(loops_ms))], 2),
        "beats": len(loops_ms),
        "load_average": os.getloadavg()[0],
    }


def loop_times_ms(grants: list[GrantSeen], slots: int) -> list[float]:
    """Time of each whole beat: the slots' grants in the order of their stamps."""
    order = [f"slot{number}" for number in range(slots)]
    stamps: dict[str, list[float]] = defaultdict(list)
    for seen in grants:
        stamps[seen.slot].append(seen.stamp_s)
    found = []
    for first_s in stamps[order[0]]:
        following = [
            next((at_s for at_s in stamps[name] if at_s >= first_s), None) for name in order
        ]
        whole = [at_s for at_s in following if at_s is not None]
        # A grant that the log missed would be one of the next beat.
        if len(whole) == slots and whole == sorted(whole) and whole[-1] - first_s < 0.09:
            found.append((whole[-1] - first_s) * 1e3 * slots / (slots - 1))
    return found


def _folder(directory: str, slots: int) -> Path:
    root = Path(directory) / str(slots)
    (root / "pages").mkdir(parents=True)
    return root


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def _rest(seconds: float) -> None:
    wait_for(lambda: False, seconds=seconds, every_s=seconds)
