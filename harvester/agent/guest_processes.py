"""Acts on a guest's processes, which the guest itself names: lifts them, or ends them.

Under MPS a guest is ended in two steps: the daemon ends its work on the GPU, and only then comes a
signal. Lifting is for the idle group and the idle class alone: a client of MPS keeps the share that
it began with, and a control group that somebody else made idle is theirs to change.

A page is written by its guest, so a name in it is believed only for a process of the page's owner
that began when the guest says: a number alone would be somebody else's in another pid namespace, or
a moment later. Where the agent sees no such process (in another pod, say), nothing happens.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from harvester.agent.mps import MpsWatch
from harvester.contracts.errors import Unsupported
from harvester.contracts.idle_groups import IdleGroups
from harvester.contracts.process import ProcessId, start_ticks
from harvester.contracts.scheduling_group import is_under_idle, scheduling_group

_log = logging.getLogger(__name__)


class _Place(StrEnum):
    GROUP = "idle-group"
    CLASS = "idle"


class _Lifted(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessId
    out_of: _Place


class GuestProcesses:
    def __init__(
        self,
        page: Path,
        *,
        memo: Path,
        mps: MpsWatch | None = None,
        groups: IdleGroups | None = None,
    ) -> None:
        """`page` is the guest's page; its owner is the guest's user. `memo` names what is lifted,
        so that an agent that comes after this one can settle it."""
        self._mps = mps
        self._groups = groups or IdleGroups()
        self._ending: threading.Thread | None = None
        self._page = page
        self._memo = memo
        self._lifted = _remembered(memo)

    def lift(self, processes: Iterable[ProcessId]) -> bool:
        """Out of the idle group or the idle class. False where any thread could not be."""
        done = True
        for process in self._own(processes):
            try:
                self._lift(process)
            except OSError as error:
                _log.warning("guest process %s is not lifted: %s", process.pid, error.strerror)
                done = False
            except Unsupported as error:
                _log.warning("guest process %s is not lifted: %s", process.pid, error)
                done = False
        self._remember()
        return done

    def settle(self) -> None:
        """Back into it, with the threads that they have made since."""
        for lifted in self._lifted:
            if start_ticks(lifted.process.pid) != lifted.process.start_ticks:
                continue
            try:
                self._put_back(lifted)
            except (OSError, Unsupported) as error:
                _log.error("guest process %s stays lifted: %s", lifted.process.pid, error)
        self._lifted.clear()
        self._remember()

    def kill(self, processes: Iterable[ProcessId]) -> bool:
        """False where none could be; under MPS it is under way, beside the beat, where True."""
        own = self._own(processes)
        if self._mps is None:
            return self._signal(own)
        if not own or (self._ending is not None and self._ending.is_alive()):
            return False
        self._ending = threading.Thread(target=self._end_under_mps, args=(self._mps, own))
        self._ending.start()
        return True

    def close(self) -> None:
        """Back into its class what is lifted, and no thread left behind."""
        self.settle()
        if self._ending is not None:
            self._ending.join()

    def _end_under_mps(self, mps: MpsWatch, own: list[ProcessId]) -> None:
        if mps.terminate(process.pid for process in own):
            self._signal(own)
            return
        # A signal in the middle of a kernel may take production's server with it.
        _log.error(
            "the guest lives on: MPS did not end its work on the GPU, and a signal is unsafe"
        )

    def _signal(self, own: list[ProcessId]) -> bool:
        killed = False
        for process in own:
            try:
                # The descriptor stands for the process that is checked, whatever ends meanwhile.
                descriptor = os.pidfd_open(process.pid)
            except OSError:
                continue
            try:
                if start_ticks(process.pid) == process.start_ticks:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed = True
            except OSError as error:
                _log.error("guest process %s lives on: %s", process.pid, error.strerror)
            finally:
                os.close(descriptor)
        return killed

    def _lift(self, process: ProcessId) -> None:
        if self._groups.lift(process.pid):
            self._lifted.add(_Lifted(process=process, out_of=_Place.GROUP))
            return
        group = scheduling_group(process.pid)
        if is_under_idle(group):
            raise Unsupported(f"its control group {group} is its operator's, and idle")
        for thread in _threads(process.pid):
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                self._lifted.add(_Lifted(process=process, out_of=_Place.CLASS))

    def _put_back(self, lifted: "_Lifted") -> None:
        if lifted.out_of is _Place.GROUP:
            self._groups.settle(lifted.process.pid)
            return
        for thread in _threads(lifted.process.pid):
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

    def _own(self, processes: Iterable[ProcessId]) -> list[ProcessId]:
        try:
            owner = self._page.lstat().st_uid
        except OSError:
            return []
        return [
            process
            for process in processes
            if process.pid > 1
            and process.pid != os.getpid()
            and _owner(process.pid) == owner
            and start_ticks(process.pid) == process.start_ticks
        ]

    def _remember(self) -> None:
        try:
            if self._lifted:
                self._memo.write_bytes(msgspec.json.encode(tuple(self._lifted)))
            else:
                self._memo.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: %s", self._memo, error.strerror)


def _remembered(memo: Path) -> set[_Lifted]:
    try:
        return set(msgspec.json.decode(memo.read_bytes(), type=tuple[_Lifted, ...]))
    except (OSError, msgspec.DecodeError):
        return set()


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
