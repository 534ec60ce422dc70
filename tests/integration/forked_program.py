"""Programs forked from a process that has imported what they use.

Starting Python and importing aiohttp takes longer than most tests of the gateway, and hundreds of
them start three programs. Importing vLLM takes most of an engine's start. A forked program has
memory, signals and an exit status of its own too.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, cast
from unittest.mock import patch

from coserve.vllm.launch import NO_COMPILER, STEADY_HEAP
from harvester.platform.parent import end_with
from tests.machines import enter_network, own_network

_FORKS = multiprocessing.get_context("forkserver")
_GATEWAY = ["scheduler.gateway.gateway", "scheduler.gateway.scheduler", "uvloop"]
_ENGINE = [
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
]
_READ_AT_IMPORT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    **STEADY_HEAP,
    **NO_COMPILER,
}
"""Variables that a fork sets too late, for what its libraries have read by then."""
_FORKS.set_forkserver_preload(_GATEWAY)


def preload_engines() -> None:
    """Has forks of this session find vLLM imported; before the first of them."""
    _FORKS.set_forkserver_preload([*_GATEWAY, *_ENGINE])
    with patch.dict(os.environ, _READ_AT_IMPORT):
        forkserver.ensure_running()


class ForkedProgram:
    """Python as `Popen([sys.executable, *arguments])` starts it, with `-c`, `-m` or a file, in the
    caller's network namespace."""

    stdin = None

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        grouped: bool = False,
    ) -> None:
        """Standard output is `stdout`, or goes to `log` with the errors; `grouped` makes a process
        group."""
        self.stdout: IO[str] | None = None
        if log is None:
            reading, writing = os.pipe()
            self.stdout = os.fdopen(reading)
        else:
            writing = os.dup(log.fileno())
        # Pytest gives a test that captures output other descriptors than the fork server has.
        errors = os.dup(2 if log is None else log.fileno())
        streams = [Connection(stream, readable=False) for stream in (writing, errors)]
        streams.append(Connection(own_network(), writable=False))
        environment = dict(os.environ if env is None else env)
        given = arguments, *streams, environment, str(Path.cwd()), grouped
        self._process = _FORKS.Process(target=_run, args=given, daemon=True)
        self._process.start()
        for stream in streams:
            stream.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def begin_forked(
    arguments: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_settings: Any
) -> "subprocess.Popen[bytes]":
    """Python as `subprocess.Popen` would start it, without a core or a priority of its own."""
    program, *words = arguments
    assert program == sys.executable
    forked = ForkedProgram(*words, env=env, log=stdout, grouped=True)
    return cast("subprocess.Popen[bytes]", forked)


def output_of(*arguments: str, log: Path, env: Mapping[str, str], timeout_s: float = 280.0) -> str:
    """Output of a program with an engine in it; a failure ends the test with its log."""
    with log.open("wb") as file:
        program = ForkedProgram(*arguments, env={**os.environ, **env}, log=file, grouped=True)
    try:
        status = program.wait(timeout_s)
    finally:
        if program.poll() is None:
            # An engine's core and ranks would outlive it.
            os.killpg(program.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    assert status == 0, said[-4000:]
    return said


def _run(
    arguments: tuple[str, ...],
    out: Connection,
    err: Connection,
    network: Connection,
    environment: dict[str, str],
    directory: str,
    grouped: bool,
) -> None:
    end_with(os.getppid())
    if grouped:
        os.setpgid(0, 0)
    # Ranks are processes of their own, which a daemon must not have.
    multiprocessing.current_process().daemon = False
    enter_network(network.fileno())
    network.close()
    for number, stream in enumerate((out, err), start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    # Found once a process, by the TMPDIR of then.
    tempfile.tempdir = None
    os.chdir(directory)
    _settle_threads()
    os.register_at_fork(after_in_child=_settle_threads)
    _fork_for_spawn()
    try:
        _run_python(*arguments)
    finally:
        # A process of `multiprocessing` leaves them out, and an engine's processes would stay.
        atexit._run_exitfuncs()


def _settle_threads() -> None:
    """Has torch make its thread pool anew while the forked process has one thread: of several that
    begin with it, one can find none ("Invalid thread pool!")."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


def _fork_for_spawn() -> None:
    """On a CPU vLLM spawns cores, ranks and further servers, each of which would import it again.

    It sets the variable that chooses the method itself. Ranks of a process that has numba are
    spawned: they look for kernels in all modules, and llvmlite's library fails at that.
    """
    given = multiprocessing.get_context

    def context(method: str | None = None) -> Any:
        forks = method == "spawn" and "llvmlite" not in sys.modules
        return given("fork" if forks else method)

    multiprocessing.get_context = context  # type: ignore[assignment]


def _run_python(first: str, *rest: str) -> None:
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
