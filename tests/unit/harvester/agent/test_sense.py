"""The readings of one beat of a slot."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harvester.agent.sense import SlotSensor
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.ids import Epoch
from harvester.contracts.page import Guest, PageDirectory, PageFault, Pulse
from harvester.contracts.page.owners import PageOwners
from harvester.contracts.process import process_ids
from harvester.policy.sample import GuestReading, KillSwitch, LeaseView, PulseReading

LEASE = LeaseView(epoch=Epoch(1))


def test_the_writer_of_an_expired_page_lives_until_its_process_ends(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path)
    sensor = SlotSensor(pages, pulses=())

    def read() -> GuestReading:
        return sensor.sample(lease=LEASE, kill_switch=KillSwitch.NONE).guest

    assert read() == GuestReading(fault=PageFault.MISSING)
    writer = pages.guest_writer()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        guest = Guest(processes=process_ids([process.pid]))
        writer.write(guest, now_ns=monotonic_ns(), ttl_ns=3_600_000_000_000)
        assert read() == GuestReading(record=guest)
        writer.write(guest, now_ns=monotonic_ns(), ttl_ns=0)
        lives = GuestReading(fault=PageFault.EXPIRED, lives=True)
        assert read() == lives, "it has cores like everybody"
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        below = msgspec.structs.replace(lives, runs_below_production=True)
        assert read() == below
        restarted = SlotSensor(pages, pulses=())
        assert restarted.sample(lease=LEASE, kill_switch=KillSwitch.NONE).guest == below
        restarted.close()
    assert read() == GuestReading(fault=PageFault.EXPIRED)
    sensor.close()


def test_a_guest_without_a_page_lives_while_its_command_holds_the_slot(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path)
    hold = (
        "import sys; from pathlib import Path; from harvester.agent.guest_lock import GuestLock\n"
        "from harvester.contracts.page import PageDirectory\n"
        "lock = GuestLock(PageDirectory(Path(sys.argv[1]))); lock.take()\n"
        "print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sensor = SlotSensor(pages, pulses=())
        guest = sensor.sample(lease=LEASE, kill_switch=KillSwitch.NONE).guest
        assert guest == GuestReading(fault=PageFault.MISSING, lives=True)
        process.communicate(b"\n")
    for _ in range(5):
        guest = sensor.sample(lease=LEASE, kill_switch=KillSwitch.NONE).guest
    assert guest == GuestReading(fault=PageFault.MISSING)
    sensor.close()


def _pulses(sensor: SlotSensor) -> tuple[PulseReading, ...]:
    return sensor.sample(lease=LEASE, kill_switch=KillSwitch.NONE).pulses


def test_a_configured_list_leaves_no_living_engine_out(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path)
    for engine, processes in (("production", 2), ("another", 1)):
        writer = pages.pulse_writer(engine, 0)
        record = Pulse(in_flight=3, processes=processes)
        writer.write(record, now_ns=monotonic_ns(), ttl_ns=3_600_000_000_000)
    sensor = SlotSensor(pages, pulses=("pulse.production.0",))
    found = {reading.name: reading.fault for reading in _pulses(sensor)}
    assert found == {
        "pulse.another.0": None,
        "pulse.production.0": None,
        "pulse.production.1": PageFault.MISSING,
    }
    sensor.close()


def test_a_silent_engine_that_is_not_listed_counts_until_its_process_ends(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path)
    for_an_hour_ns = 3_600_000_000_000
    listed = pages.pulse_writer("production", 0)
    listed.write(Pulse(processes=1), now_ns=monotonic_ns(), ttl_ns=for_an_hour_ns)
    chat, elsewhere = pages.pulse_writer("chat", 0), pages.pulse_writer("elsewhere", 0)
    sensor = SlotSensor(pages, pulses=("pulse.production.0",))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (root,) = process_ids([process.pid])
        hidden = msgspec.structs.replace(root, start_ticks=root.start_ticks + 1)
        for page, its_root, ttl_ns in ((chat, root, 0), (elsewhere, hidden, for_an_hour_ns)):
            page.write(Pulse(root=its_root), now_ns=monotonic_ns(), ttl_ns=ttl_ns)
        found = {reading.name: reading.fault for reading in _pulses(sensor)}
        assert found["pulse.chat.0"] is PageFault.EXPIRED, "silent since before the agent started"
        elsewhere.write(Pulse(root=hidden), now_ns=monotonic_ns(), ttl_ns=0)
        found = {reading.name: reading.fault for reading in _pulses(sensor)}
        assert found["pulse.chat.0"] is PageFault.EXPIRED
    assert {reading.name: reading.fault for reading in _pulses(sensor)} == {
        "pulse.production.0": None,
        "pulse.elsewhere.0": PageFault.EXPIRED,
    }, "a process of another pid namespace was never seen: it may live"
    sensor.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_the_owner_of_a_page_that_is_not_believed_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PageDirectory.create(tmp_path).pulse_writer("production", 0)
    believed = PageOwners(production=frozenset({os.geteuid() + 1}))
    (tmp_path / "pulse.production.0").chmod(0o644)
    os.chown(tmp_path / "pulse.production.0", os.geteuid() + 2, -1)
    sensor = SlotSensor(PageDirectory(tmp_path, believed), pulses=())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [reading.fault for reading in _pulses(sensor)] == [PageFault.FOREIGN]
    (said,) = [one.getMessage() for one in caplog.records]
    assert "pulse.production.0 belongs to user" in said
    sensor.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_names_that_strangers_make_up_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = PageDirectory.create(tmp_path)
    sensor = SlotSensor(pages, pulses=("pulse.production.0",))
    for beat in range(10):
        made = [tmp_path / f"pulse.e{beat}x{number}.0" for number in range(20)]
        for path in made:
            path.touch()
            os.chown(path, os.geteuid() + 2, -1)
        os.utime(tmp_path, ns=(beat, beat))
        assert PageFault.FOREIGN in {reading.fault for reading in _pulses(sensor)}
        for path in made:
            path.unlink()
    os.utime(tmp_path, ns=(10, 10))
    _pulses(sensor)
    assert set(sensor._pulses) == {"pulse.production.0"}
    assert sensor._strangers == set()
    assert len(caplog.records) == 60, "a burst, of two hundred"
    sensor.close()
