"""A daemon of the test's own has production and guest on one server; our code reads it rightly."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coserve.guest.gpus import ComputeMode, Gpu
from coserve.guest.isolation import TIME_SLICING, MpsShare, choose
from harvester.agent.mps_watch import MpsWatch
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.process import ProcessId
from harvester.platform.mps import ServerStatus
from tests.gpu.child import Child
from tests.gpu.conftest import ON_A_GPU, need_cuda
from tests.gpu.mps_lab import MpsLab, fake_lab, real_lab

SHARE_PERCENT = 25.0
GRANULARITY = 8
"""Multiprocessors by which the hardware may round a share: half of a cluster's."""
_SOON_S = 20.0


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=ON_A_GPU)])
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MpsLab]:
    if request.param == "fake":
        with fake_lab(tmp_path_factory.mktemp("pipes")) as fake:
            yield fake
        return
    need_cuda()
    with real_lab() as real:
        yield real


@contextmanager
def together(lab: MpsLab) -> Iterator[tuple[Child, Child]]:
    """Production as a client of the daemon, and a guest on a share of the GPU."""
    share = MpsShare(lab.control, active_thread_percentage=SHARE_PERCENT)
    chosen = choose(IsolationBackend.MPS, gpus=[Gpu("GPU-1", ComputeMode.DEFAULT)], mps=share)
    with lab.process() as production, lab.process(dict(chosen.environment)) as guest:
        assert production.ask("start")["multiprocessors"] == lab.multiprocessors
        seen = guest.ask("start")["multiprocessors"]
        assert abs(seen - lab.multiprocessors * SHARE_PERCENT / 100) <= GRANULARITY
        yield production, guest


def the_server(lab: MpsLab) -> int:
    (server,) = lab.control.servers()
    return server


def watched(lab: MpsLab) -> MpsWatch:
    watch = MpsWatch(lab.control, look_s=1.0)
    watch.query()
    return watch


def test_production_and_guest_are_seen_on_one_server_until_they_end(lab: MpsLab) -> None:
    with together(lab) as (production, guest):
        assert set(lab.control.clients(the_server(lab))) == {production.pid, guest.pid}
        assert lab.control.status(the_server(lab)) is ServerStatus.ACTIVE
        reading = watched(lab).read()
        assert not reading.fault
        assert not reading.server_fault
        assert reading.shared_by((ProcessId(pid=guest.pid, start_ticks=0),))
        guest.end()
        clock = MonotonicClock()
        until_s = clock.now() + _SOON_S
        while guest.pid in lab.control.clients(the_server(lab)) and clock.now() < until_s:
            pass
        assert lab.control.clients(the_server(lab)) == (production.pid,)
        assert not watched(lab).read().shared_by((ProcessId(pid=guest.pid, start_ticks=0),))
        production.ask("work")


def test_a_guest_without_consent_joins_no_daemon_that_it_inherits(lab: MpsLab) -> None:
    with lab.process() as production, lab.process(dict(TIME_SLICING.environment)) as guest:
        production.ask("start")
        assert guest.ask("start")["multiprocessors"] == lab.multiprocessors
        guest.ask("work")
        assert lab.control.clients(the_server(lab)) == (production.pid,)


def test_a_guest_whose_work_the_agent_ends_fails_and_production_goes_on(lab: MpsLab) -> None:
    with together(lab) as (production, guest):
        guest.ask("work")
        guest.tell("work_until_fails", 60)
        assert watched(lab).terminate([guest.pid, os.getpid()]), "it may now be killed"
        assert guest.answer()["failed"], "a client whose work was ended goes on computing"
        guest.end()
        production.ask("work")
        assert lab.control.status(the_server(lab)) is ServerStatus.ACTIVE
        assert production.pid in lab.control.clients(the_server(lab))


@pytest.mark.parametrize("lab", [pytest.param("real", marks=ON_A_GPU)], indirect=True)
def test_the_driver_says_what_a_client_holds(lab: MpsLab) -> None:
    """A guest's floor under MPS: the server's own process holds it as far as some lists go."""
    with lab.process() as client:
        client.ask("hold")
        said = client.ask("report")
        assert said["memory"]["whole"], "NVML does not list a client of MPS by its process id"
        assert said["driver_bytes"] >= said["reserved_bytes"]
