"""Small Python programs stand in for engines; nothing is asserted before its process has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from benchmarks.testbed import processes
from benchmarks.testbed.processes import Child, Processes, pin, renice
from harvester.contracts.errors import ConfigError

WAIT_S = 20.0
SLEEPER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
PARENT = f"""
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
grandchild.wait()
"""
DRIVER = """
import signal, sys
from pathlib import Path
from benchmarks.testbed.processes import Processes

# A shell's background starts everything with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with Processes(Path(sys.argv[1])) as started:
    child = started.start("engine", [sys.executable, "-c", sys.argv[2]], piped=True)
    child.output.readline()
    print(child.process.pid, flush=True)
    signal.pause()
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def said(child: Child) -> str:
    return child.output.readline().decode().strip()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ignore SIGTERM are killed soon."""
    monkeypatch.setattr(processes, "_TERM_S", 0.2)


def test_leaving_ends_every_process_that_was_started(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        children = [started.start(name, python(SLEEPER), piped=True) for name in ("a", "b")]
        assert [said(child) for child in children] == ["up", "up"]
    assert all(is_gone(child.process.pid) for child in children)


def test_a_killed_engine_leaves_no_socket(tmp_path: Path) -> None:
    program = """
import os, signal, socket
path = os.environ["VLLM_RPC_BASE_PATH"] + "/cc8bfdbc-cb21-4d0d-adf2-5bed818da775"
socket.socket(socket.AF_UNIX).bind(path)
print(path, flush=True)
signal.pause()
"""
    with Processes(tmp_path / ("long" * 50)) as started:
        engine = started.start("engine", python(program), piped=True)
        path = Path(said(engine))
        assert path.is_socket()
        started.kill(engine)
    assert not path.parent.exists()


@pytest.mark.usefixtures("impatient")
def test_children_of_a_process_are_ended_too_and_killed_at_the_deadline(
    tmp_path: Path,
) -> None:
    with Processes(tmp_path) as started:
        grandchild = int(said(started.start("engine", python(PARENT), piped=True)))
        assert not is_gone(grandchild)
    assert is_gone(grandchild)


@pytest.mark.usefixtures("impatient")
def test_an_orphaned_process_is_ended_too(tmp_path: Path) -> None:
    """vLLM's engine core outlives its API server in this way."""
    with Processes(tmp_path) as started:
        child = started.start("engine", python(PARENT), piped=True)
        grandchild = int(said(child))
        child.process.kill()
        child.process.wait()
        assert not is_gone(grandchild)
        assert [process.pid for process in child.tree()] == [grandchild]
    assert is_gone(grandchild)


def test_a_stranger_with_the_number_of_one_that_ended_is_let_alone(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        stranger = started.start("stranger", python(SLEEPER), piped=True)
        said(stranger)
        ended = SimpleNamespace(pid=stranger.process.pid, poll=lambda: 0)
        assert Child("engine", cast(Any, ended), tmp_path / "log").tree() == []


@pytest.mark.usefixtures("impatient")
def test_shared_memory_of_killed_processes_is_removed(tmp_path: Path) -> None:
    left = Path(f"/dev/shm/rosemux-test-{os.getpid()}")
    program = f"""
import mmap, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({str(left)!r}, "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
signal.pause()
"""
    try:
        with Processes(tmp_path) as started:
            assert said(started.start("engine", python(program), piped=True)) == "mapped"
            assert left.exists()
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.usefixtures("impatient")
def test_shared_memory_of_a_parent_that_died_before_is_removed(tmp_path: Path) -> None:
    """No process maps it any more; Python's resource tracker still knows of it."""
    program = f"""
import subprocess, sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
from multiprocessing import resource_tracker
tracker = resource_tracker._resource_tracker._fd
grandchild = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE,
                              pass_fds=[tracker])
grandchild.stdout.readline()
print(memory.name, flush=True)
grandchild.wait()
"""
    with Processes(tmp_path) as started:
        child = started.start("engine", python(program), piped=True)
        left = Path("/dev/shm") / said(child)
        assert left.exists()
        child.process.kill()
        child.process.wait()
    assert not left.exists()


def test_an_error_ends_them_and_passes_on(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Processes(tmp_path) as started:
            children.append(started.start("engine", python(SLEEPER), piped=True))
            said(children[0])
            raise KeyboardInterrupt

    children: list[Child] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (child,) = children
    assert is_gone(child.process.pid)


def test_a_second_interrupt_does_not_stop_the_clean_up(tmp_path: Path) -> None:
    program = """
import os, signal, sys
def end(*_):
    os.kill(os.getppid(), signal.SIGINT)
    print("interrupted", file=sys.stderr)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
signal.pause()
"""
    with Processes(tmp_path) as started:
        child = started.start("engine", python(program), piped=True)
        assert said(child) == "up"
    assert is_gone(child.process.pid)
    assert child.last_words() == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_process_that_started_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    """On Ctrl-C it cleans up itself; after SIGKILL, the kernel signals its children."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    with driver.stdout:
        child = psutil.Process(int(driver.stdout.readline()))
        driver.send_signal(number)
        assert driver.wait(timeout=WAIT_S) == -number
        psutil.wait_procs([child], timeout=WAIT_S)
    assert is_gone(child.pid)


def test_an_ended_process_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        child = started.start("engine", python("import sys; sys.exit('no room')"))
        child.process.wait(timeout=WAIT_S)
        with pytest.raises(ConfigError, match=r"(?s)engine ended with status 1.*no room"):
            started.check()


def test_processes_that_live_pass_the_check(tmp_path: Path) -> None:
    with Processes(tmp_path) as started:
        said(started.start("engine", python(SLEEPER), piped=True))
        started.check()


def test_a_process_starts_with_its_environment_core_and_niceness(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    program = "import os; print(os.environ['GIVEN'], os.sched_getaffinity(0), os.nice(0))"
    with Processes(tmp_path) as started:
        child = started.start(
            "engine", python(program), environment={"GIVEN": "x"}, core=core, nice=3
        )
        assert child.process.wait(timeout=WAIT_S) == 0
    assert (tmp_path / "engine.log").read_text() == f"x {{{core}}} {os.nice(0) + 3}\n"


@pytest.mark.usefixtures("impatient")
def test_pinning_and_niceness_reach_the_whole_tree(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with Processes(tmp_path) as started:
        child = started.start("engine", python(PARENT), piped=True)
        grandchild = int(said(child))
        pin(child, core)
        renice(child, 5)
        for pid in (child.process.pid, grandchild):
            assert os.sched_getaffinity(pid) == {core}
            assert os.getpriority(os.PRIO_PROCESS, pid) == 5


def test_a_killed_process_ends_with_its_children_and_raises_no_error(
    tmp_path: Path,
) -> None:
    with Processes(tmp_path) as started:
        parent = started.start("parent", python(PARENT), piped=True)
        grandchild = int(said(parent))
        other = started.start("other", python(SLEEPER), piped=True)
        assert said(other) == "up"
        started.kill(parent)
        assert parent.process.poll() is not None
        assert is_gone(grandchild)
        started.check()
        assert other.process.poll() is None
