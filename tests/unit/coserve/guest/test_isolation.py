"""Effects of the CPU isolation backends on processes, and refusals where they have none."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coserve.guest import isolation
from coserve.guest.isolation import IDLE_CLASS, IDLE_GROUP, NO_ISOLATION
from harvester.contracts.errors import Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.platform.scheduling_group import CpuPriority


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def test_the_idle_class_is_refused_where_it_would_do_nothing(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getpid()
    with pytest.raises(Unsupported, match="no effect"):
        isolation.check_beside(IDLE_CLASS, guest=[sleeper], production=[mine])
    isolation.apply_to_process(IDLE_CLASS, sleeper)
    isolation.check_beside(IDLE_CLASS, guest=[sleeper], production=[mine])
    found = {
        sleeper: {CpuPriority("/autogroup-2", True)},
        mine: {CpuPriority("/autogroup-1", False)},
    }
    monkeypatch.setattr(isolation, "priorities", found.__getitem__)
    with pytest.raises(Unsupported, match=r"autogroup-2.*CPUWeight=idle"):
        isolation.check_beside(IDLE_CLASS, guest=[sleeper], production=[mine])
    isolation.check_beside(NO_ISOLATION, guest=[sleeper], production=[mine])


@pytest.mark.parametrize("stray", ["guest", "production"])
def test_one_stray_thread_of_many_is_enough(stray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    below, above = CpuPriority("/pod", True), CpuPriority("/pod", False)
    found = {1: {below}, 2: {below}, 11: {above}, 12: {above}}
    monkeypatch.setattr(isolation, "priorities", found.__getitem__)
    isolation.check_beside(IDLE_CLASS, guest=[1, 2], production=[11, 12])
    found[2 if stray == "guest" else 12] |= {CpuPriority("/elsewhere", stray == "guest")}
    with pytest.raises(Unsupported, match="/elsewhere"):
        isolation.check_beside(IDLE_CLASS, guest=[1, 2], production=[11, 12])


def test_processes_that_are_not_to_be_seen_are_no_proof() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    with pytest.raises(Unsupported, match="cannot be verified"):
        isolation.check_beside(IDLE_CLASS, guest=[os.getpid()], production=[ended.pid])


def test_the_idle_class_is_put_on_and_taken_off(sleeper: int) -> None:
    isolation.apply_to_process(isolation.choose(IsolationBackend.IDLE), sleeper)
    assert os.sched_getscheduler(sleeper) == os.SCHED_IDLE
    isolation.lift_from_process(sleeper)
    assert os.sched_getscheduler(sleeper) == os.SCHED_OTHER


def test_a_cpu_takes_the_idle_group_where_it_can_and_the_class_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(pid: int) -> None:
        raise Unsupported("not here")

    monkeypatch.setattr(isolation._GROUPS, "check", lambda pid: None)
    assert isolation.choose() is IDLE_GROUP
    assert isolation.choose(IsolationBackend.IDLE) is IDLE_CLASS
    monkeypatch.setattr(isolation._GROUPS, "check", refuses)
    assert isolation.choose() is IDLE_CLASS
    with pytest.raises(Unsupported, match="not here"):
        isolation.choose(IsolationBackend.IDLE_GROUP)


def test_the_idle_group_is_refused_where_production_is_in_it_too(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        isolation, "priorities", lambda pid: {CpuPriority("/rosemux-guest-7", False)}
    )
    with pytest.raises(Unsupported, match="no effect"):
        isolation.check_beside(IDLE_GROUP, guest=[sleeper], production=[os.getpid()])
