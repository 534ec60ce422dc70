"""A guest process that owes memory as soon as production's KV is full, and gives none back. The two
share a control group, which has room."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.page_beats import shared_group
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Guest, PageDirectory, PageWriter, Pulse
from harvester.contracts.process import process_ids
from tests.integration.test_agent_process import CONFIG

_TTL_NS = 60 * 10**9


@dataclass
class OwingGuest:
    process: "subprocess.Popen[bytes]"
    pulse: PageWriter[Pulse]
    page: PageWriter[Guest]

    def speak(self, *, kv_usage_ratio: float) -> None:
        """Writes production's and the guest's pages."""
        now_ns = monotonic_ns()
        pulse = Pulse(model_samples=1000, kv_usage_ratio=kv_usage_ratio)
        self.pulse.write(pulse, now_ns=now_ns, ttl_ns=_TTL_NS)
        named = process_ids([self.process.pid])
        record = Guest(kv_tokens_total=1000, kv_tokens=900, processes=named)
        self.page.write(record, now_ns=now_ns, ttl_ns=_TTL_NS)


def sharing_config(root: Path) -> str:
    """An agent's configuration whose slot has the group."""
    group = shared_group(root / "group")
    return CONFIG.replace("    engine_url", f"    memory_group: {group}\n    engine_url")


@contextmanager
def owing_guest(pages: PageDirectory) -> Iterator[OwingGuest]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    guest = OwingGuest(process, pages.pulse_writer("prod", 0), pages.guest_writer())
    try:
        yield guest
    finally:
        process.kill()
        process.wait()
        guest.pulse.close()
        guest.page.close()
