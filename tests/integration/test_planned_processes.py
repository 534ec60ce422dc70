"""A control that plans, and jobs, as real processes: killed, restarted, on nodes that fail."""

import inspect
import re
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import scheduler
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from scheduler.rollmux.control.command import explain, forget, node, submit
from scheduler.rollmux.control.command import status as phases_status
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.control.wire import (
    JobStatus,
    PlanStatus,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.sim.simulate_commands import replay
from tests.integration.line_children import LineChild, LineChildren

REPOSITORY = Path(__file__).parents[2]
NODES = """
nodes:
  rollout: {type: h20, names: [r0, r1], price_per_hour: 15, host_gb: 2000}
  training: {type: h800, names: [t0, t1], price_per_hour: 42, host_gb: 2000}
warm_start_s: 0.1
review_s: 0.5
"""
JOBS = """
jobs:
  - {id: file-job, slo: 1.0, host_gb: 100, rollout: {max_s: 600}, training: {max_s: 600}}
  - {id: too-large, slo: 1.0, host_gb: 9000, rollout: {max_s: 600}, training: {max_s: 600}}
"""


class Job(LineChild):
    def runs(self, kind: str) -> str:
        """Enters and ends one phase; returns the grant."""
        self.says(kind)
        granted = self.hears()
        self.says("")
        assert self.hears() == "ended"
        return granted


@dataclass
class Machine:
    directory: Path
    children: LineChildren = field(default_factory=LineChildren)

    @property
    def socket(self) -> Path:
        return self.directory / "phases.sock"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def control(self, more: str = "") -> subprocess.Popen[str]:
        """`more` is what its file of nodes says beside the nodes."""
        nodes = self.directory / "nodes.yaml"
        nodes.write_text(NODES + more)
        process = self.children.start(
            *("-m", "scheduler.rollmux.control", "--socket", str(self.socket)),
            *("--state", str(self.directory / "state.sqlite"), "--nodes", str(nodes)),
            *("--journal", str(self.journal), "--lease-s", "6.0"),
        )
        self.until(lambda: process.poll() is None and self.answers())
        return process

    def answers(self) -> bool:
        try:
            SocketTransport(self.socket).jobs()
        except Exhausted:
            return False
        return True

    def job(self, name: str, *, slo: float = 3.0) -> Job:
        module = "tests.integration.planned_job"
        return Job(self.children.start("-m", module, str(self.socket), name, str(slo)))

    def plan(self, name: str) -> PlanStatus | None:
        jobs: tuple[JobStatus, ...] = SocketTransport(self.socket).jobs()
        return next((one.plan for one in jobs if one.job == name), None)

    def stage(self, name: str) -> PermitStage:
        return next(one.stage for one in SocketTransport(self.socket).jobs() if one.job == name)

    def until(self, done) -> None:
        clock = MonotonicClock()
        until_s = clock.now() + 240.0
        while not done():
            assert clock.now() < until_s, "it did not come to be"
            threading.Event().wait(0.05)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.children.stop()


def test_two_processes_share_the_planned_nodes_over_a_killed_control(machine: Machine) -> None:
    control = machine.control()
    first = machine.job("first")
    assert first.hears() == "placed r0 t0"
    second = machine.job("second")
    assert second.hears() == "placed r0 t0"
    first.says("rollout")
    assert first.hears() == "granted r0"
    second.says("rollout")
    control.kill()
    control.wait()
    machine.control()
    first.says("")
    assert first.hears() == "ended"
    assert second.hears() == "granted r0"
    assert first.runs("training") == "granted t0"
    second.says("")
    assert second.hears() == "ended"
    assert second.runs("training") == "granted t0"
    for name in ("first", "second"):
        plan = machine.plan(name)
        assert plan is not None
        assert plan.iterations == 1


def test_the_journal_of_a_killed_control_replays_and_explains_each_job(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    control = machine.control()
    first = machine.job("first")
    assert first.hears() == "placed r0 t0"
    second = machine.job("second")
    assert second.hears() == "placed r0 t0"
    first.says("rollout")
    assert first.hears() == "granted r0"
    second.says("rollout")
    machine.until(lambda: machine.stage("second") is PermitStage.WAITING)
    control.kill()
    control.wait()
    machine.control()
    first.says("")
    assert first.hears() == "ended"
    assert second.hears() == "granted r0"
    node("r0", machine.socket, failed=True)
    second.says("")
    assert second.hears().startswith("Stale")
    assert second.runs("rollout") == "granted r1"
    forget("first", machine.socket)
    replay(machine.journal / "scheduler.policy.cluster.jsonl")
    assert capfd.readouterr().out.startswith("identical: ")
    story = explain_to(capfd, "second", socket=machine.socket)
    assert re.search(r"placed in group-\d+ on r0 \| t0 beside first", story)
    assert "the control is back" in story
    assert re.search(r"rollout begins on r0, after [\d.]+ s of waiting, behind first", story)
    assert re.search(r"gets other nodes, in group-\d+ on r1 .*: node r0 failed", story)
    assert re.search(r"its rollout permit ended after [\d.]+ s, left: node r0 failed", story)
    assert "closed: it was forgotten" in explain_to(capfd, "first", journal=machine.journal)


def explain_to(capfd: pytest.CaptureFixture[str], job: str, **where: Path) -> str:
    asked = {"journal": None, "socket": None, "last": "1h", "since": ""} | where
    explain(job, **asked, permits=True, as_json=False)
    return capfd.readouterr().out


def test_a_crashed_and_a_leaving_job_make_room_for_waiting_jobs(machine: Machine) -> None:
    machine.control("gone_s: 2\n")
    crashes, leaves = machine.job("crashes", slo=1.0), machine.job("leaves", slo=1.0)
    for job in (crashes, leaves):
        job.says("rollout")
    said = {job.hears() for job in (crashes, leaves)}
    assert said == {"placed r0 t0", "placed r1 t1"}
    assert {job.hears() for job in (crashes, leaves)} == {"granted r0", "granted r1"}
    waits, too = machine.job("waits", slo=1.0), machine.job("too", slo=1.0)
    machine.until(lambda: machine.plan("waits") and machine.plan("too"))
    crashes.process.kill()
    leaves.says("")
    assert leaves.hears() == "ended"
    leaves.says("forget")
    assert leaves.hears() == "forgotten"
    assert {waits.hears(), too.hears()} == {"placed r0 t0", "placed r1 t1"}
    assert machine.plan("crashes") is None


def test_a_failed_node_is_replaced_and_the_job_goes_on_elsewhere(machine: Machine) -> None:
    machine.control()
    job = machine.job("first")
    assert job.hears() == "placed r0 t0"
    job.says("rollout")
    assert job.hears() == "granted r0"
    node("t0", machine.socket, failed=True)
    job.says("")
    assert job.hears() == "ended"
    assert job.runs("training") == "granted t1"
    job.says("rollout")
    assert job.hears() == "granted r0"
    node("r0", machine.socket, failed=True)
    job.says("")
    assert job.hears().startswith("Stale")
    assert job.runs("rollout") == "granted r1"
    with pytest.raises(ConfigError, match="no node"):
        node("elsewhere", machine.socket, failed=True)


def test_jobs_of_a_file_are_submitted_shown_and_forgotten(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    import typer

    machine.control()
    jobs = machine.directory / "jobs.yaml"
    jobs.write_text(JOBS)
    with pytest.raises(typer.Exit):
        submit(jobs, machine.socket)
    said = capfd.readouterr().out
    assert "file-job: group-" in said
    assert "too-large: refused" in said
    phases_status(machine.socket)
    assert "r0 | t0" in capfd.readouterr().out
    forget("file-job", machine.socket)
    assert machine.plan("file-job") is None


def test_the_toy_jobs_of_the_examples_share_two_nodes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        machine.children.start(
            *("-m", "scheduler.rollmux.control", "--socket", str(machine.socket)),
            *("--nodes", str(REPOSITORY / "examples/nodes.yaml")),
        )
        machine.until(machine.answers)
        options = ("--iterations", "2", "--rollout-s", "0.4", "--training-s", "0.2")
        toys = [
            machine.children.start(
                str(REPOSITORY / "examples/toy_job.py"), str(machine.socket), name, *options
            )
            for name in ("math", "code")
        ]
        said = [toy.communicate(timeout=120)[0] for toy in toys]
        assert all("on roll-0 | train-0" in one for one in said)
        assert all("iteration 2 trains on train-0" in one for one in said)
        assert SocketTransport(machine.socket).jobs() == ()
        with pytest.raises(ConfigError, match="without --journal"):
            SocketTransport(machine.socket).journal()
    finally:
        machine.children.stop()


def test_the_example_of_the_package_runs_against_a_planning_control(machine: Machine) -> None:
    machine.control()
    page = inspect.cleandoc(scheduler.__doc__ or "").partition("Phases:\n")[2]
    code = "\n".join(line for line in page.splitlines() if not line or line.startswith("    "))
    example = textwrap.dedent(code).replace("/run/phases/phases.sock", str(machine.socket))
    assert "phases.forget()" in example
    exec(compile(example, "scheduler/__init__.py", "exec"), {})
    assert SocketTransport(machine.socket).jobs() == ()
