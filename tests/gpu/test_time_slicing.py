"""A guest's process on a device ranks below production on the host, in every thread of it."""

import os
from pathlib import Path

import pytest

from coserve.guest.isolation import TIME_SLICING, apply_to_process
from tests.gpu.child import Child


def ranks(pid: int) -> set[tuple[int, int]]:
    """Scheduling policy and nice value of every thread."""
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    assert len(threads) > 1
    return {(os.sched_getscheduler(one), os.getpriority(os.PRIO_PROCESS, one)) for one in threads}


@pytest.mark.parametrize("applied", ["before", "after"])
def test_threads_of_the_driver_rank_below_production_s(device: str, applied: str) -> None:
    """`before` its first use of the device, as `rosemux guest` does, threads inherit the rank."""
    with Child(device) as guest:
        guest.ask("thread")
        if applied == "before":
            apply_to_process(TIME_SLICING, guest.pid)
        guest.ask("start")
        if applied == "after":
            apply_to_process(TIME_SLICING, guest.pid)
        guest.ask("thread")
        guest.ask("work")
        assert ranks(guest.pid) == {(os.SCHED_BATCH, 19)}


def test_a_guest_s_environment_leaves_the_device_to_it(device: str) -> None:
    with Child(device, dict(TIME_SLICING.environment)) as guest:
        guest.ask("start")
        guest.ask("work")
