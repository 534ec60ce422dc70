"""Processes of a run: started in groups of their own, watched, pinned, and all gone at the end.

Whenever the demo ends (its own end, Ctrl-C, an error), `Processes` ends every process that it
started with all descendants, orphans too, and removes the leftovers of killed ones: shared-memory
files, engines' sockets, and the control group of isolated guests. If the demo dies without that,
the kernel signals its children.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from coserve.guest import isolation
from harvester.contracts.errors import ConfigError
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.parent import end_with

_TERM_S = 8.0
_KILL_S = 5.0
_TAIL_BYTES = 2000
_SHARED_MEMORY = Path("/dev/shm")
OPERATORS_GROUPS = IdleGroups(prefix="rosemux-slice-")
"""Idle groups like the shipped `rosemux.slice`: an operator's, so that no agent lifts a guest."""


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def tree(self) -> list[psutil.Process]:
        """The process and all that it started, also where it has died itself.

        They are found by their group, which is the kernel's as long as one of them lives.
        """
        group = self.process.pid
        if self.process.poll() is not None and psutil.pid_exists(group):
            return []  # A stranger's: the kernel gives a number anew once its group is empty.
        return [process for process in psutil.process_iter() if _group_of(process.pid) == group]

    def close(self) -> None:
        """Waits for the end of a process that was asked to end, and closes its pipes."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def last_words(self) -> str:
        try:
            return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def check(self) -> None:
        """Raises ConfigError with the end of its log when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ConfigError(
                f"{self.name} ended with status {code}; its log {self.log} ends with:\n"
                f"{self.last_words()}"
            )


class Processes:
    """Context manager; leaving it ends everything."""

    def __init__(
        self, log_dir: Path, *, begin: "Callable[..., subprocess.Popen[bytes]]" = subprocess.Popen
    ) -> None:
        """`begin` is called as `subprocess.Popen` is."""
        self._log_dir = log_dir
        self._begin = begin
        self._children: list[Child] = []
        self._sockets: str | None = None
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not stop the clean-up that the first one asked for.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.stop()
        finally:
            signal.signal(signal.SIGINT, previous)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        core: int | None = None,
        nice: int = 0,
        piped: bool = False,
    ) -> Child:
        """Start a process in a group of its own; its messages go to `<name>.log`.

        `piped` keeps its standard input and output for the caller.
        """
        log = self._log_dir / f"{name}.log"
        if self._sockets is None:
            # A socket's path has at most 107 bytes: not below a run's directory.
            self._sockets = tempfile.mkdtemp(prefix="rosemux-")
        sockets = {"VLLM_RPC_BASE_PATH": self._sockets}
        with log.open("wb") as file:
            process = self._begin(
                list(arguments),
                env={**os.environ, **sockets, **(environment or {})},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                # No session of its own: the kernel shares a core out between sessions first, and
                # neither nice nor the idle class counts from one to another.
                process_group=0,
                # Runs before any thread of ours is started; it only makes system calls.
                preexec_fn=_prepared(core, nice),
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raises ConfigError when any process has ended."""
        for child in self._children:
            child.check()

    def end(self, child: Child) -> None:
        """Ask a process to end, wait for it, and forget it."""
        child.process.terminate()
        try:
            child.process.wait(timeout=_TERM_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
        self.kill(child)

    def kill(self, child: Child) -> None:
        """All of its processes at once, as the kernel does when memory is out."""
        tree = child.tree()
        shared = _shared_memory_of(tree)
        _kill(tree)
        child.close()
        for path in shared:
            path.unlink(missing_ok=True)
        self._children.remove(child)

    def stop(self) -> None:
        """End all: ask, wait, then kill; remove what killed processes left in shared memory."""
        trees = [process for child in self._children for process in child.tree()]
        shared = _shared_memory_of(trees)
        for child in self._children:
            # A head ends its own; what has lost its head is asked itself.
            ending = [child.process] if child.process.poll() is None else child.tree()
            for process in ending:
                _signal(process.pid, signal.SIGTERM)
            thaw(child)
        _, alive = psutil.wait_procs(trees, timeout=_TERM_S)
        _kill(alive)
        for child in self._children:
            child.close()
        self._children.clear()
        for path in shared:
            path.unlink(missing_ok=True)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        isolation.clear()
        OPERATORS_GROUPS.clear()


def freeze(child: Child) -> None:
    """Stop every process of the tree, as if it were not there, until `thaw`."""
    for process in child.tree():
        _signal(process.pid, signal.SIGSTOP)


def thaw(child: Child) -> None:
    for process in child.tree():
        _signal(process.pid, signal.SIGCONT)


def pin(child: Child, core: int | None) -> None:
    """Bind a process tree to one core; None leaves it to the kernel. Threads and children made
    later inherit it."""
    if core is None:
        return
    for process in child.tree():
        _each_thread(process, lambda thread: os.sched_setaffinity(thread, {core}))


def renice(child: Child, nice: int) -> None:
    for process in child.tree():
        _each_thread(process, lambda thread: os.setpriority(os.PRIO_PROCESS, thread, nice))


def _each_thread(process: psutil.Process, action: Callable[[int], None]) -> None:
    try:
        for thread in process.threads():
            action(thread.id)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return


def _prepared(core: int | None, nice: int) -> Callable[[], None]:
    parent = os.getpid()

    def prepare() -> None:
        end_with(parent)
        if core is not None:
            os.sched_setaffinity(0, {core})
        if nice:
            os.nice(nice)

    return prepare


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Resource trackers last: once the others are gone they remove what those left behind."""
    others = [process for process in processes if not _is_resource_tracker(process)]
    for doomed in (others, processes):
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, processes = psutil.wait_procs(processes, timeout=_KILL_S)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _shared_memory_of(trees: Sequence[psutil.Process]) -> set[Path]:
    """Files in shared memory that these processes have mapped now."""
    found: set[Path] = set()
    for process in trees:
        try:
            maps = process.memory_maps(grouped=True)
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            continue
        paths = (Path(entry.path) for entry in maps)
        found.update(path for path in paths if path.parent == _SHARED_MEMORY)
    return found
