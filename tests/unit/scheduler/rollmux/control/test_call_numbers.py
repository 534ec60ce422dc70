"""Numbers of calls are checked once where they enter: in the job's process, and on the wire."""

from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.contracts.errors import ConfigError, PeerProtocolError
from harvester.contracts.ids import Epoch, JobId
from scheduler.model import JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.cluster.runtime_events import Call, Submit
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.control.wire import Granted, decoded_call, encoded_call
from scheduler.rollmux.permits.events import Beat, Enter, Leave, Register
from scheduler.rollmux.permits.terms import PermitsConfig
from tests.unit.scheduler.rollmux.control.embedded import EmbeddedControl
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, nodes, terms
from tests.virtual_clock import VirtualClock

JOB, EPOCH = JobId("a"), Epoch(1)


def spec(**changes: Any) -> Submit:
    phase = PhaseSpec(kind=PhaseKind.ROLLOUT, **({"max_s": 9.0} | changes))
    return Submit(spec=JobSpec(job=JOB, slo=1.5, host_bytes=1, phases=(phase,)))


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("terms.phases[0].max_s", lambda bad: Register(terms=terms("a", max_s=bad))),
        ("terms.phases[0].tail_ratio", lambda bad: Register(terms=terms("a", tail_ratio=bad))),
        ("spec.phases[0].mean_s", lambda bad: spec(mean_s=bad)),
        ("spec.phases[0].cv", lambda bad: spec(cv=bad)),
        ("spec.phases[0].curve[0][1]", lambda bad: spec(curve=((0.0, bad),))),
        ("wait_s", lambda bad: Enter(job=JOB, kind=ROLLOUT, holder="h", wait_s=bad)),
        ("complete_ratio", lambda bad: Beat(job=JOB, epoch=EPOCH, complete_ratio=bad)),
        ("loading_s", lambda bad: Leave(job=JOB, epoch=EPOCH, loading_s=bad)),
        ("leased_s", lambda bad: Leave(job=JOB, epoch=EPOCH, leased_s=bad)),
    ],
)
def test_a_number_that_json_cannot_carry_is_refused_by_its_field_s_name(
    field: str, call: Any, bad: float
) -> None:
    with pytest.raises(ConfigError) as refused:
        encoded_call(call(bad))
    assert f".{field} is {bad}, not a finite number" in str(refused.value)


def test_a_job_whose_bound_is_no_number_reaches_no_control(tmp_path: Path) -> None:
    control = SocketTransport(tmp_path / "none.sock")
    with pytest.raises(ConfigError, match="max_s is nan"):
        PhaseClient(control, spec(max_s=nan).spec)


@pytest.mark.parametrize(
    ("name", "field", "bad", "call"),
    [
        ("enter", "wait_s", -5, Enter(job=JOB, kind=ROLLOUT, holder="h", wait_s=-5)),
        ("beat", "complete_ratio", 2, Beat(job=JOB, epoch=EPOCH, complete_ratio=2)),
        ("beat", "complete_ratio", -1, Beat(job=JOB, epoch=EPOCH, complete_ratio=-1)),
        ("beat", "tokens", -1, Beat(job=JOB, epoch=EPOCH, tokens=-1)),
        ("leave", "loading_s", -1, Leave(job=JOB, epoch=EPOCH, loading_s=-1)),
        ("leave", "leased_s", -1, Leave(job=JOB, epoch=EPOCH, leased_s=-1)),
    ],
)
def test_a_number_out_of_its_range_is_refused_in_the_process_and_on_the_wire(
    name: str, field: str, bad: float, call: Call
) -> None:
    with pytest.raises(ConfigError, match=field):
        encoded_call(call)
    needed = {"enter": '"kind": "rollout", "holder": "h"'}.get(name, '"epoch": 1')
    with pytest.raises(PeerProtocolError, match=field):
        decoded_call(name, f'{{"job": "a", {needed}, "{field}": {bad}}}'.encode())


@pytest.fixture
def permit() -> Any:
    with EmbeddedControl() as control:
        held = Permit(
            control,
            VirtualClock(),
            job=JOB,
            kind=ROLLOUT,
            granted=Granted(epoch=EPOCH, nodes=nodes("r0"), lease_s=600.0),
            asked_s=0.0,
        )
        yield held
        held.end()


@pytest.mark.parametrize("bad", [nan, inf, 2, 1.001, -1, "x", None])
def test_progress_outside_0_to_1_is_refused_in_the_phase_s_thread(permit: Permit, bad: Any) -> None:
    with pytest.raises(ConfigError, match="progress"):
        permit.progress(bad)
    assert permit.complete_ratio == 0.0


@pytest.mark.parametrize("bad", [-1, 1.5, nan, "x"])
def test_tokens_that_are_no_count_are_refused(permit: Permit, bad: Any) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        permit.progress(0.5, tokens=bad)
    assert permit.complete_ratio == 0.0


def test_a_sum_of_shares_may_round_to_more_than_1(permit: Permit) -> None:
    permit.progress(1.0000000000000002)
    assert permit.complete_ratio == 1.0


@pytest.mark.parametrize("bad", [nan, -1.0])
def test_a_bound_on_waiting_that_never_ends_it_is_refused(bad: float) -> None:
    with EmbeddedControl() as control, pytest.raises(ConfigError, match="timeout_s"):
        PhaseClient(control, terms("a"), timeout_s=bad)


def test_a_lease_without_an_end_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="lease_s"):
        msgspec.convert({"lease_s": inf}, PermitsConfig)
