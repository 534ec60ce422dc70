"""One scenario's real processes: an agent in namespaces of its own between stand-ins of production
and guest, and the records of what is done to them.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from os import getpid, sched_getaffinity, sched_getscheduler
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agent.agent_child import MARKER, AgentChild, StandInChild, clock, wait_for
from benchmarks.agent.evidence import (
    SCRAPE,
    Caps,
    Dark,
    Death,
    Evidence,
    GoodData,
    GrantLog,
    LeaseCall,
    ProductionFate,
    read_files,
)
from benchmarks.agent.stand_in import PULSE_TTL_S
from benchmarks.testbed.page_beats import shared_group
from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import GrantMode, PageDirectory

SLOT = "slot0"
_STEP_TOKENS, _KV_TOKENS, _TTL_S = 512, 4096, 0.5
PATIENCE_S = 0.4
"""Between a fault and the agent's next beat on a busy machine; the beat is 0.1 s."""
_SCRAPE_S = 1.2
"""An answer is a pulse so soon after it was sent: the scrape's time limit, and some."""
_OPEN_S = 20.0
_POLICY = {
    "cooldown_s": 0.3,
    "proof": {"share_ratio": 0},
    "step_tokens_max": _STEP_TOKENS,
    "kv_budget_tokens": _KV_TOKENS,
    "kv_deadline_s": 0.5,
    "profile": {"prefill_base_s": 0.01, "decode_base_s": 0.01},
}


@dataclass
class RealNode:
    """One scenario's processes and the records of what was done to them."""

    root: Path
    shared: Path
    """In shared memory, where pages are; the agent sees its pages below `root`."""
    rng: random.Random
    evidence: Evidence
    metrics: bool = False
    http: dict[str, Any] = field(default_factory=dict)
    before: str = ""
    namespaces: tuple[str, ...] = ("-m",)
    token: str = ""
    production: StandInChild = field(init=False)
    guest: StandInChild = field(init=False)
    lease: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.marker = f"{getpid()}.{self.evidence.name}"
        self.pages = PageDirectory.create(self.shared / "pages" / SLOT)
        (self.root / "pages").mkdir()
        self._port = free_ports(1)[0]
        self._fates: list[StandInChild] = []
        self._requests = 0
        self.start_production()
        self.start_guest()
        group = shared_group(self.root / "group")
        slot = {"name": SLOT, "policy": _POLICY, "memory_group": group}
        if self.metrics:
            slot["metrics_url"] = f"http://127.0.0.1:{self._port}/metrics"
        config = {"slots": [slot], "http": self.http}
        # Shared memory of its own: what is left there is the agent's.
        before = f"mount --bind {self.shared}/pages {self.root}/pages && "
        before += f"mount -t tmpfs tmpfs /dev/shm && {self.before or 'true'}"
        self.agent = AgentChild(
            self.root, config, before=before, namespaces=self.namespaces, marker=self.marker
        )
        self.grants = GrantLog([self.pages.path])
        try:
            self.start_agent()
        except BaseException:
            self.agent.kill()
            for child in self._fates:
                child.kill()
            self.grants.stop()
            raise
        caps = Caps(since_s=0.0, step_tokens=_STEP_TOKENS, kv_tokens=_KV_TOKENS, ttl_s=_TTL_S)
        self.evidence.caps.append(caps)

    def start_production(self) -> None:
        self.production = self._stand_in("production", self._port if self.metrics else None)
        self._attributes = _attributes(self.production.process.pid)

    def start_guest(self) -> None:
        self.guest = self._stand_in("guest", None)

    def _stand_in(self, role: str, metrics: int | None) -> StandInChild:
        log = self.root / f"{role}{len(self._fates)}.log"
        child = StandInChild(role, self.pages.path, log, metrics=metrics, marker=self.marker)
        self._fates.append(child)
        return child

    def start_agent(self) -> None:
        self.agent.start()
        # Behind it: a recorded lease goes on from the moment at which the agent has read it.
        self.evidence.starts.append(clock.now())

    @property
    def state(self) -> Path:
        """The agent's state directory, as it sees it."""
        return self._seen(f"{self.root}/state")

    def _seen(self, path: str) -> Path:
        """A path in the agent's mount namespace."""
        return Path(f"/proc/{self.agent.pid}/root", path.lstrip("/"))

    def mode(self) -> str:
        seen = self.grants.latest(SLOT)
        return "none" if seen is None or seen.expires_s < clock.now() else seen.grant.mode.value

    def reason(self) -> str:
        seen = self.grants.latest(SLOT)
        return "" if seen is None else seen.grant.reason

    def until_open(self) -> None:
        """Raises ConfigError if no lease opens the slot."""

        def opened() -> bool:
            if self.mode() == GrantMode.OPEN:
                return True
            with suppress(OSError, HTTPException):
                self.hold_lease()
            return False

        if not wait_for(opened, seconds=_OPEN_S, every_s=0.1):
            raise ConfigError(f"{self.evidence.name}: the slot stays closed: {self.reason()}")

    def hold_lease(self) -> None:
        """Renews the lease, or takes one."""
        if self.lease:
            if self.renew():
                return
            self.lease = {}
        self._requests += 1
        self.take(f"r{self._requests}")

    def take(self, request_id: str, *, since_s: float | None = None) -> dict[str, Any]:
        """`since_s`: when the same request was made first."""
        at_s = clock.now() if since_s is None else since_s
        body = {"request_id": request_id, "slot": SLOT, "tenant": "t", "job": "j", "duration_s": 10}
        _, answer = self.agent.call("POST", "/v1/leases", body, token=self.token)
        if isinstance(answer, dict) and answer.get("type") == "granted":
            self.lease = {**answer, "request_id": request_id}
            self._called(at_s, clock.now() + answer["duration_s"])
        return dict(answer) if isinstance(answer, dict) else {}

    def renew(self) -> bool:
        at_s = clock.now()
        body = {"epoch": self.lease["epoch"], "duration_s": 10}
        path = f"/v1/leases/{self.lease['lease']}/renew"
        _, answer = self.agent.call("POST", path, body, token=self.token)
        if answer["type"] != "granted":
            return False
        self._called(at_s, clock.now() + answer["duration_s"])
        return True

    def release(self) -> None:
        self.agent.call("DELETE", f"/v1/leases/{self.lease['lease']}", token=self.token)
        self._called(clock.now(), clock.now(), released=True)

    def _called(self, at_s: float, until_s: float, *, released: bool = False) -> None:
        call = LeaseCall(
            slot=SLOT,
            request_id=self.lease["request_id"],
            epoch=self.lease["epoch"],
            at_s=at_s,
            until_s=until_s,
            released=released,
        )
        self.evidence.calls.append(call)

    @contextmanager
    def dark(self, cause: str, *, after_s: float = PATIENCE_S) -> Iterator[None]:
        """No grant that is stamped so long after the begin, until the end, may be open."""
        since_s = clock.now() + after_s
        yield
        dark = Dark(slot=SLOT, cause=cause, since_s=since_s, until_s=clock.now())
        self.evidence.dark.append(dark)

    def rest(self, low_s: float, high_s: float) -> None:
        wait_for(lambda: False, seconds=self.rng.uniform(low_s, high_s), every_s=0.05)

    def end(self) -> None:
        """Ends all and fills in the evidence."""
        evidence, state = self.evidence, self.root / "state"
        if self.agent.process is not None and self.agent.process.poll() is None:
            evidence.agent_peak_mb = _peak_mb(self.agent.pid)
            shared = self._seen("/dev/shm")
            evidence.left += [f"/dev/shm/{path.name}" for path in shared.iterdir()]
            if not state.exists() or not any(state.iterdir()):
                # On a file system of the agent's own, which goes with it.
                shutil.copytree(self.state, state, dirs_exist_ok=True)
            evidence.agent_statuses.append(self.agent.end())
        after = _attributes(self.production.process.pid)
        changed = tuple(name for name, value in self._attributes.items() if after[name] != value)
        for child in self._fates:
            died = child.process.poll()
            status = child.end()
            if child.log.name.startswith("production"):
                evidence.production.append(_fate(child, 0 if child.struck else status, changed))
            elif died is not None and not child.struck:
                death = Death(slot=SLOT, pid=child.process.pid, at_s=clock.now())
                evidence.deaths.append(death)
        self.grants.stop()
        evidence.grants = self.grants.grants
        self._add_data()
        evidence.left += [f"process {pid}" for pid in _marked(self.marker)]
        read_files(evidence, state, [SLOT])

    def _add_data(self) -> None:
        evidence = self.evidence
        for child in self._fates:
            for fact in child.facts():
                if "pulse" in fact:
                    until_s = fact["pulse"] + PULSE_TTL_S
                    good = GoodData(slot=SLOT, at_s=fact["pulse"], until_s=until_s)
                    evidence.good.append(good)
                elif fact.get("good"):
                    at_s = fact["answer"]
                    good = GoodData(slot=SCRAPE, at_s=at_s, until_s=at_s + _SCRAPE_S)
                    evidence.good.append(good)


_ATTRIBUTES: dict[str, Callable[[int], Any]] = {
    "nice": lambda pid: psutil.Process(pid).nice(),
    "class": sched_getscheduler,
    "cores": lambda pid: sorted(sched_getaffinity(pid)),
}


def _attributes(pid: int) -> dict[str, Any]:
    """Kernel attributes by which an attempt on a process would show; None for one that is gone."""
    proc, found = Path(f"/proc/{pid}"), dict[str, Any]()
    for name, read in _ATTRIBUTES.items():
        try:
            found[name] = read(pid)
        except (OSError, psutil.Error):
            found[name] = None
    for name in ("cgroup", "oom_score_adj"):
        try:
            found[name] = (proc / name).read_text()
        except OSError:
            found[name] = None
    return found


def _fate(child: StandInChild, status: int, changed: tuple[str, ...]) -> ProductionFate:
    facts, own = child.facts(), {getpid(), child.process.pid}
    return ProductionFate(
        signals=tuple(
            one["signal"] for one in facts if "signal" in one and one["sender"] not in own
        ),
        status=status,
        changed=() if child.struck else changed,
        blocked_s=max((one.get("blocked_s", 0.0) for one in facts), default=0.0),
        connections=max((one.get("connections", 0) for one in facts), default=0),
    )


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def _marked(marker: str) -> list[int]:
    """Processes that a scenario, or anything that it started, has left."""
    sought, found = f"{MARKER}={marker}".encode(), []
    for process in psutil.process_iter():
        with suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if sought in environment.split(b"\0") and process.pid != getpid():
                found.append(process.pid)
    return found
