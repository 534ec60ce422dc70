"""A page between two real processes, without any pause between writes or reads."""

import subprocess
import sys
from pathlib import Path

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageFault, PageReader, Pulse

RECORDS = 200
"""Met by the reader before the writer ends, however slow the machine is."""
TTL_NS = 3_600_000_000_000

WRITER = """
import sys
from pathlib import Path
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageWriter, Pulse

writer = PageWriter(Path(sys.argv[1]), Pulse)
count = 0
enough = Path(sys.argv[2])
while not enough.exists():
    count += 1
    # Records of changing length whose fields belong together.
    ttft = (float(count),) * (count % 33)
    pulse = Pulse(in_flight=count, steps_total=2 * count, ttft_s_recent=ttft)
    writer.write(pulse, now_ns=monotonic_ns(), ttl_ns=int(sys.argv[3]))
print(count)
"""


def test_a_reader_meets_only_whole_records_in_order(tmp_path: Path) -> None:
    path, enough = tmp_path / "pulse.prod.0", tmp_path / "enough"
    reader = PageReader(path, Pulse)
    counts: list[int] = []
    before: set[PageFault] = set()
    """Faults of a page that has no first record yet."""
    faults: list[PageFault] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(enough), str(TTL_NS)],
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        while writer.poll() is None:
            reading = reader.read(now_ns=monotonic_ns())
            if reading.record is None:
                assert reading.fault is not None
                if counts:
                    faults.append(reading.fault)
                else:
                    before.add(reading.fault)
                continue
            count = reading.record.in_flight
            assert reading.record.steps_total == 2 * count
            assert reading.record.ttft_s_recent == (float(count),) * (count % 33)
            if not counts or counts[-1] != count:
                counts.append(count)
                if len(counts) == RECORDS:
                    enough.touch()
        assert writer.stdout is not None
        written = int(writer.stdout.read())
    assert counts == sorted(counts)
    assert reader.read().record == Pulse(
        in_flight=written, steps_total=2 * written, ttft_s_recent=(float(written),) * (written % 33)
    )
    assert len(counts) >= RECORDS, f"of {written} records only {len(counts)} were met"
    torn = faults.count(PageFault.TORN)
    assert before <= {PageFault.MISSING, PageFault.EXPIRED, PageFault.TORN}
    assert set(faults) <= {PageFault.TORN}
    assert torn < len(counts), f"{torn} torn readings beside {len(counts)} records"
