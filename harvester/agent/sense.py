"""Reads a slot's pages into one sample. It judges nothing."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from harvester.agent.guest_lock import GUEST_LOCK
from harvester.agent.mps_watch import MpsWatch
from harvester.agent.shared_memory import SegmentPair, SharedMemory
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import Epoch
from harvester.contracts.page import (
    Guest,
    PageDirectory,
    PageFault,
    PageName,
    PageReader,
    Pulse,
    Reading,
)
from harvester.contracts.page.owners import user_name
from harvester.contracts.process import ProcessId, process_ids
from harvester.platform.file_lock import lock_holder
from harvester.platform.scheduling_group import is_under_idle, scheduling_group
from harvester.policy.sample import (
    FOREIGN_PULSE,
    MAX_PULSES,
    GuestReading,
    KillSwitch,
    LeaseView,
    PulseReading,
    SlotSample,
    expected,
)

_log = logging.getLogger(__name__)

_RELIST_BEATS = 5
_MOST_EPOCH = 10**15


def _runs_below_production(process: ProcessId) -> bool:
    """Queried from the kernel: a supervisor may have isolated the guest from outside."""
    try:
        if os.sched_getscheduler(process.pid) == os.SCHED_IDLE:
            return True
        return is_under_idle(scheduling_group(process.pid))
    except OSError:
        return False


class SlotSensor:
    def __init__(
        self,
        directory: PageDirectory,
        *,
        pulses: tuple[str, ...],
        memory: SharedMemory | SegmentPair | None = None,
        mps: MpsWatch | None = None,
    ) -> None:
        """`pulses` are required, besides pulses that are present or announced."""
        self._memory = memory
        self._mps = mps
        self._directory = directory
        self._expected = frozenset(pulses)
        self._present: tuple[str, ...] = ()
        self._listed_ns = -1
        self._beats_listed = 0
        self._leaves = self.listed = False
        self._pulses: dict[str, PageReader[Pulse]] = {}
        self._roots: dict[str, tuple[ProcessId | None, bool]] = {}
        """Root process of each pulse's last record, and whether it was seen to live: in another pid
        namespace it is not, and its absence shows nothing."""
        self._guest, self._leaving = directory.guest_reader(), directory.leaving_reader()
        self._guest_processes: tuple[ProcessId, ...] = ()
        self._starting: tuple[ProcessId, ...] = ()
        self._lock_path = directory.path / GUEST_LOCK
        self._strangers: set[Path] = set()
        self._strangers_logged = EventLimit()
        self.seen_ns: dict[str, int] = {}
        """Stamp of the newest whole reading of each source."""

    def sample(self, *, lease: LeaseView, kill_switch: KillSwitch) -> SlotSample:
        now_ns = monotonic_ns()
        names = self._names()
        guest = self._guest_page(now_ns)
        if self.listed:
            for name in self._pulses.keys() - names:
                reader = self._pulses.pop(name)
                self._roots.pop(name, None)
                reader.close()
                self._strangers.discard(reader.path)
        present = self._pulses_of(names, now_ns)
        ended = [x.name for x in present if x.fault is PageFault.EXPIRED and self._ended(x.name)]
        pulses = expected(present, self._expected, frozenset(ended))
        return SlotSample(
            pulses=pulses,
            guest=self._guest_reading(guest),
            lease=lease,
            kill_switch=kill_switch,
            memory=None if self._memory is None else self._memory.read(),
            mps=None if self._mps is None else self._mps.read(),
            guest_kv=self._memory.read_guest() if isinstance(self._memory, SegmentPair) else None,
        )

    def _log_stranger(self, path: Path, fault: PageFault | None) -> None:
        """Log once which user owns a page that is not believed."""
        if fault is not PageFault.FOREIGN:
            if self._strangers:
                self._strangers.discard(path)
        elif path not in self._strangers:
            self._strangers.add(path)
            if not self._strangers_logged.admits(now=monotonic_ns() * 1e-9):
                return
            with suppress(OSError):
                user = user_name(path.lstat().st_uid)
                _log.warning(
                    "%s belongs to user %s, which `owners` does not name for it", path, user
                )

    def close(self) -> None:
        for reader in self._pulses.values():
            reader.close()
        self._guest.close()
        self._leaving.close()

    def _guest_page(self, now_ns: int) -> Reading[Guest]:
        """The guest's own page, or the page that announces its stop."""
        guest = self._guest.read(now_ns=now_ns)
        if self._leaving.sequence() is None and not self._leaves:
            return guest
        leaving = self._leaving.read(now_ns=now_ns)
        if leaving.record is None:
            return guest
        another = guest.record is not None and guest.record.processes != leaving.record.processes
        return guest if another else leaving

    def _guest_reading(self, found: Reading[Guest]) -> GuestReading:
        self._log_stranger(self._guest.path, found.fault)
        if found.record is None:
            self._find_silent_guest(found.fault)
            living = [each for each in self._guest_processes if each.lives()]
            below = any(map(_runs_below_production, living))
            lives = bool(living) or any(each.lives() for each in self._starting)
            return GuestReading(fault=found.fault, runs_below_production=below, lives=lives)
        self.seen_ns[PageName.GUEST] = found.stamp_ns
        self._guest_processes = found.record.processes
        return GuestReading(record=found.record)

    def _find_silent_guest(self, fault: PageFault | None) -> None:
        """Finds processes of a guest that fell silent before this agent started, and the process
        that starts a guest without a page yet."""
        if not self.listed:
            return
        if fault is PageFault.EXPIRED and not self._guest_processes:
            left = self._guest.read_left().record
            self._guest_processes = left.processes if left is not None else ()
        self._starting = ()
        if fault is PageFault.MISSING and (holder := lock_holder(self._lock_path)) is not None:
            self._starting = process_ids([holder])

    def _names(self) -> tuple[str, ...]:
        """Pulse files expected or present. The directory is listed again when it has changed, and
        sometimes besides: two changes within one tick of the file system's clock look like one. A
        removed directory holds no pulses."""
        try:
            changed_ns = self._directory.path.stat().st_mtime_ns
        except OSError:
            self.listed = True
            return tuple(sorted(self._expected))
        self._beats_listed += 1
        self.listed = changed_ns != self._listed_ns or self._beats_listed >= _RELIST_BEATS
        if self.listed:
            self._present = tuple(sorted(self._expected.union(self._directory.pulse_names())))
            self._listed_ns = changed_ns
            self._leaves = os.access(self._leaving.path, os.F_OK)
            self._beats_listed = 0
        return self._present

    def _pulses_of(self, names: tuple[str, ...], now_ns: int) -> tuple[PulseReading, ...]:
        # Any user may put files into the directory: too many close the gate, and neither reach the
        # grant page nor stop the agent.
        if len(names) > MAX_PULSES:
            return (PulseReading(name=FOREIGN_PULSE, fault=PageFault.FOREIGN),)
        return tuple(self._pulse(name, now_ns) for name in names)

    def _pulse(self, name: str, now_ns: int) -> PulseReading:
        reader = self._pulses.get(name)
        if reader is None:
            reader = self._pulses[name] = self._directory.pulse_reader(name)
        reading = reader.read(now_ns=now_ns)
        record, known = reading.record, self._roots.get(name)
        if record is not None:
            self.seen_ns[name] = reading.stamp_ns
        elif reading.fault is PageFault.EXPIRED and known is None:
            record = reader.read_left().record  # Silent since before this agent started.
        if record is not None and (known is None or known[0] != record.root):
            self._roots[name] = record.root, record.root is not None and record.root.lives()
        self._log_stranger(reader.path, reading.fault)
        return PulseReading(name=name, record=reading.record, fault=reading.fault)

    def _ended(self, name: str) -> bool:
        root, seen = self._roots.get(name, (None, False))
        return root is not None and seen and not root.lives()


def epoch_left(directory: PageDirectory) -> Epoch:
    """The highest epoch on the grant and guest pages, 0 if none. A guest's epoch counts only up to
    `_MOST_EPOCH`, which no agent reaches: a grant above the wire's integers could not be written.
    """
    grant = directory.grant_reader().read_left().record
    guest = directory.guest_reader().read_left().record
    epoch = guest.epoch if guest is not None and guest.epoch <= _MOST_EPOCH else 0
    return Epoch(max(0, grant.epoch if grant else 0, epoch))
