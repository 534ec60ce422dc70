"""One agent for each `state_dir`, whatever pages it has: a second one reads and writes nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.agent.host_removal import undo
from harvester.agent.node import NodeAgent
from harvester.agent.state_lock import lock_state
from harvester.cli.root import main
from harvester.config import AgentConfig
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted, NotYet
from harvester.contracts.page import PageDirectory
from harvester.contracts.process import ProcessId, process_ids
from harvester.contracts.wire.stops import StopOrder, StopRequest

HOLDER = """
import sys, pathlib
from harvester.agent.state_lock import lock_state
held = lock_state(pathlib.Path(sys.argv[1]))
print(flush=True)
input()
"""

privileged = pytest.mark.skipif(os.geteuid() != 0, reason="needs capabilities")


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return AgentConfig.model_validate(
        {
            "page_root": tmp_path / "pages",
            "state_dir": tmp_path / "state",
            "slots": [{"name": "slot0"}],
        }
    )


@pytest.fixture
def node(config: AgentConfig) -> Iterator[NodeAgent]:
    node = started(config)
    node.order(StopRequest(order=StopOrder.DRAIN, by="alice", reason="incident"))
    node.beat()
    yield node
    node.close()


def started(config: AgentConfig) -> NodeAgent:
    return NodeAgent(config, clock=MonotonicClock(), version="1")


def elsewhere(config: AgentConfig) -> AgentConfig:
    """The file after an edit that awaits a restart: other pages, the same records."""
    return config.model_copy(update={"page_root": config.page_root.with_name("pages2")})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_agent_with_other_pages_is_refused_and_changes_nothing(
    node: NodeAgent, config: AgentConfig
) -> None:
    before = contents(config.state_dir)
    with pytest.raises(ConfigError, match=rf"by process {os.getpid()}: stop the agent"):
        started(elsewhere(config))
    assert contents(config.state_dir) == before
    node.beat()
    assert node.stops.stops[0].reason == "incident"


@pytest.mark.parametrize("way", ["emptied", "replaced", "lock removed"])
def test_an_agent_whose_state_dir_was_taken_away_locks_it_again(
    node: NodeAgent, config: AgentConfig, way: str
) -> None:
    if way == "lock removed":
        (config.state_dir / ".lock").unlink()
    else:
        shutil.rmtree(config.state_dir)
    if way == "replaced":
        config.state_dir.mkdir()
    node.beat()
    with pytest.raises(NotYet, match=rf"by process {os.getpid()}: stop the agent"):
        started(elsewhere(config))
    node.beat()


def test_an_agent_whose_state_dir_another_took_over_ends_and_leaves_it_alone(
    config: AgentConfig,
) -> None:
    node = started(config)
    node.beat()
    shutil.rmtree(config.state_dir)
    other = started(elsewhere(config))
    other.beat()
    before = contents(config.state_dir)
    with pytest.raises(NotYet, match="stop the agent"):
        node.beat()
    node.close()
    grant = PageDirectory(config.page_root / "slot0").grant_reader().read_left().record
    assert grant is not None
    assert (grant.mode, grant.reason) == ("closed", "agent stopped")
    assert contents(config.state_dir) == before
    other.beat()
    other.close()


@privileged
def test_an_agent_that_lost_its_state_dir_settles_its_guest_and_leaves_the_other_s_record(
    config: AgentConfig, sleepers: list[ProcessId]
) -> None:
    """Else a process that the other has lifted would stay so, if that agent is killed."""
    node = started(config)
    lift(node, config, sleepers[0])
    shutil.rmtree(config.state_dir)
    other = started(elsewhere(config))
    lift(other, elsewhere(config), sleepers[1])
    before = contents(config.state_dir)
    with pytest.raises(NotYet):
        node.beat()
    node.close()
    assert contents(config.state_dir) == before
    assert [is_idle(process) for process in sleepers] == [True, False]
    for slot in other.slots:  # As after a kill.
        slot._guest._lifted.clear()
    other.close()
    undo(elsewhere(config), records=False)
    assert [is_idle(process) for process in sleepers] == [True, True]


@privileged
def test_a_state_dir_that_was_emptied_gets_the_record_of_lifted_processes_again(
    config: AgentConfig, sleepers: list[ProcessId]
) -> None:
    node = started(config)
    lift(node, config, sleepers[0])
    shutil.rmtree(config.state_dir)
    node.beat()
    assert (config.state_dir / "slot0.lifted").exists()
    node.close()
    assert is_idle(sleepers[0])


@pytest.fixture
def sleepers() -> Iterator[list[ProcessId]]:
    """Idle processes, as guests are."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for process in started:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    yield list(process_ids([process.pid for process in started]))
    for process in started:
        process.kill()
        process.wait()


def lift(node: NodeAgent, config: AgentConfig, process: ProcessId) -> None:
    (config.page_root / "slot0" / "guest").touch()
    node.slots[0]._guest.lift([process])
    assert not is_idle(process)


def is_idle(process: ProcessId) -> bool:
    return os.sched_getscheduler(process.pid) == os.SCHED_IDLE


def test_a_disk_that_takes_no_lock_ends_no_agent(
    node: NodeAgent, config: AgentConfig, caplog: pytest.LogCaptureFixture
) -> None:
    lock = config.state_dir / ".lock"
    lock.unlink()
    lock.symlink_to(config.state_dir / "elsewhere")
    node.beat()
    node.beat()
    assert len([line for line in caplog.messages if "cannot lock" in line]) == 1
    lock.unlink()
    node.beat()
    with pytest.raises(NotYet):
        started(elsewhere(config))


def test_undo_with_other_pages_leaves_a_running_agent_its_records(
    node: NodeAgent, config: AgentConfig
) -> None:
    before = contents(config.state_dir)
    with pytest.raises(ConfigError, match="stop the agent"):
        undo(elsewhere(config), records=True)
    assert contents(config.state_dir) == before
    node.beat()


def test_a_check_of_the_file_needs_no_lock(
    node: NodeAgent, config: AgentConfig, tmp_path: Path
) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(
        f"page_root: {config.page_root}2\nstate_dir: {config.state_dir}\nslots: [{{name: slot0}}]\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["agent", "--config", str(file), "--check-config"])
    assert not left.value.code
    assert node.alive()


def test_the_successor_of_an_agent_that_stopped_or_was_killed_starts_at_once(
    config: AgentConfig,
) -> None:
    for _ in range(2):
        started(config).close()
    holder = [sys.executable, "-c", HOLDER, str(config.state_dir)]
    with subprocess.Popen(holder, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            started(config)
        process.kill()
    started(config).close()


def test_only_its_user_may_open_the_lock_and_undo_takes_it_away(config: AgentConfig) -> None:
    started(config).close()
    lock = config.state_dir / ".lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    undo(config, records=False)
    assert not lock.exists()
    undo(config, records=False)
    assert not lock.exists()


def test_a_lock_that_cannot_be_opened_says_why_and_which_faults_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"cannot lock .*; it must be this user's"):
        lock_state(tmp_path)
    monkeypatch.setattr("os.open", _full)
    with pytest.raises(Exhausted, match="No space left"):
        lock_state(tmp_path)


def _full(*_: object, **__: object) -> int:
    raise OSError(28, "No space left on device")
