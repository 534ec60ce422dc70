"""What one beat reads of a slot."""

import os
import subprocess
import sys
from pathlib import Path

from harvester.agent.sense import SlotSensor
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.ids import Epoch
from harvester.contracts.page import Guest, PageDirectory, PageFault
from harvester.contracts.process import process_ids
from harvester.policy.sample import GuestReading, KillSwitch, LeaseView


def test_who_wrote_an_expired_page_lives_until_its_process_ends(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path)
    sensor = SlotSensor(pages, pulses=())

    def read() -> GuestReading:
        lease = LeaseView(epoch=Epoch(1))
        return sensor.sample(lease=lease, kill_switch=KillSwitch.NONE).guest

    assert read() == GuestReading(fault=PageFault.MISSING)
    writer = pages.guest_writer()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        guest = Guest(processes=process_ids([process.pid]))
        writer.write(guest, now_ns=monotonic_ns(), ttl_ns=3_600_000_000_000)
        assert read() == GuestReading(record=guest)
        writer.write(guest, now_ns=monotonic_ns(), ttl_ns=0)
        assert read() == GuestReading(fault=PageFault.EXPIRED), "it has cores like everybody"
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        assert read() == GuestReading(fault=PageFault.EXPIRED, lives_below=True)
    assert read() == GuestReading(fault=PageFault.EXPIRED)
    sensor.close()
