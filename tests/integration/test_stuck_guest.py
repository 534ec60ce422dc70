"""A stuck engine loop of a guest with memory that production needs, and no agent to end it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import Grant, GrantMode, PageDirectory

WITHIN_S = 30.0
STUCK = """
import os, subprocess, sys, threading, time
from pathlib import Path
from coserve.guest.guest_slot import GuestSlot
from coserve.vllm.waker import Waker
from harvester.contracts.process import process_ids

slot = GuestSlot(Path(sys.argv[1]), token_limit=512)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
slot.load.processes = process_ids([os.getpid(), worker.pid])
slot.load.kv_tokens_total, slot.load.kv_tokens_withheld = 1000, int(sys.argv[2])
Waker(slot, lambda: None).start()
print(worker.pid, flush=True)
time.sleep(600)
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Agent:
    """Grants, and ends no process."""

    def __init__(self, path: Path) -> None:
        self.pages = PageDirectory.create(path)
        self._grants = self.pages.grant_writer()

    def grant(self, **fields: Any) -> None:
        record = Grant(epoch=1, mode=GrantMode.CLOSED, kv_deadline_s=0.2, **fields)
        self._grants.write(record, now_ns=monotonic_ns(), ttl_ns=500_000_000)

    def grant_until(self, child: "subprocess.Popen[str]", seconds: float, **fields: Any) -> bool:
        """Grants for `seconds`; whether the child has ended meanwhile."""
        clock = MonotonicClock()
        until_s = clock.now() + seconds
        while clock.now() < until_s:
            self.grant(**fields)
            try:
                child.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            return True
        return False


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path / "slot")


class Guests:
    def __init__(self, pages: Path) -> None:
        self._pages = pages
        self._children: list[subprocess.Popen[str]] = []
        self.worker = 0

    def begin(self, *, withheld: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", STUCK, str(self._pages), str(withheld)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._children.append(child)
        assert child.stdout is not None
        self.worker = int(child.stdout.readline())
        return child

    def end(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        if self.worker and Path(f"/proc/{self.worker}").exists():
            subprocess.run(["kill", "-9", str(self.worker)], check=False)


@pytest.fixture
def guests(agent: Agent) -> Iterator[Guests]:
    made = Guests(agent.pages.path)
    yield made
    made.end()


def test_a_stuck_guest_that_owes_memory_ends_with_all_its_processes(
    agent: Agent, guests: Guests
) -> None:
    agent.grant()
    child = guests.begin(withheld=0)
    assert agent.grant_until(child, WITHIN_S, kv_budget_tokens=400)
    assert child.returncode == -signal.SIGKILL
    # A killed process takes its time on a busy machine.
    clock = MonotonicClock()
    until_s = clock.now() + WITHIN_S
    while not ended(guests.worker) and clock.now() < until_s:
        time.sleep(0.05)
    assert ended(guests.worker)
    assert not (agent.pages.path / "guest").exists(), "nobody counts its memory any more"


def test_a_stuck_guest_ends_when_its_agent_is_gone(agent: Agent, guests: Guests) -> None:
    agent.grant(abort_grace_s=0.2)
    child = guests.begin(withheld=0)
    agent.grant(abort_grace_s=0.2)
    assert child.wait(timeout=WITHIN_S) == -signal.SIGKILL


@pytest.mark.parametrize("budget", [0, 400])
def test_a_guest_that_gave_its_memory_back_lives(agent: Agent, guests: Guests, budget: int) -> None:
    agent.grant()
    child = guests.begin(withheld=600 if budget else 0)
    assert not agent.grant_until(child, 2.5, kv_budget_tokens=budget)
