import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from harvester.agent.lease_file import LeaseFile
from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId, TenantId
from harvester.contracts.wire.leases import EndReason
from harvester.policy.lease_table import SlotLease

LEASE = SlotLease(
    lease=LeaseId("slot0.7.secret"),
    slot=SlotId("slot0"),
    tenant=TenantId("t"),
    job=JobId("j"),
    epoch=Epoch(7),
    request_id="r",
    ends_s=5.0,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slot0.lease"


def test_the_saved_state_is_read_by_the_next_agent_and_by_no_other_user(path: Path) -> None:
    LeaseFile(path).keep(LEASE)
    assert LeaseFile(path).read(ends_s=99.0) == replace(LEASE, ends_s=99.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["slot0.lease"]


def test_bytes_on_disk_are_the_agreed_ones(path: Path) -> None:
    wire = (
        b'{"lease":"slot0.7.secret","slot":"slot0","epoch":7,"tenant":"t","job":"j",'
        b'"request_id":"r"}'
    )
    LeaseFile(path).keep(LEASE)
    assert path.read_bytes() == wire
    path.write_bytes(wire[:-1] + b',"later":1}')
    assert LeaseFile(path).read(ends_s=5.0) == LEASE


@pytest.mark.parametrize(
    "left",
    [
        *(b"", b"{", b"\xff" * 9000, b'{"lease": 4}', b"[]"),
        b'{"lease": "\xff"}',
        b'{"x": ' + b"[" * 4000,
    ],
)
def test_a_torn_record_is_no_lease(path: Path, left: bytes) -> None:
    path.write_bytes(left)
    assert LeaseFile(path).read(ends_s=1.0) is None


@pytest.mark.parametrize("live", [None, replace(LEASE, ending=EndReason.DRAIN)])
def test_a_lease_that_is_over_or_ending_is_not_taken_up_again(
    path: Path, live: SlotLease | None
) -> None:
    file = LeaseFile(path)
    file.keep(LEASE)
    file.follow(LEASE)
    assert path.exists()
    file.follow(live)
    assert not path.exists()


def test_a_failed_write_leaves_the_record_before_it(path: Path) -> None:
    file = LeaseFile(path)
    file.keep(LEASE)
    (path.parent / ".tmp-slot0.lease").mkdir()
    with pytest.raises(OSError):
        file.keep(replace(LEASE, lease=LeaseId("slot0.9.other")))
    assert LeaseFile(path).read(ends_s=5.0) == LEASE
