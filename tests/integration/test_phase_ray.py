"""Phase control on a real Ray: a named actor, jobs as actors, both killed."""

import os
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control import on_ray
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.wire import (
    ControlUnreachable,
)
from scheduler.rollmux.permits.events import Register
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig, PhaseTerms
from tests.unit.scheduler.rollmux.cluster.submissions import cluster as planned_nodes
from tests.unit.scheduler.rollmux.cluster.submissions import submission

pytestmark = [
    pytest.mark.ray,
    # Ray's own, on a machine without an accelerator and when its processes end.
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CONFIG = PermitsConfig(lease_s=6.0, patience_s=0.05)
ANSWER_S = 120.0


class Job:
    def __init__(self, name: str) -> None:
        phase = PhaseTerms(kind=PhaseKind.ROLLOUT, nodes=(NodeId("r0"),))
        terms = JobTerms(job=JobId(name), phases=(phase,))
        self._phases = PhaseClient(on_ray.connect(), terms, timeout_s=ANSWER_S)
        self._permit: Permit | None = None

    def begin(self) -> int:
        self._permit = self._phases.begin(PhaseKind.ROLLOUT)
        return self._permit.epoch

    def end(self) -> None:
        assert self._permit is not None
        self._phases.end(self._permit)

    def pid(self) -> int:
        return os.getpid()


def _job(name: str) -> Any:
    return ray.remote(Job).options(num_cpus=0).remote(name)


def test_permits_pass_between_actors_and_outlive_a_killed_job_and_a_killed_control(
    ray_cluster: None, tmp_path: Path
) -> None:
    with pytest.raises(ControlUnreachable):
        on_ray.connect()
    control = on_ray.start_control(ControlSettings(permits=CONFIG, state=tmp_path / "state.sqlite"))
    first, second, third = (_job(name) for name in ("first", "second", "third"))

    assert ray.get(first.begin.remote(), timeout=ANSWER_S) == 1
    waits = second.begin.remote()
    os.kill(ray.get(first.pid.remote(), timeout=ANSWER_S), signal.SIGKILL)
    assert ray.get(waits, timeout=ANSWER_S) == 2

    waits = third.begin.remote()
    ray.kill(control.handle, no_restart=False)
    ray.get(second.end.remote(), timeout=ANSWER_S)
    assert ray.get(waits, timeout=ANSWER_S) == 3


def test_a_control_on_ray_exports_the_same_metrics_and_lives_without_their_port(
    ray_cluster: None,
) -> None:
    free = _free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"open": free, "shut": taken.getsockname()[1]}
        controls = [
            on_ray.start_control(ControlSettings(permits=CONFIG, metrics_port=port), name=name)
            for name, port in ports.items()
        ]
        phase = PhaseTerms(kind=PhaseKind.ROLLOUT, nodes=(NodeId("r0"),))
        for control in controls:
            ray.get(control.handle.jobs.remote(), timeout=ANSWER_S)  # it has started
            control.call(Register(terms=JobTerms(job=JobId("job"), phases=(phase,))))
            assert b'scheduler_phase_jobs{stage="apart"} 1.0' in control.metrics()
    with urllib.request.urlopen(f"http://127.0.0.1:{free}/metrics", timeout=10) as reply:
        assert b'scheduler_phase_jobs{stage="apart"} 1.0' in reply.read()
    for control in controls:
        ray.kill(control.handle)


def test_a_control_on_ray_plans_and_knows_its_jobs_after_it_was_killed(
    ray_cluster: None, tmp_path: Path
) -> None:
    control = on_ray.start_control(
        ControlSettings(
            permits=CONFIG,
            state=tmp_path / "plan.sqlite",
            cluster=planned_nodes("r0", "t0", warm_start_s=0.1),
        ),
        name="plans",
    )
    phases = {
        name: PhaseClient(control, submission(name, slo=3.0), timeout_s=ANSWER_S) for name in "ab"
    }
    for one in phases.values():
        assert one.placement is not None
        assert one.placement.training_nodes == ("t0",)
    for name in "ab":
        with phases[name].phase("rollout") as permit:
            assert permit.nodes == ("r0",)
    ray.kill(control.handle, no_restart=False)
    with phases["a"].phase("training") as permit:
        assert permit.nodes == ("t0",)
    found = {one.job: one.plan for one in control.jobs()}
    assert {name: plan.iterations for name, plan in found.items() if plan} == {"a": 1, "b": 0}
    ray.kill(control.handle)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
