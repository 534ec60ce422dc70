"""Reads a slot's pages and the kill switch into one sample. It judges nothing."""

from pathlib import Path

from harvester.contracts.clock import monotonic_ns
from harvester.contracts.ids import checked_name
from harvester.contracts.page import Guest, PageDirectory, PageName, PageReader, Pulse
from harvester.policy.sample import GuestReading, KillSwitch, LeaseView, PulseReading, SlotSample

_SWITCH_BYTES = 64


class KillSwitchFile:
    """An operator's file, which works while everything else is down. An empty file drains."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> KillSwitch:
        try:
            with self.path.open("rb") as file:
                text = file.read(_SWITCH_BYTES).strip()
        except FileNotFoundError:
            return KillSwitch.NONE
        except OSError:
            return KillSwitch.DRAIN
        return KillSwitch.HOLD if text == b"hold" else KillSwitch.DRAIN


class SlotSensor:
    def __init__(
        self, directory: PageDirectory, *, pulses: tuple[str, ...], owners: frozenset[int]
    ) -> None:
        """`pulses` are the pages that must be there; none means whichever are."""
        self._directory = directory
        self._expected = pulses
        self._owners = owners
        self._pulses: dict[str, PageReader[Pulse]] = {}
        self._guest = PageReader(directory.path / PageName.GUEST, Guest, owners=owners)
        self.seen_ns: dict[str, int] = {}
        """Stamp of the newest whole reading of each source."""

    def sample(self, *, lease: LeaseView, kill_switch: KillSwitch) -> SlotSample:
        now_ns = monotonic_ns()
        guest = self._guest.read(now_ns=now_ns)
        if guest.record is not None:
            self.seen_ns[PageName.GUEST] = guest.stamp_ns
        names = self._expected or self._directory.pulse_names()
        return SlotSample(
            pulses=tuple(self._pulse(name, now_ns) for name in names),
            guest=GuestReading(record=guest.record, fault=guest.fault),
            lease=lease,
            kill_switch=kill_switch,
        )

    def close(self) -> None:
        for reader in self._pulses.values():
            reader.close()
        self._guest.close()

    def _pulse(self, name: str, now_ns: int) -> PulseReading:
        reader = self._pulses.get(name)
        if reader is None:
            path = self._directory.path / checked_name(name, what="pulse page")
            reader = self._pulses[name] = PageReader(path, Pulse, owners=self._owners)
        reading = reader.read(now_ns=now_ns)
        if reading.record is not None:
            self.seen_ns[name] = reading.stamp_ns
        return PulseReading(name=name, record=reading.record, fault=reading.fault)
