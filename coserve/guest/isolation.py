"""Isolation backends, which bound the delay from a running guest step. The slack law bounds which
steps run.

Chosen by capability, reported in the grant as `blocking_ratio` and undone on exit:

    idle-group    Linux: the guest in a control group that is idle as a whole, preempted at once;
                  production's threads are ranked as if it were not there
    idle          Linux: the guest's processes in the idle scheduling class, preempted at once
    time-slicing  CUDA's default: contexts take turns on the GPU; a fault ends only its own process
    mps           CUDA, by consent only: both run at once, the guest on a share of the GPU and at
                  lower priority; without fault isolation, see MpsShare
                  under both the guest's threads on the host rank below production's as well
    none          nothing; the whole of a running step delays production

The idle class ranks a process among those of its own scheduling group only, and groups share a core
out by their own weights first: a guest in the idle class in another group than production gets half
of the core. In the same group it is preempted, and the shares of production's own threads are off
by up to a tick: they wait a millisecond for each other where they would not (decision 96).
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from coserve.guest.gpus import ComputeMode, Gpu
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import PREEMPTING, IsolationBackend
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.mps import (
    NO_DAEMON,
    PIPE_VARIABLE,
    PRIORITY_VARIABLE,
    THREADS_VARIABLE,
    MpsControl,
)
from harvester.platform.scheduling_group import CpuPriority, is_below, priorities

_PRIORITY_NORMAL, _PRIORITY_BELOW_NORMAL = "0", "1"
_GROUPS = IdleGroups()
_GPU_GUEST_NICE = 19
"""Nice value of a GPU guest's host threads: a sixtieth of a core beside each of production's. The
idle class is unfit: production may wait for a driver lock that a guest thread holds, and a thread
without CPU time never releases it."""


@dataclass(frozen=True, slots=True)
class MpsShare:
    """A guest's share of a GPU under NVIDIA's Multi-Process Service: consent level `mps`.

    Production and guest are then clients of one server and run at the same time. Its costs, for
    which it is never chosen automatically:

        shared fate   a fault of one client ends the server and every client of it
        one user      clients of another user than the server's wait until it is gone
        no lifting    share and priority are read when a client starts; they cannot change later
        no signals    a client that is killed in the middle of a kernel may leave the server
                      undefined

    A share of the GPU bounds its multiprocessors, not its memory bandwidth.
    """

    control: MpsControl = field(default_factory=MpsControl)
    active_thread_percentage: float = 100.0
    """Most of the GPU's multiprocessors that the guest may use, above 0 to 100."""
    below_normal: bool = True
    """Production's kernels go first where both wait."""
    blocking_ratio: float = 1.0
    """No other ratio has been measured on a GPU yet: configure your own measurement."""

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        return (
            (PIPE_VARIABLE, str(self.control.pipe_directory)),
            (THREADS_VARIABLE, f"{self.active_thread_percentage:g}"),
            (PRIORITY_VARIABLE, _PRIORITY_BELOW_NORMAL if self.below_normal else _PRIORITY_NORMAL),
        )


@dataclass(frozen=True, slots=True)
class Isolation:
    backend: IsolationBackend
    blocking_ratio: float
    """Share of a running guest step that can delay production, 0 to 1."""
    fault_isolated: bool = True
    """Whether a fault of the guest leaves production unharmed."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the guest's processes start with; they end with it, so nothing needs
    undoing.
    """

    @property
    def statement(self) -> str:
        """Summary for reports, with the shared fate that an operator has agreed to."""
        fate = "" if self.fault_isolated else ", shared fate: a fault of the guest ends production"
        return f"{self.backend}, blocking ratio {self.blocking_ratio:g}{fate}"


# A waking normal task preempts the idle class at once, in any step. The remaining delay is the
# switch and the caches that the step has filled: together well under a millisecond.
IDLE_GROUP = Isolation(IsolationBackend.IDLE_GROUP, blocking_ratio=0.02)
IDLE_CLASS = Isolation(IsolationBackend.IDLE, blocking_ratio=0.02)
# CUDA silently joins any MPS daemon that answers in its default directory: without consent, a guest
# gets a pipe directory without a daemon.
_NO_MPS = ((PIPE_VARIABLE, str(NO_DAEMON)),)
NO_ISOLATION = Isolation(IsolationBackend.NONE, blocking_ratio=1.0, environment=_NO_MPS)
# Two contexts with work share the GPU about evenly, in slices of milliseconds. A production step
# that meets a guest step gets half of the GPU until one of them ends: its delay is at most the rest
# of the guest step, and never more than its own time.
TIME_SLICING = Isolation(IsolationBackend.TIME_SLICING, blocking_ratio=1.0, environment=_NO_MPS)


def choose(
    requested: IsolationBackend | None = None,
    *,
    gpus: Sequence[Gpu] = (),
    mps: MpsShare | None = None,
) -> Isolation:
    """The requested backend, or the best of this machine. `gpus`: the guest's GPUs.

    `mps` is an operator's consent; it is used only if MPS is requested. Raises Unsupported if the
    requested backend cannot work here, ConfigError if it lacks that consent.
    """
    if requested is IsolationBackend.NONE:
        return NO_ISOLATION
    if requested is IsolationBackend.MPS:
        return _mps(gpus, mps)
    if gpus:
        return _time_slicing(requested, gpus)
    if requested is IsolationBackend.TIME_SLICING:
        raise Unsupported("time-slicing needs an NVIDIA GPU")
    return _on_cpu(requested)


def _on_cpu(requested: IsolationBackend | None) -> Isolation:
    if not hasattr(os, "SCHED_IDLE"):
        if requested is not None:
            raise Unsupported(f"{requested} needs Linux; choose isolation 'none'")
        return NO_ISOLATION
    if requested is IsolationBackend.IDLE:
        return IDLE_CLASS
    try:
        _GROUPS.check(os.getpid())
    except Unsupported:
        if requested is IsolationBackend.IDLE_GROUP:
            raise
        return IDLE_CLASS
    return IDLE_GROUP


def _time_slicing(requested: IsolationBackend | None, gpus: Sequence[Gpu]) -> Isolation:
    if requested in {IsolationBackend.IDLE, IsolationBackend.IDLE_GROUP}:
        raise Unsupported(
            f"{requested} ranks threads on a core and no kernel on a GPU: leave isolation to "
            "time-slicing, or choose mps"
        )
    for gpu in gpus:
        if gpu.compute_mode is not ComputeMode.DEFAULT:
            raise Unsupported(
                f"GPU {gpu.uuid} is in compute mode {gpu.compute_mode}: no second process may use "
                "it. Without MPS the mode must be Default"
            )
    return TIME_SLICING


def _mps(gpus: Sequence[Gpu], share: MpsShare | None) -> Isolation:
    if share is None:
        raise ConfigError(
            "mps takes an operator's consent: a fault of the guest ends production as well. Name "
            "the daemon's pipe directory to give it"
        )
    if not gpus:
        raise Unsupported("mps needs an NVIDIA GPU")
    for gpu in gpus:
        if gpu.compute_mode is ComputeMode.PROHIBITED:
            raise Unsupported(f"GPU {gpu.uuid} is in compute mode {gpu.compute_mode}")
    # Without a daemon CUDA starts anyway, silently time-sliced.
    share.control.servers()
    return Isolation(
        IsolationBackend.MPS,
        blocking_ratio=share.blocking_ratio,
        fault_isolated=False,
        environment=share.environment,
    )


def apply_to_process(isolation: Isolation, pid: int = 0, *, guest: int = 0) -> None:
    """Put a process (0: this one) and every thread of it under the backend. Raises Unsupported.

    `guest` is the first process of its guest; 0 if it is that process itself. On the GPU itself a
    backend holds from a process's first call of CUDA: `Isolation.environment`. Children and later
    threads inherit it, so call this before an engine starts its own.
    """
    if isolation.backend is IsolationBackend.IDLE_GROUP:
        pid = pid or os.getpid()
        _GROUPS.enter(pid, guest=guest or pid)
    elif isolation.backend is IsolationBackend.IDLE:
        _set_priority(pid, os.SCHED_IDLE)
    elif isolation.backend in {IsolationBackend.TIME_SLICING, IsolationBackend.MPS}:
        _set_priority(pid, os.SCHED_BATCH, nice=_GPU_GUEST_NICE)


def lift_from_process(pid: int = 0) -> None:
    """Return a process to normal scheduling, for a reclaim that must not wait behind production, or
    at the end.

    Nothing lifts a process on a GPU: a client of MPS keeps the share that it started with.
    """
    _GROUPS.leave(pid or os.getpid())
    _set_priority(pid, os.SCHED_OTHER)


def clear() -> None:
    """Remove empty guest groups from this machine; groups of running guests stay."""
    _GROUPS.clear()


def check_beside(isolation: Isolation, *, guest: Iterable[int], production: Iterable[int]) -> None:
    """Raises Unsupported if a guest thread could keep one of production's waiting, or if the kernel
    does not show their priorities. `guest` and `production` are process ids."""
    if isolation.backend not in PREEMPTING:
        return
    try:
        below, above = _priorities(guest), _priorities(production)
    except OSError as error:
        raise Unsupported(f"isolation {isolation.backend} cannot be verified: {error}") from error
    for one, other in product(below, above):
        if not is_below(one, other):
            raise Unsupported(
                f"isolation {isolation.backend} has no effect: threads of the guest are in "
                f"scheduling group {one}, of production in {other}; give the guest's control group "
                "cpu.idle=1 (systemd: CPUWeight=idle)"
            )


def _priorities(pids: Iterable[int]) -> list[CpuPriority]:
    found: set[CpuPriority] = set()
    for pid in pids:
        # A process that ended after it was listed delays no thread.
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= priorities(pid)
    if not found:
        raise ProcessLookupError("no such process")
    return sorted(found, key=str)


def _set_priority(pid: int, policy: int, *, nice: int | None = None) -> None:
    """Set policy and nice value of every thread of a process, including threads that are created
    meanwhile with the old priority."""
    done: set[int] = set()
    while found := _threads(pid or os.getpid()) - done:
        for thread in sorted(found):
            # CUDA's threads come and go.
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, os.sched_param(0))
                if nice is not None:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
        done |= found


def _threads(pid: int) -> set[int]:
    return {int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()}
