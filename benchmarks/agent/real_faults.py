"""Faults on real processes: an agent in namespaces of its own between stand-ins of production and
guest, one strike each.

Strikes are rows of `STRIKES`. Each begins with an open grant (or, at level `metrics`, with a pulse
of the scrape), and leaves its evidence to the judge.
"""

import json
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
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
    RefusedCall,
    audit_of,
    decisions_of,
)
from benchmarks.agent.hostile import hostile_requests, slow_request
from benchmarks.agent.stand_in import PULSE_TTL_S
from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.errors import ConfigError, RoseMuxError
from harvester.contracts.page import GrantMode, PageDirectory
from harvester.policy.sample import SCRAPED_PULSE
from scheduler.sim.replay import replay_journal

SLOT = "slot0"
_STEP_TOKENS, _KV_TOKENS, _TTL_S = 512, 4096, 0.5
_PATIENCE_S = 0.4
"""Between a fault and the agent's next beat on a busy machine; the beat is 0.1 s."""
_SCRAPE_S = 1.2
"""An answer is a pulse so soon after it was sent: the scrape's time limit, and some."""
_HUNG_S = 2.0
_OPEN_S = 20.0
_TENANT, _OPERATOR = "t" * 20, "o" * 20
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
        self.pages = PageDirectory.create(self.root / "pages" / SLOT)
        self._port = free_ports(1)[0]
        self._fates: list[StandInChild] = []
        self._requests = 0
        self.start_production()
        self.start_guest()
        slot = {"name": SLOT, "policy": _POLICY}
        if self.metrics:
            slot["metrics_url"] = f"http://127.0.0.1:{self._port}/metrics"
        config = {"slots": [slot], "http": self.http}
        # Shared memory of its own: what is left there is the agent's.
        before = f"mount -t tmpfs tmpfs /dev/shm && {self.before or 'true'}"
        self.agent = AgentChild(
            self.root, config, before=before, namespaces=self.namespaces, marker=self.marker
        )
        self.grants = GrantLog([self.pages.path])
        self.start_agent()
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
        self.evidence.starts.append(clock.now())
        self.agent.start()

    @property
    def state(self) -> Path:
        """The agent's state directory, as it sees it."""
        return Path(f"/proc/{self.agent.pid}/root{self.root}/state")

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
    def dark(self, cause: str, *, after_s: float = _PATIENCE_S) -> Iterator[None]:
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
            shared = Path(f"/proc/{self.agent.pid}/root/dev/shm")
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
        journal = state / f"{SLOT}.journal"
        evidence.decisions[SLOT] = decisions_of(journal)
        try:
            difference = replay_journal(journal).difference
        except RoseMuxError as error:
            evidence.replay_faults.append(str(error))
        else:
            if difference is not None:
                evidence.replay_faults.append(f"line {difference.line} differs")
        evidence.audit = audit_of(state / "audit.jsonl")

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


def _attributes(pid: int) -> dict[str, Any]:
    """What the kernel would show of an attempt on a process; empty values for one that is gone."""
    found: dict[str, Any] = {}
    proc = Path(f"/proc/{pid}")
    for name, read in {
        "nice": lambda: psutil.Process(pid).nice(),
        "class": lambda: sched_getscheduler(pid),
        "cores": lambda: sorted(sched_getaffinity(pid)),
        "cgroup": (proc / "cgroup").read_text,
        "oom_score_adj": (proc / "oom_score_adj").read_text,
    }.items():
        try:
            found[name] = read()
        except (OSError, psutil.Error):
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


Strike = Callable[[RealNode], None]


@dataclass(frozen=True, slots=True)
class Fault:
    strike: Strike
    metrics: bool = False
    before: str = ""
    namespaces: Callable[[random.Random], Sequence[str]] = lambda _: ("-m",)
    tokens: bool = False
    opens: bool = True
    """Whether the slot must have been open before."""


def _metrics(mood: str) -> Strike:
    def strike(node: RealNode) -> None:
        page = node.pages.pulse_reader(SCRAPED_PULSE)

        def watch(seconds: float) -> None:
            def look() -> bool:
                stamp_s = page.read_left().stamp_ns * 1e-9
                if stamp_s and stamp_s not in node.evidence.scraped:
                    node.evidence.scraped.append(stamp_s)
                return False

            wait_for(look, seconds=seconds, every_s=0.05)

        watch(2.5)
        if not node.evidence.scraped:
            raise ConfigError(f"{node.evidence.name}: no scrape became a pulse")
        node.production.word(mood)
        with node.dark("level metrics", after_s=-1e9):
            watch(node.rng.uniform(3.0, 5.0))
            node.production.word("restarted" if mood == "frozen" else "good")
            node.production.word("good")
            watch(2.5)

    return strike


def _production_word(word: str, *, after_s: float = _PATIENCE_S) -> Strike:
    def strike(node: RealNode) -> None:
        node.production.word(word)
        with node.dark(f"production {word}", after_s=after_s):
            node.rest(after_s + 0.3, after_s + 2.0)
        node.production.word("back")
        node.until_open()

    return strike


def _restarted(node: RealNode) -> None:
    node.production.word("restarted")
    with node.dark("production's counters began anew"):
        # Its pulse needs 0.35 s for 64 steps; the slot's quiet time is 0.3 s.
        node.rest(0.0, 0.0)
    if not wait_for(lambda: node.mode() != GrantMode.OPEN, seconds=1.0, every_s=0.005):
        node.evidence.dark.append(
            Dark(slot=SLOT, cause="never closed on the reset", since_s=0.0, until_s=1e12)
        )
    node.until_open()


def _stopped(who: str) -> Strike:
    """SIGSTOP, then SIGCONT."""

    def strike(node: RealNode) -> None:
        target = getattr(node, who)
        for _ in range(2):
            target.signal(signal.SIGSTOP)
            if who == "production":
                with node.dark("production stopped", after_s=PULSE_TTL_S + _PATIENCE_S):
                    node.rest(0.3, 2.5)
            else:
                node.rest(0.3, 2.5)
            target.signal(signal.SIGCONT)
            node.until_open()

    return strike


def _agent_stopped_over_production(node: RealNode) -> None:
    """Production dies while the agent is stopped, again and again: no grant may follow."""
    for _ in range(6):
        node.agent.signal(signal.SIGSTOP)
        node.production.kill()
        node.rest(0.4, 1.0)
        with node.dark("production is dead", after_s=0.0):
            node.agent.signal(signal.SIGCONT)
            node.rest(0.4, 0.8)
        node.start_production()
        node.until_open()


def _killed(who: str) -> Strike:
    def strike(node: RealNode) -> None:
        for _ in range(2):
            if who == "production":
                node.production.kill()
                with node.dark("production is dead", after_s=PULSE_TTL_S + _PATIENCE_S):
                    node.rest(0.5, 3.0)
                node.start_production()
            elif who == "guest":
                node.guest.kill()
                node.rest(0.5, 4.0)
                node.start_guest()
            else:
                node.agent.kill()
                node.rest(0.0, 2.0)
                node.start_agent()
            node.until_open()

    return strike


def _owing_guest(node: RealNode) -> None:
    """It owes memory and is ended; the next one is well."""
    node.guest.word("owe")
    node.production.word("kv_full")
    guest = node.guest
    if not wait_for(lambda: guest.process.poll() is not None, seconds=8.0):
        raise ConfigError(f"{node.evidence.name}: the owing guest lives")
    node.evidence.deaths.append(Death(slot=SLOT, pid=guest.process.pid, at_s=clock.now()))
    guest.struck = True
    node.production.word("back")
    node.start_guest()
    node.until_open()


def _blaming_guest(node: RealNode) -> None:
    """It owes memory and names production's process as its own."""
    node.guest.word(f"blame {node.production.process.pid}")
    node.guest.word("owe")
    node.production.word("kv_full")
    node.rest(2.0, 4.0)
    node.production.word("back")
    node.guest.word("back")
    node.rest(0.2, 0.5)


def _disk_full(node: RealNode) -> None:
    node.evidence.recording = False
    fill = node.state / "fill"
    for _ in range(2):
        with fill.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        # Lines go on until the journal's last block is full too.
        if not wait_for(lambda: "No space left" in node.reason(), seconds=20.0):
            raise ConfigError(f"{node.evidence.name}: everything could be recorded")
        node.rest(0.3, 1.5)
        fill.unlink()
        node.until_open()


def _kill_file(node: RealNode) -> None:
    path = node.root / "pages" / "kill"
    for word in ("hold", "drain", ""):
        path.write_text(word)
        with node.dark("kill file"):
            node.rest(0.5, 1.0)
        path.unlink()
        node.until_open()


def _another_clock(node: RealNode) -> None:
    """The agent's CLOCK_MONOTONIC is not production's: no page of the other can be believed."""
    if not wait_for(lambda: node.grants.latest(SLOT) is not None, seconds=5.0):
        raise ConfigError(f"{node.evidence.name}: no grant was written")
    node.evidence.dark.append(Dark(slot=SLOT, cause="other clock", since_s=-1e12, until_s=1e12))
    end_s = clock.now() + node.rng.uniform(2.0, 3.0)
    while clock.now() < end_s:
        node.take(f"c{clock.now()}")
        node.rest(0.2, 0.3)
    if "clock" not in node.reason() and "expired" not in node.reason():
        raise ConfigError(f"{node.evidence.name}: the clocks were the same: {node.reason()}")


def _lost_calls(node: RealNode) -> None:
    """Each lease call with its request cut short, and with its reply unread; then repeated."""
    for number in range(3):
        node.release()
        request_id = f"lost{number}"
        body = {"request_id": request_id, "slot": SLOT, "tenant": "t", "job": "j", "duration_s": 10}
        since_s = clock.now()
        _lose(node, "POST /v1/leases", body)
        end_s = since_s + 10.0
        while node.take(request_id, since_s=since_s).get("type") != "granted":
            if clock.now() < end_s:
                node.rest(0.1, 0.1)
                continue
            raise ConfigError(f"{node.evidence.name}: a repeated request was refused")
        path = f"/v1/leases/{node.lease['lease']}"
        _lose(node, f"POST {path}/renew", {"epoch": node.lease["epoch"], "duration_s": 10})
        node.renew()
        node.until_open()
        _lose(node, f"DELETE {path}", None)
    node.release()
    node.lease = {}
    node.until_open()


def _lose(node: RealNode, line: str, body: dict[str, Any] | None) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{line} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    node.agent.send((head + data)[: node.rng.randrange(1, len(head))], read=False)
    node.agent.send(head + data, read=False)
    node.rest(0.02, 0.1)


def _hostile(node: RealNode) -> None:
    slow: list[socket.socket] = []
    for _ in range(50):
        connection = socket.create_connection(("127.0.0.1", node.agent.port), timeout=1.0)
        connection.sendall(slow_request())
        slow.append(connection)
    for name, raw in hostile_requests():
        status = node.agent.send(raw)
        node.evidence.refused.append(RefusedCall(name=name, status=status))
        if not node.agent.answers():
            node.evidence.refused.append(RefusedCall(name=f"{name}: no answer after", status=599))
        node.renew()
    for connection in slow:
        connection.close()
    node.until_open()


def _without_rights(node: RealNode) -> None:
    """No token, a wrong one, and a tenant's where an operator's is needed; guessed lease ids."""
    stop = {"order": "drain", "reason": "r", "by": "mallory"}
    lease, take = node.lease["lease"], {"request_id": "m", "slot": SLOT, "tenant": "m", "job": "m"}
    renewal = {"epoch": node.lease["epoch"], "duration_s": 10}
    for token in ("", "w" * 20):
        for method, path, body in (
            ("GET", "/v1/slots", None),
            ("GET", "/metrics", None),
            ("POST", "/v1/leases", {**take, "duration_s": 10}),
            ("POST", f"/v1/leases/{lease}/renew", renewal),
            ("DELETE", f"/v1/leases/{lease}", None),
            ("POST", "/v1/stops", stop),
        ):
            status, _ = node.agent.call(method, path, body, token=token)
            node.evidence.refused.append(RefusedCall(name=f"{method} {path}", status=status))
    status, _ = node.agent.call("POST", "/v1/stops", stop, token=_TENANT)
    node.evidence.refused.append(RefusedCall(name="a tenant's stop", status=status))
    public = lease.rpartition(".")[0]
    for guess in (public, f"{public}.{'0' * 32}", f"{public}.{node.rng.randbytes(16).hex()}"):
        for method, path, body in (
            ("POST", f"/v1/leases/{guess}/renew", renewal),
            ("DELETE", f"/v1/leases/{guess}", None),
        ):
            _, answer = node.agent.call(method, path, body, token=_TENANT)
            granted = not isinstance(answer, dict) or answer.get("reason") != "unknown"
            node.evidence.refused.append(RefusedCall(name=guess, status=0, granted=granted))
    if not node.renew():
        node.evidence.refused.append(RefusedCall(name="the lease is gone", status=0, granted=True))
    node.until_open()


def _other_clock(rng: random.Random) -> Sequence[str]:
    offset_s = rng.choice((-1, 1)) * rng.randrange(5, 1000)
    return ("-m", "-T", "--monotonic", str(offset_s))


_SMALL_STATE = "mkdir -p {root}/state && mount -t tmpfs -o size=1024k tmpfs {root}/state"
STRIKES: dict[str, Fault] = {
    **{
        f"metrics {mood}": Fault(_metrics(mood), metrics=True, opens=False)
        for mood in ("frozen", "nan", "truncated", "huge", "half_open")
    },
    "counter reset": Fault(_restarted),
    "engine hung": Fault(_production_word("hung", after_s=_HUNG_S + 2 * _PATIENCE_S)),
    "pulse torn": Fault(_production_word("torn", after_s=_PATIENCE_S)),
    "agent stopped": Fault(_stopped("agent")),
    "guest stopped": Fault(_stopped("guest")),
    "production stopped": Fault(_stopped("production")),
    "agent killed": Fault(_killed("agent")),
    "guest killed": Fault(_killed("guest")),
    "production killed": Fault(_killed("production")),
    "agent stopped, production killed": Fault(_agent_stopped_over_production),
    "guest owes": Fault(_owing_guest),
    "guest blames production": Fault(_blaming_guest),
    "disk full": Fault(_disk_full, before=_SMALL_STATE),
    "kill file": Fault(_kill_file),
    "another clock": Fault(_another_clock, namespaces=_other_clock, opens=False),
    "lost calls": Fault(_lost_calls),
    "hostile calls": Fault(_hostile),
    "no rights": Fault(_without_rights, tokens=True),
}


def run_real(name: str, seed: int, root: Path) -> Evidence:
    """One scenario. Raises ConfigError where its fault could not strike."""
    fault, rng = STRIKES[name], random.Random(f"{name} {seed}")
    root.mkdir(parents=True)
    http: dict[str, Any] = {}
    if fault.tokens:
        for file, token in (("tokens", _TENANT), ("operators", _OPERATOR)):
            (root / file).write_text(token + "\n")
            (root / file).chmod(0o600)
        http = {
            "token_file": str(root / "tokens"),
            "operator_token_file": str(root / "operators"),
        }
    evidence = Evidence(name=f"{name} {seed}", tolerance_s=0.1)
    node = RealNode(
        root,
        rng,
        evidence,
        metrics=fault.metrics,
        http=http,
        before=fault.before.format(root=root),
        namespaces=tuple(fault.namespaces(rng)),
        token=_TENANT if fault.tokens else "",
    )
    try:
        if fault.opens:
            node.until_open()
        fault.strike(node)
    finally:
        node.end()
    return evidence
