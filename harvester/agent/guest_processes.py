"""Acts on the processes that a guest names on its page: lifts them out of isolation, or ends them.

Under MPS the daemon ends a guest's GPU work before any signal. Lifting applies to the idle group
and the idle class: a client of MPS keeps its share, and an operator's idle control group stays.

A named process is believed only if it belongs to the page's owner and began when the page says: the
pid may be another process's in another pid namespace, or later. Processes that a pulse names as
production's, their ancestors and descendants are never acted on. Every action has an outcome, and a
failed one its reason.
"""

import logging
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harvester.agent.mps_watch import MpsWatch
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import UNDECODABLE, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.process import ProcessId, lineage, start_ticks
from harvester.platform import whole_file
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.scheduling_group import is_under_idle, scheduling_group
from harvester.policy.sample import ActionOutcome, GuestAction

_log = logging.getLogger(__name__)

_MAX_FAULT = 300
_SETTLE_AGAIN_NS = 5_000_000_000
_LISTINGS = 8
_MOST_NAMED = 64
"""Processes of a guest's page that are looked up; each costs time."""
_DYING_NS = 10_000_000_000
"""Bound on the wait for killed processes: the kernel needs time to give back much memory."""


class _Lifted(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessId
    out_of: IsolationBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Processes that a guest names, sorted by whether they can be acted on."""

    own: tuple[ProcessId, ...]
    """Running processes that belong to the guest."""
    gone: tuple[ProcessId, ...]
    """Processes of the guest that have ended."""
    faults: tuple[str, ...]
    """Why the other processes cannot be acted on."""


@dataclass(slots=True)
class _Kill:
    """A kill under way: signalled processes that have not ended yet, by pidfd."""

    ended: list[ProcessId]
    faults: list[str]
    until_ns: int
    dying: dict[int, ProcessId] = field(default_factory=dict)


class GuestProcesses:
    def __init__(self, page: Path, *, memo: Path, mps: MpsWatch | None = None) -> None:
        """`page` is the guest's page; its owner is the guest's user. `memo` is the file that
        records lifted processes, so that the next agent can settle them."""
        self._mps = mps
        self._groups = IdleGroups()
        self._ending: threading.Thread | None = None
        self._page = page
        self._memo = memo
        self._lifted = _remembered(memo)
        self._settle_again_ns = 0
        self._production: frozenset[ProcessId] = frozenset()
        self._named: frozenset[ProcessId] = frozenset()
        self._seen: frozenset[ProcessId] = frozenset()
        self._kill: _Kill | None = None
        self._killing = threading.Lock()
        """Guards `_kill`: under MPS a kill runs in a thread beside the beat."""
        self._outcomes: deque[ActionOutcome] = deque()
        self.memo_fault = ""
        """Why the record of lifted processes cannot be written."""

    def record_named(self, named: tuple[ProcessId, ...]) -> None:
        """Record the processes that the guest names and that exist here: a process that is missing
        later has ended, and is not merely in another pid namespace."""
        if (known := frozenset(named[:_MOST_NAMED])) != self._named:
            self._named = known
            here = {one for one in known if one.lives()}
            self._seen = frozenset(here | (self._seen & known))

    def exclude(self, production: Iterable[ProcessId]) -> None:
        """Exclude production's root processes and their ancestors and descendants from every
        action. Processes stay excluded while they live, even if no pulse names them."""
        new = frozenset(production) - self._production
        if new:
            self._production = new.union(one for one in self._production if one.lives())

    def outcomes(self) -> tuple[ActionOutcome, ...]:
        """Outcomes of actions that became known since the last call."""
        with self._killing:
            kill = self._kill
            if kill is not None and (self._has_ended(kill) or monotonic_ns() > kill.until_ns):
                self._conclude(kill)
        if self._settle_again_ns and monotonic_ns() >= self._settle_again_ns:
            self.settle()
        if self.memo_fault or (self._lifted and not os.access(self._memo, os.F_OK)):
            self._remember()
        return tuple(self._outcomes.popleft() for _ in range(len(self._outcomes)))

    def lift(self, processes: Iterable[ProcessId]) -> None:
        """Move processes out of the idle group or the idle class."""
        found = self._find(processes)
        faults, lifted = list(found.faults), []
        self._settle_again_ns = 0
        for process in found.own:
            try:
                self._lift(process)
                lifted.append(process)
            except (OSError, Unsupported) as error:
                faults.append(f"process {process.pid}: {getattr(error, 'strerror', error)}")
        self._remember()
        self._note(GuestAction.LIFT, lifted, faults)

    def settle(self, *, records: bool = True) -> None:
        """Move lifted processes and their new threads back; failed moves are tried again. Without
        `records` the record stays as it is."""
        faults, settled, left = [], [], set()
        for lifted in self._lifted:
            process = lifted.process
            if not process.lives():
                continue
            try:
                self._put_back(lifted)
                settled.append(process)
            except (OSError, Unsupported) as error:
                faults.append(f"process {process.pid}: {error}")
                left.add(lifted)
        self._lifted = left
        self._settle_again_ns = monotonic_ns() + _SETTLE_AGAIN_NS if left else 0
        if records:
            self._remember()
        self._note(GuestAction.SETTLE, settled, faults)

    def kill(self, processes: Iterable[ProcessId]) -> None:
        """Send SIGKILL; under MPS a thread first ends their GPU work, beside the beat."""
        found = self._find(processes)
        if self._mps is None:
            with self._killing:
                self._signal(found)
        elif self._ending is None or not self._ending.is_alive():
            self._ending = threading.Thread(target=self._end_under_mps, args=(self._mps, found))
            self._ending.start()

    def close(self, *, wait: bool = True, records: bool = True) -> None:
        """Settle the lifted processes, join the kill thread and close all pidfds. Without `wait`
        a thread that still asks the MPS daemon is left to end by itself; without `records` the
        record of lifted processes is another agent's."""
        if self._lifted:
            self.settle(records=records)
        if self._ending is not None:
            if not wait and self._ending.is_alive():
                return
            self._ending.join()
        with self._killing:
            if self._kill is not None:
                self._conclude(self._kill)

    def _end_under_mps(self, mps: MpsWatch, found: _Found) -> None:
        if mps.terminate(process.pid for process in found.own):
            with self._killing:
                self._signal(found)
            return
        # A signal in the middle of a kernel may take production's server with it.
        fault = "MPS did not end its work on the GPU, and a signal is unsafe"
        self._note(GuestAction.KILL, [], [fault])

    def _signal(self, found: _Found) -> None:
        if self._kill is not None:
            # A kill is under way; its processes need no second signal.
            return
        kill = _Kill(list(found.gone), list(found.faults), monotonic_ns() + _DYING_NS)
        for process in found.own:
            try:
                descriptor = _signalled(process)
            except OSError as error:
                kill.faults.append(f"process {process.pid}: {error.strerror}")
                continue
            if descriptor is None:
                kill.ended.append(process)
            else:
                kill.dying[descriptor] = process
        if self._has_ended(kill):
            self._conclude(kill)
        else:
            self._kill = kill

    def _has_ended(self, kill: _Kill) -> bool:
        """Whether every signalled process has ended; moves ended ones from `dying` to `ended`."""
        for descriptor in _ended(kill.dying):
            kill.ended.append(kill.dying.pop(descriptor))
            os.close(descriptor)
        return not kill.dying

    def _conclude(self, kill: _Kill) -> None:
        """Report a kill; signalled processes that still run count as faults."""
        self._kill = None
        self._has_ended(kill)
        for descriptor, process in kill.dying.items():
            kill.faults.append(f"process {process.pid}: signalled, and has not ended")
            os.close(descriptor)
        self._note(GuestAction.KILL, kill.ended, kill.faults)

    def _note(self, action: GuestAction, processes: list[ProcessId], faults: list[str]) -> None:
        fault = "; ".join(faults)[:_MAX_FAULT]
        self._outcomes.append(ActionOutcome(action=action, processes=tuple(processes), fault=fault))

    def _lift(self, process: ProcessId) -> None:
        if self._groups.lift(process.pid):
            self._lifted.add(_Lifted(process=process, out_of=IsolationBackend.IDLE_GROUP))
            return
        group = scheduling_group(process.pid)
        if is_under_idle(group):
            raise Unsupported(f"its control group {group} is idle and belongs to its operator")
        for _ in _moved(process.pid, idle=False):
            self._lifted.add(_Lifted(process=process, out_of=IsolationBackend.IDLE))

    def _put_back(self, lifted: "_Lifted") -> None:
        if lifted.out_of is IsolationBackend.IDLE_GROUP:
            self._groups.settle(lifted.process.pid)
            return
        deque(_moved(lifted.process.pid, idle=True), maxlen=0)

    def _find(self, processes: Iterable[ProcessId]) -> _Found:
        owner = _owner_of(self._page)
        own, gone, faults = [], [], []
        for process in processes:
            ticks = start_ticks(process.pid)
            if owner is None:
                faults.append("the guest has no page")
            elif process.pid <= 1 or process.pid == os.getpid():
                faults.append(f"process {process.pid}: none of a guest's")
            elif ticks != process.start_ticks and process in self._seen:
                gone.append(process)
            elif ticks is None:
                faults.append(f"process {process.pid}: not seen here; another pid namespace?")
            elif ticks != process.start_ticks:
                faults.append(f"process {process.pid}: another one here; another pid namespace?")
            elif _owner_of(Path(f"/proc/{process.pid}")) != owner:
                faults.append(f"process {process.pid}: not of the user whose page names it")
            elif self._is_production(process.pid):
                faults.append(f"process {process.pid}: production's, and not the guest's")
            else:
                own.append(process)
        if not (own or gone or faults):
            faults.append("the guest names no process")
        return _Found(own=tuple(own), gone=tuple(gone), faults=tuple(faults))

    def _is_production(self, pid: int) -> bool:
        """Whether the process is a live production root, or an ancestor or descendant of one."""
        line = lineage(pid)
        return any(
            root.pid in line or pid in lineage(root.pid)
            for root in self._production
            if root.lives()
        )

    def _remember(self) -> None:
        try:
            if self._lifted:
                whole_file.replace(self._memo, msgspec.json.encode(tuple(self._lifted)))
            else:
                self._memo.unlink(missing_ok=True)
        except OSError as error:
            fault = f"{self._memo.name}: {error.strerror}"
            if fault != self.memo_fault:
                _log.error("the list of lifted processes cannot be written: %s", fault)
            self.memo_fault = fault
        else:
            self.memo_fault = ""


def _remembered(memo: Path) -> set[_Lifted]:
    try:
        return set(msgspec.json.decode(memo.read_bytes(), type=tuple[_Lifted, ...]))
    except (OSError, *UNDECODABLE):
        return set()


def _owner_of(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def _signalled(process: ProcessId) -> int | None:
    """Send SIGKILL to a process and return its pidfd, which stays valid whatever ends meanwhile;
    None if the process has already ended. Raises OSError if the signal is not permitted."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        if process.lives():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return descriptor
    except ProcessLookupError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _ended(descriptors: Iterable[int]) -> list[int]:
    """The pidfds whose process has ended."""
    watch = select.poll()
    for descriptor in descriptors:
        watch.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in watch.poll(0)]


def _moved(pid: int, *, idle: bool) -> Iterator[int]:
    """Move threads into the idle class or out of it, also threads that begin meanwhile; a guest
    that begins threads without end delays nothing."""
    done: set[int] = set()
    for _ in range(_LISTINGS):
        new = set(_threads(pid)) - done
        done |= new
        for thread in new:
            with suppress(ProcessLookupError):  # The process has just ended.
                if (os.sched_getscheduler(thread) == os.SCHED_IDLE) is not idle:
                    policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
                    os.sched_setscheduler(thread, policy, os.sched_param(0))
                    yield thread


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
