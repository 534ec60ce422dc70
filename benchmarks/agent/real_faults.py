"""Faults on real processes: one strike each, a row of `STRIKES`.

A scenario begins with an open grant (at level `metrics`: with a pulse of the scrape), and leaves
its evidence to the judge.
"""

import json
import random
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent.agent_child import clock, wait_for
from benchmarks.agent.evidence import Dark, Death, Evidence, RefusedCall
from benchmarks.agent.hostile import hostile_requests, slow_request
from benchmarks.agent.real_node import PATIENCE_S, SLOT, RealNode
from benchmarks.agent.stand_in import PULSE_TTL_S
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import GrantMode
from harvester.policy.sample import SCRAPED_PULSE

_HUNG_S = 2.0
_TENANT, _OPERATOR = "t" * 20, "o" * 20


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


def _production_word(word: str, *, after_s: float = PATIENCE_S) -> Strike:
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
                with node.dark("production stopped", after_s=PULSE_TTL_S + PATIENCE_S):
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
                with node.dark("production is dead", after_s=PULSE_TTL_S + PATIENCE_S):
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
    path = node.shared / "pages" / "kill"
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
    "engine hung": Fault(_production_word("hung", after_s=_HUNG_S + 2 * PATIENCE_S)),
    "pulse torn": Fault(_production_word("torn", after_s=PATIENCE_S)),
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


def run_real(name: str, seed: int, root: Path, shared: Path) -> Evidence:
    """One scenario; `shared` is a folder in shared memory. Raises ConfigError where its fault could
    not strike."""
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
        shared,
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
