"""The agent's actions on processes that a guest names."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.agent import guest_processes
from harvester.agent.guest_processes import GuestProcesses
from harvester.contracts.errors import Unsupported
from harvester.contracts.process import ProcessId, process_ids, start_ticks
from harvester.platform import whole_file
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.scheduling_group import is_idle, scheduling_group
from harvester.policy.sample import ActionOutcome, GuestAction

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux only")


def _idle_group() -> bool:
    try:
        IdleGroups().check(os.getpid())
    except Unsupported:
        return False
    return True


privileged = pytest.mark.skipif(os.geteuid() != 0, reason="needs capabilities")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def named(child: "subprocess.Popen[bytes]") -> tuple[ProcessId, ...]:
    return process_ids([child.pid])


@pytest.fixture
def guest(tmp_path: Path) -> GuestProcesses:
    (tmp_path / "guest").touch()
    return GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted")


def fault_of(guest: GuestProcesses) -> str:
    """Fault of the one action since the last call."""
    (outcome,) = guest.outcomes()
    return outcome.fault


def idle(process: "subprocess.Popen[bytes]") -> bool:
    return os.sched_getscheduler(process.pid) == os.SCHED_IDLE


@privileged
def test_lifts_an_idle_guest_and_puts_it_back(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    guest.lift(named)
    assert not fault_of(guest)
    assert not idle(child)
    guest.lift(named)
    assert not fault_of(guest), "once more changes nothing"
    guest.settle()
    assert not fault_of(guest)
    assert idle(child)


@privileged
def test_threads_that_end_or_begin_meanwhile_keep_no_other_one_where_it_is(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = 1 << 22
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    for becomes in (False, True):
        lists = iter([[ended], [ended, child.pid]])
        monkeypatch.setattr(guest_processes, "_threads", lambda _, left=lists: next(left, [ended]))
        if becomes:
            guest.settle()
        else:
            guest.lift(named)
        assert not fault_of(guest)
        assert idle(child) is becomes


@privileged
def test_a_guest_that_starts_threads_without_end_does_not_hold_up_its_agent(
    named: tuple[ProcessId, ...], guest: GuestProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = iter(range(1 << 22, (1 << 22) + 1000))
    monkeypatch.setattr(guest_processes, "_threads", lambda _: [next(begun)])
    guest.lift(named)
    assert next(begun) < (1 << 22) + 100


@privileged
def test_a_guest_that_could_not_be_settled_is_settled_later_unless_memory_is_due_again(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = [10**12]
    monkeypatch.setattr(guest_processes, "monotonic_ns", lambda: now_ns[0])

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    for lifts_again in (True, False):
        guest.lift(named)
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_setscheduler", refused)
            guest.settle()
        assert [bool(outcome.fault) for outcome in guest.outcomes()] == [False, True]
        if lifts_again:
            guest.lift(named)
            assert not fault_of(guest)
        now_ns[0] += 6 * 10**9
        assert len(guest.outcomes()) == (not lifts_again)
        assert idle(child) is not lifts_again


@pytest.mark.skipif(not _idle_group(), reason="no idle control group can be made here")
def test_lifts_a_guest_out_of_the_idle_group_and_an_agent_that_comes_after_puts_it_back(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
) -> None:
    groups = IdleGroups()
    groups.enter(child.pid, guest=child.pid)
    own = scheduling_group(child.pid)
    try:
        guest.lift(named)
        assert not is_idle(own)
        GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted").settle()
        assert is_idle(own)
    finally:
        groups.leave(child.pid)
        groups.clear()


def test_a_guest_in_an_operators_idle_group_is_not_reported_as_lifted(
    named: tuple[ProcessId, ...], guest: GuestProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_processes, "is_under_idle", lambda group: True)
    guest.lift(named)
    assert "belongs to its operator" in fault_of(guest)


@pytest.fixture
def below() -> Iterator[tuple[ProcessId, ProcessId]]:
    """A process and its child."""
    script = "sleep 60 & echo $!; read line; kill $!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        parent, child = process_ids([process.pid, int(process.stdout.readline())])
        yield parent, child
        process.communicate("\n")


def test_production_is_not_touched_whatever_a_guest_of_its_user_names(
    below: tuple[ProcessId, ProcessId],
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
) -> None:
    for root in below:
        guest.exclude([root])
        for one in below:
            guest.kill([one])
            assert "production's" in fault_of(guest)
            guest.lift([one])
            assert "production's" in fault_of(guest)
            assert start_ticks(one.pid) == one.start_ticks
    # Its pulse is late, and later another engine beats.
    guest.exclude([])
    guest.exclude([ProcessId(pid=1 << 22, start_ticks=1)])
    guest.kill([*below, *named])
    assert child.wait(5) == -9, "the guest's own is ended all the same"
    assert "production's" in fault_of(guest)
    assert [start_ticks(one.pid) for one in below] == [one.start_ticks for one in below]


def test_a_root_of_another_pid_namespace_spares_no_process(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    guest.exclude([ProcessId(pid=one.pid, start_ticks=one.start_ticks + 1) for one in named])
    guest.kill(named)
    assert child.wait(5) == -9


@pytest.mark.parametrize(
    "left",
    [
        b"{",
        b'[{"process":{"pid":2,"start_ticks":1},"out_of":"\xff"}]',
        b'[{"x":' + b"[" * 4000,
    ],
)
def test_a_memo_that_does_not_decode_is_none(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "lifted").write_bytes(left)
    guest = GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted")
    guest.settle()
    assert not fault_of(guest)


@privileged
def test_an_agent_that_comes_after_puts_back_what_the_one_before_had_lifted(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
) -> None:
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    guest.lift(named)
    (tmp_path / "guest").unlink()
    GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted").settle()
    assert idle(child)
    assert not (tmp_path / "lifted").exists()


def test_a_memo_that_is_damaged_is_no_memo(tmp_path: Path) -> None:
    (tmp_path / "lifted").write_bytes(b"{")
    GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted").settle()


def test_a_thread_that_was_not_idle_is_not_made_idle(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    guest.lift(named)
    guest.settle()
    assert not idle(child)


def test_ends_the_guest_s_processes(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], guest: GuestProcesses
) -> None:
    guest.record_named(named)
    guest.kill(named)
    assert child.wait(timeout=10) == -9
    assert guest.outcomes() == (ActionOutcome(action=GuestAction.KILL, processes=named),)
    guest.kill(named)
    assert not fault_of(guest), "it was seen here, and has ended"


def test_a_reused_process_id_ends_no_process(
    child: "subprocess.Popen[bytes]", guest: GuestProcesses
) -> None:
    began = start_ticks(child.pid)
    assert began is not None
    guest.kill([ProcessId(pid=child.pid, start_ticks=began + 1)])
    assert "another one here" in fault_of(guest)
    assert child.poll() is None


@privileged
def test_processes_of_another_user_than_the_page_s_are_left_alone(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
) -> None:
    os.chown(tmp_path / "guest", 65534, 65534)
    guest.kill(named)
    assert "not of the user" in fault_of(guest)
    assert child.poll() is None


def test_a_guest_cannot_make_the_agent_end_itself(guest: GuestProcesses) -> None:
    guest.kill(process_ids([os.getpid()]))
    assert "none of a guest's" in fault_of(guest)


@pytest.mark.parametrize("pid", [-1, 0, 1, 4_000_000])
def test_ids_of_foreign_processes_end_no_process(guest: GuestProcesses, pid: int) -> None:
    guest.kill([ProcessId(pid=pid, start_ticks=start_ticks(pid) or 0)])
    assert fault_of(guest)


def test_without_a_page_there_is_no_guest(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...], tmp_path: Path
) -> None:
    absent = GuestProcesses(tmp_path / "guest", memo=tmp_path / "lifted")
    absent.kill(named)
    assert "no page" in fault_of(absent)
    assert child.poll() is None


def test_a_guest_that_names_no_process_is_not_reported_as_ended(guest: GuestProcesses) -> None:
    guest.kill(())
    assert "names no process" in fault_of(guest)


@privileged
def test_a_guest_out_of_reach_of_an_agent_of_another_user_is_not_reported_as_ended(
    child: "subprocess.Popen[bytes]", named: tuple[ProcessId, ...]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "guest")
        page.touch()
        page.parent.chmod(0o755)
        reader, writer = os.pipe()
        agent = os.fork()
        if agent == 0:
            os.setresuid(65534, 65534, 65534)
            guest = GuestProcesses(page, memo=Path("/nowhere/memo"))
            guest.kill(named)
            os.write(writer, fault_of(guest).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(agent, 0)
        with os.fdopen(reader) as said:
            assert "Operation not permitted" in said.read()
    assert child.poll() is None


@privileged
def test_a_guest_in_another_pid_namespace_is_not_reported_as_ended(
    tmp_path: Path, child: "subprocess.Popen[bytes]"
) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespace can be made here")
    (tmp_path / "guest").touch()
    said = _as_another_agent(unshare, tmp_path / "guest", child.pid)
    assert "another pid namespace?" in said
    assert child.poll() is None


def _as_another_agent(prefix: list[str], page: Path, pid: int) -> str:
    """Fault that an agent started with `prefix` reports for a kill of that process."""
    named = ProcessId(pid=pid, start_ticks=start_ticks(pid) or 0)
    code = (
        "from pathlib import Path\n"
        "from harvester.agent.guest_processes import GuestProcesses\n"
        "from harvester.contracts.process import ProcessId\n"
        f"guest = GuestProcesses(Path({str(page)!r}), memo=Path('/nowhere/memo'))\n"
        f"guest.kill([ProcessId(pid={named.pid}, start_ticks={named.start_ticks})])\n"
        "print(guest.outcomes()[0].fault)"
    )
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@privileged
def test_a_lift_without_room_for_its_record_happens_and_is_recorded_later(
    child: "subprocess.Popen[bytes]",
    named: tuple[ProcessId, ...],
    guest: GuestProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    monkeypatch.setattr(whole_file, "replace", full)
    guest.lift(named)
    assert not fault_of(guest)
    assert "No space left" in guest.memo_fault
    monkeypatch.undo()
    guest.outcomes()
    assert guest.memo_fault == ""
    assert (tmp_path / "lifted").exists()
