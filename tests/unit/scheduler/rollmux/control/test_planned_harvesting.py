"""Leases under a planning control: the jobs allowed to use them, and durations learned with
them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.contracts.ids import JobId
from scheduler.model import JobSpec
from scheduler.rollmux.control.nodes_file import read_specs
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.wire import (
    Placed,
)
from scheduler.rollmux.permits.events import (
    Leave,
)
from scheduler.rollmux.permits.leased_tail import EngineSwitches
from scheduler.rollmux.permits.terms import LEASED_TAIL_RATIO, PhaseTerms
from tests.unit.scheduler.rollmux.cluster.submissions import ROLLOUT, Control, cluster, submission
from tests.unit.scheduler.rollmux.control.embedded import EmbeddedControl
from tests.unit.scheduler.rollmux.control.test_leased_rollout import BOTH, FakeGateway


def undivided(given: JobSpec) -> JobSpec:
    """Its tails keep their nodes, unless they leave for leases."""
    rollout, training = given.phases
    phases = (msgspec.structs.replace(rollout, divisible=False), training)
    return msgspec.structs.replace(given, phases=phases)


ALONE = undivided(submission("a"))
HARVESTS = msgspec.structs.replace(ALONE, harvesting=True)


def _rollout_terms(control: Control, given: JobSpec) -> tuple[Placed, PhaseTerms]:
    (placed,) = control.submit(given)
    assert isinstance(placed, Placed)
    permit = control.service.policy.permit(given.job)
    assert permit is not None
    rollout = permit.terms.phase(ROLLOUT)
    assert rollout is not None
    return placed, rollout


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_a_tail_may_leave_for_leases_where_the_control_allows_and_the_job_asks(
    allowed: bool, asks: bool
) -> None:
    control = Control(cluster(harvesting=allowed))
    placed, rollout = _rollout_terms(control, HARVESTS if asks else ALONE)
    both = allowed and asks
    assert placed.harvesting == both
    tail = (LEASED_TAIL_RATIO, 0) if both else (1.0, 1)
    assert (rollout.tail_ratio, rollout.tail_accelerators) == tail


@pytest.mark.parametrize("allowed", [True, False])
def test_a_rollout_leases_only_where_the_control_allows_it(allowed: bool) -> None:
    gateway: Any = FakeGateway()
    with EmbeddedControl(cluster=cluster(harvesting=allowed)) as control:
        phases = PhaseClient(control, submission("a"), gateway=gateway)
        phases.end(phases.begin(ROLLOUT))
    assert gateway.told[0] == (
        BOTH if allowed else EngineSwitches(dedicated=True, harvesting=False)
    )


def test_the_planner_learns_what_a_rollout_would_have_taken_without_leases() -> None:
    control = Control(cluster(harvesting=True))
    control.submit(HARVESTS)
    control.runs("a")
    control.pass_time(30.0, beats="a")
    permit = control.service.policy.permit(JobId("a"))
    assert permit is not None
    control.service.call(Leave(job=JobId("a"), epoch=permit.epoch, loading_s=2.0, leased_s=10.0))
    assert control.service.cluster.planner.facts[JobId("a")].rollout.seen_s == pytest.approx(38.0)


def test_a_jobs_file_opts_in(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.yaml"
    one = "host_gb: 1, slo: 2, rollout: {max_s: 10}, training: {max_s: 5}"
    jobs.write_text(f"jobs:\n- {{id: a, {one}, harvesting: true}}\n- {{id: b, {one}}}\n")
    assert [each.harvesting for each in read_specs(jobs)] == [True, False]
