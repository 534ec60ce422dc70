"""`rosemux undo`: the host after an agent, a guest and a crash is the host before them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coserve.guest import isolation
from harvester.agent.guest_lock import GuestLock
from harvester.agent.host_removal import undo
from harvester.agent.node import NodeAgent
from harvester.cli.root import main
from harvester.config import AgentConfig
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.page.directory import LAUNCH_DIRECTORY
from harvester.contracts.process import process_ids
from harvester.contracts.wire.leases import LeaseGranted, LeaseRequest
from harvester.contracts.wire.stops import StopOrder, StopRequest
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.scheduling_group import hierarchies

SLOTS = ("slot0", "slot1")


def files_under(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and directory, with its mode and owner."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.lstat().st_uid,
            path.lstat().st_gid,
        )
        for path in sorted(root.rglob("*"))
    }


def control_groups(guest: int) -> set[str]:
    """Groups of the cpu controller's root, whoever made them, but those of other tests' guests."""
    return {
        str(entry)
        for root in hierarchies()
        if root.is_dir()
        for entry in root.iterdir()
        if (entry.is_dir() and not entry.name.startswith("rosemux-"))
        or entry.name == f"rosemux-guest-{guest}"
    }


def rank_of(pid: int) -> tuple[Any, ...]:
    """A process's rank with the kernel: class, nice value, cores, control groups."""
    return (
        os.sched_getscheduler(pid),
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getaffinity(pid),
        Path(f"/proc/{pid}/cgroup").read_text(),
    )


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of the test: production, which nothing may touch, and a guest."""
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return config_below(tmp_path)


def config_below(folder: Path) -> AgentConfig:
    run, state = folder / "run", folder / "lib"
    run.mkdir()
    state.mkdir()
    return AgentConfig.model_validate(
        {
            "mode": "harvest",
            "page_root": run / "rosemux",
            "state_dir": state / "rosemux",
            "slots": [{"name": name, "policy": {"proof": {"share_ratio": 0.0}}} for name in SLOTS],
        }
    )


def kill_agent(node: NodeAgent) -> None:
    """As a signal does: nothing is settled, drained or removed."""
    node.audit.close()
    node._lock.close()
    for slot in node.slots:
        slot._record.close()
        slot._grant_page.close()
        slot.sensor.close()


def lend(config: AgentConfig, guest_pid: int) -> NodeAgent:
    """An agent with a lease, stops, a lifted guest and a journal."""
    for name in SLOTS:
        pages = PageDirectory.create(config.page_root / name)
        pulse = Pulse(model_samples=1000)
        now_ns = monotonic_ns()
        production = pages.pulse_writer("prod", 0)
        production.write(pulse, now_ns=now_ns, ttl_ns=10**11)
        production.close()
        (process,) = process_ids([guest_pid])
        guest = Guest(running=1, processes=(process,))
        writer = pages.guest_writer()
        writer.write(guest, now_ns=now_ns, ttl_ns=10**10)
        writer.close()
    node = NodeAgent(config, clock=MonotonicClock(), version="1")
    for _ in range(3):
        node.beat()
    taken = node.take(
        LeaseRequest(
            request_id="r",
            slot=SlotId("slot0"),
            tenant=TenantId("t"),
            job=JobId("j"),
            duration_s=10.0,
        )
    )
    assert isinstance(taken, LeaseGranted)
    request = StopRequest(order=StopOrder.HOLD, slot="slot1", by="a", reason="r")
    node.order(request)
    (config.page_root / "stop").write_text("hold")
    (config.page_root / "kill").write_text("hold")
    node.beat()
    node.slots[0]._guest.lift([process])
    return node


def leave_marks(config: AgentConfig, pid: int) -> None:
    """A guest under its isolation, as `rosemux guest` puts it, and an agent; both crash."""
    backend = isolation.choose()
    isolation.apply_to_process(backend, pid, guest=pid)
    assert isolation.priorities(pid)
    node = lend(config, pid)
    assert config.file_of(config.slots[0], "lifted").exists()
    kill_agent(node)
    for name in SLOTS:
        writer = PageDirectory(config.page_root / name).pulse_writer("prod", 0)
        writer.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=0)  # Production ends too.
        writer.close()
    launch = config.page_root / "launch"
    launch.mkdir()
    (launch / "GPU-1.launch").touch()
    (config.state_dir / ".tmp-slot0.lease").touch()
    GuestLock(PageDirectory(config.page_root / "slot0")).close()


def test_after_a_crash_of_agent_and_guest_the_host_is_as_before(
    config: AgentConfig, tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    production, guest = sleepers
    before = (
        files_under(tmp_path),
        control_groups(guest.pid),
        rank_of(production.pid),
        rank_of(os.getpid()),
    )
    leave_marks(config, guest.pid)
    changed = (files_under(tmp_path), control_groups(guest.pid))
    assert changed[0] != before[0]
    guest.kill()
    guest.communicate()

    done = undo(config, records=True)

    after = (
        files_under(tmp_path),
        control_groups(guest.pid),
        rank_of(production.pid),
        rank_of(os.getpid()),
    )
    assert done.left == {}
    assert after == before


def test_without_being_asked_journals_and_states_stay_and_nothing_else(
    config: AgentConfig, tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    leave_marks(config, sleepers[1].pid)
    sleepers[1].kill()
    sleepers[1].communicate()
    assert undo(config, records=False).left == {}
    kept = {path for path in files_under(tmp_path) if not (tmp_path / path).is_dir()}
    records = [f"{slot}.{kind}" for slot in SLOTS for kind in ("journal", "state")]
    assert kept == {f"lib/rosemux/{name}" for name in ("audit.jsonl", *records)}


def test_slots_that_the_configuration_has_no_more_leave_nothing_either(
    config: AgentConfig, tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    leave_marks(config, sleepers[1].pid)
    later = config.model_copy(update={"slots": config.slots[:1], "slots_file": tmp_path / "absent"})
    with pytest.raises(ConfigError, match=f"process {sleepers[1].pid} of a guest still runs"):
        undo(later.model_copy(update={"slots": ()}), records=True)
    sleepers[1].kill()
    sleepers[1].communicate()
    assert undo(later, records=True).left == {}
    assert files_under(tmp_path).keys() == {"run", "lib"}


def test_a_guest_that_lives_is_named_and_nothing_changes(
    config: AgentConfig, tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    leave_marks(config, sleepers[1].pid)
    before = files_under(tmp_path).keys()
    with pytest.raises(ConfigError, match=f"process {sleepers[1].pid} of a guest still runs"):
        undo(config, records=True)
    locks = {name for name in files_under(tmp_path) if name.endswith(("lock",))}
    assert files_under(tmp_path).keys() - before <= locks
    assert before <= files_under(tmp_path).keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="users are changed by root")
def test_root_takes_back_what_three_users_left(sleepers: list[subprocess.Popen[bytes]]) -> None:
    agent, guest, pages_group = 64101, 64103, 64100
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder)
        root.chmod(0o755)
        config = config_below(root)
        leave_marks(config, sleepers[1].pid)
        sleepers[1].kill()
        sleepers[1].communicate()
        for slot in SLOTS:
            there = config.page_root / slot
            for entry in there.iterdir():
                os.chown(entry, agent, pages_group)
            os.chown(there, agent, pages_group)
            there.chmod(0o1770)
        os.chown(config.page_root / "slot0/guest.lock", guest, pages_group)
        assert undo(config, records=True).left == {}
        assert not config.page_root.exists()
    assert (os.geteuid(), os.getegid()) == (0, 0)


def test_an_agent_that_runs_is_named_and_keeps_its_pages(
    config: AgentConfig, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    node = lend(config, sleepers[1].pid)
    with pytest.raises(ConfigError, match="stop the agent first"):
        undo(config, records=True)
    node.beat()
    assert (config.page_root / "slot0" / "grant").exists()
    node.close()


def test_files_in_use_or_not_ours_are_left_and_named(
    config: AgentConfig, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    leave_marks(config, sleepers[1].pid)
    sleepers[1].kill()
    sleepers[1].communicate()
    stranger = config.page_root / "slot1" / "notes.txt"
    stranger.write_text("mine")
    pages = PageDirectory(config.page_root / "slot0")
    pages.pulse_writer("prod", 0).write(Pulse(), now_ns=monotonic_ns(), ttl_ns=10**11)
    done = undo(config, records=True)
    assert "not known" in done.left.pop(stranger)
    assert "remove its variables" in done.in_use[pages.path / "pulse.prod.0"]
    assert "production's page" in done.in_use[pages.path / ".pulse.prod.0.lock"]
    assert pages.path in done.in_use
    assert done.left.keys() == {stranger.parent, config.page_root}
    assert stranger.read_text() == "mine"
    assert not (config.page_root / "slot0" / "grant").exists()


def test_a_probe_s_group_that_a_kill_left_goes_too(tmp_path: Path) -> None:
    (tmp_path / "rosemux-probe-17").mkdir()
    (tmp_path / "rosemux-guest-18").mkdir()
    (tmp_path / "yours").mkdir()
    gone = IdleGroups(cgroups=tmp_path).clear()
    assert [group.name for group in gone] == ["rosemux-guest-18", "rosemux-probe-17"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["yours"]


def test_the_command_says_what_it_removed_and_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pages" / "slot0").mkdir(parents=True)
    (tmp_path / "pages" / "slot0" / "notes").touch()
    file = tmp_path / "agent.yaml"
    file.write_text(
        f"page_root: {tmp_path}/pages\nstate_dir: {tmp_path}/state\nslots: [{{name: slot0}}]\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["undo", "--config", str(file)])
    said = capsys.readouterr()
    assert left.value.code == 1
    assert "left " in said.out
    assert "notes: not known to be RoseMux's" in said.out
    (tmp_path / "pages" / "slot0" / "notes").unlink()
    pulse = PageDirectory(tmp_path / "pages" / "slot0").pulse_writer("prod", 0)
    pulse.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=10**11)
    with pytest.raises(SystemExit) as left:
        main(["undo", "--config", str(file)])
    assert not left.value.code, "it did all that it can beside production"
    said = capsys.readouterr()
    assert f"in use  {tmp_path}/pages: it goes with what is in it" in said.out
    assert "once production has restarted" in said.out
    pulse.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=0)
    with pytest.raises(SystemExit) as left:
        main(["undo", "--config", str(file)])
    assert not left.value.code
    assert "in use" not in capsys.readouterr().out
    assert not (tmp_path / "pages").exists()


def test_a_process_that_an_agent_had_lifted_is_where_it_was(
    config: AgentConfig, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    pid = sleepers[1].pid
    isolation.apply_to_process(isolation.IDLE_CLASS, pid)
    before = rank_of(pid)
    node = lend(config, pid)
    assert rank_of(pid) != before
    kill_agent(node)
    (config.page_root / "slot0" / "guest").unlink()
    (config.page_root / "slot1" / "guest").unlink()
    undo(config, records=True)
    assert rank_of(pid) == before


def test_a_link_in_place_of_a_directory_leads_to_nothing_that_is_removed(
    config: AgentConfig, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("grant", "guest", ".grant.lock", "pulse.production.0", "GPU-1.launch"):
        (elsewhere / name).write_text("someone's")
    before = files_under(elsewhere)
    config.page_root.mkdir()
    links = [config.page_root / "slot0", config.page_root / LAUNCH_DIRECTORY]
    for link in links:
        link.symlink_to(elsewhere)
    links.append(config.page_root / "slot1")
    links[-1].symlink_to(links[-1])
    done = undo(config, records=True)
    assert files_under(elsewhere) == before
    assert all("link" in done.left[link] for link in links)
