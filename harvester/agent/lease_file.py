"""The lease on one slot, as JSON on disk for a restarted agent; apart as its format is durable."""

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from harvester.contracts.errors import UNDECODABLE
from harvester.contracts.ids import LeaseId
from harvester.platform import whole_file
from harvester.policy.lease_table import LeaseRecord, SlotLease

_MAX_BYTES = 4096
_log = logging.getLogger(__name__)


class LeaseFile:
    """Readable by its owner only: a lease's id suffices to end the lease."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: LeaseId | None = None

    def read(self, *, ends_s: float) -> SlotLease | None:
        """The recorded lease, in force until `ends_s`. Raises OSError where it cannot be read."""
        try:
            with self._path.open("rb") as file:
                record = msgspec.json.decode(file.read(_MAX_BYTES), type=LeaseRecord)
        except FileNotFoundError:
            return None
        except UNDECODABLE as error:
            _log.warning("%s is no record of a lease and is left out: %s", self._path, error)
            return None
        self._kept = record.lease
        return SlotLease(**msgspec.structs.asdict(record), ends_s=ends_s)

    def keep(self, lease: SlotLease) -> None:
        """Whole or not at all. Raises OSError; then the lease must not be granted."""
        if self._kept == lease.lease:
            return
        record = msgspec.convert(lease, LeaseRecord, from_attributes=True)
        whole_file.replace(self._path, msgspec.json.encode(record))
        self._kept = lease.lease

    def follow(self, live: SlotLease | None) -> None:
        """Drop the record of an ended lease. If that fails, the epoch still shows the end."""
        over = live is None or live.lease != self._kept or live.ending is not None
        if self._kept is None or not over:
            return
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._kept = None
