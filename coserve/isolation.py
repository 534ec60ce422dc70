"""What bounds a guest step that is already running. The slack law bounds which steps run.

Chosen by capability, reported in the grant as `blocking_ratio` and undone on exit:

    idle          Linux: the guest's processes in the idle scheduling class, preempted at once
    time-slicing  CUDA's default: contexts take turns on the GPU; a fault stays with who caused it
    mps           CUDA, by consent only: both run at once, the guest on a share of the GPU and at
                  lower priority; without fault isolation, see coserve/mps.py
    none          nothing; the whole of a running step delays production

The idle class ranks a process among those of its own scheduling group only. Groups share a core out
by their own weights first: control groups with a cpu controller, and, where a process is in none,
one group for each session (autogroup). A guest in the idle class in another group than production
gets half of the core.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from coserve.gpus import ComputeMode, Gpu
from coserve.mps import MpsShare
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.mps import NO_DAEMON, PIPE_VARIABLE

_CGROUPS = Path("/sys/fs/cgroup")


class IsolationBackend(StrEnum):
    IDLE = "idle"
    TIME_SLICING = "time-slicing"
    MPS = "mps"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Isolation:
    backend: IsolationBackend
    blocking_ratio: float
    """Share of a running guest step that can delay production, 0 to 1."""
    fault_isolated: bool = True
    """Whether a fault of the guest stays with the guest."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the guest's processes start with; they end with it, so nothing is undone."""

    @property
    def statement(self) -> str:
        """For a report: what an operator has agreed to."""
        fate = "" if self.fault_isolated else ", shared fate: a fault of the guest ends production"
        return f"{self.backend}, blocking ratio {self.blocking_ratio:g}{fate}"


# A waking normal task preempts the idle class at once, whatever step it is in. What is left is the
# switch and caches that the step has filled: together well under a millisecond.
IDLE_CLASS = Isolation(IsolationBackend.IDLE, blocking_ratio=0.02)
# CUDA joins whatever MPS daemon answers in its default directory and says nothing: a guest without
# anybody's consent to that is sent to look where there is none.
_NO_MPS = ((PIPE_VARIABLE, str(NO_DAEMON)),)
NO_ISOLATION = Isolation(IsolationBackend.NONE, blocking_ratio=1.0, environment=_NO_MPS)
# Two contexts with work share the GPU about evenly, in slices of milliseconds. A step of production
# that meets a guest step gets half of the GPU until one of them is done: it is late by at most the
# rest of that step, and never by more than its own time.
TIME_SLICING = Isolation(IsolationBackend.TIME_SLICING, blocking_ratio=1.0, environment=_NO_MPS)


def choose(
    wanted: IsolationBackend | None = None,
    *,
    gpus: Sequence[Gpu] = (),
    mps: MpsShare | None = None,
) -> Isolation:
    """The best backend of this machine, or the wanted one. `gpus` are those of the guest.

    `mps` is an operator's consent, and never chosen without being wanted. Raises Unsupported when
    the wanted one cannot work here, ConfigError when it lacks that consent.
    """
    if wanted is IsolationBackend.NONE:
        return NO_ISOLATION
    if wanted is IsolationBackend.MPS:
        return _mps(gpus, mps)
    if gpus:
        return _time_slicing(wanted, gpus)
    if wanted is IsolationBackend.TIME_SLICING:
        raise Unsupported("time-slicing needs an NVIDIA GPU")
    return _idle_class(wanted)


def _idle_class(wanted: IsolationBackend | None) -> Isolation:
    if hasattr(os, "SCHED_IDLE"):
        return IDLE_CLASS
    if wanted is IsolationBackend.IDLE:
        raise Unsupported("the idle scheduling class needs Linux; choose isolation 'none'")
    return NO_ISOLATION


def _time_slicing(wanted: IsolationBackend | None, gpus: Sequence[Gpu]) -> Isolation:
    if wanted is IsolationBackend.IDLE:
        raise Unsupported(
            "the idle class ranks threads on a core and no kernel on a GPU: leave isolation to "
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
    # Without a daemon CUDA starts all the same, silently time-sliced.
    share.control.servers()
    return Isolation(
        IsolationBackend.MPS,
        blocking_ratio=share.blocking_ratio,
        fault_isolated=False,
        environment=share.environment,
    )


def apply_to_process(isolation: Isolation, pid: int = 0) -> None:
    """Put a process (0: this one) and every thread of it under the backend.

    Those of a GPU hold from a process's first call of CUDA: `Isolation.environment`, not this.
    Children and threads made later inherit it, so it is called before an engine starts its own.
    """
    if isolation.backend is IsolationBackend.IDLE:
        for thread in _threads(pid):
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def lift_from_process(pid: int) -> None:
    """Back to the normal class, for a reclaim that must not wait behind production.

    Nothing lifts a process on a GPU: a client of MPS keeps the share that it started with.
    """
    for thread in _threads(pid):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def check_beside(isolation: Isolation, *, guest: int, production: int) -> None:
    """Raises Unsupported where the backend does nothing between these two processes."""
    if isolation.backend is not IsolationBackend.IDLE:
        return
    guest_group, production_group = scheduling_group(guest), scheduling_group(production)
    if guest_group == production_group or _is_idle_group(guest_group):
        return
    raise Unsupported(
        f"the idle class has no effect: the guest is in scheduling group {guest_group}, production "
        f"in {production_group}; give the guest's control group cpu.idle=1 (systemd: "
        "CPUWeight=idle), start both in one session, or set blocking_ratio to 1"
    )


def scheduling_group(pid: int, *, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> str:
    """Name of the group within which the kernel ranks a process, e.g. `/system.slice/a.service`."""
    lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    own = next((path for names, path in paths.items() if "cpu" in names.split(",")), None)
    if own is None:
        own = _with_cpu_controller(paths.get("", "/"), cgroups)
    if own != "/":
        return own
    enabled = proc / "sys/kernel/sched_autogroup_enabled"
    if not enabled.exists() or enabled.read_text().strip() != "1":
        return own
    autogroup = proc / str(pid) / "autogroup"
    # Empty for a process whose session never got a group of its own, such as init's.
    words = autogroup.read_text().split() if autogroup.exists() else []
    return words[0] if words else own


def _with_cpu_controller(path: str, cgroups: Path) -> str:
    """The nearest group upwards that the unified hierarchy gives a CPU weight of its own."""
    while path != "/" and not (cgroups / path.lstrip("/") / "cpu.weight").exists():
        path = str(Path(path).parent)
    return path


def _is_idle_group(group: str) -> bool:
    for root in (_CGROUPS, _CGROUPS / "cpu", _CGROUPS / "cpu,cpuacct"):
        file = root / group.lstrip("/") / "cpu.idle"
        if group != "/" and file.exists():
            return file.read_text().strip() == "1"
    return False


def _threads(pid: int) -> list[int]:
    if pid == 0:
        return [0]
    return sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
