"""The embedded control as a job's code sees it: jobs are threads."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.errors import ConfigError, Exhausted, Stale
from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.rollmux.cluster.runtime_events import Call, NodeReport, Submit
from scheduler.rollmux.control.loaded_states import LoadedStates
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.control.wire import (
    Accepted,
    ControlUnreachable,
    Ended,
    Granted,
    Reply,
    Transport,
    Waiting,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Leave,
    Register,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.terms import JobTerms, PermitsConfig
from tests.unit.scheduler.rollmux.cluster.submissions import cluster, submission
from tests.unit.scheduler.rollmux.control.embedded import EmbeddedControl
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, TRAINING, nodes, terms
from tests.virtual_clock import VirtualClock

QUICK = PermitsConfig(lease_s=0.3, patience_s=0.01)
PATIENT = PermitsConfig(lease_s=600.0)
LONG_S = 20.0


@pytest.fixture
def embedded() -> Iterator[EmbeddedControl]:
    with EmbeddedControl() as control:
        yield control


def test_a_phase_is_a_context_manager_and_a_decorator(embedded: EmbeddedControl) -> None:
    phases = PhaseClient(embedded, terms("a"))

    @phases.phase("training")
    def train(batch: list[int]) -> int:
        return sum(batch)

    for _ in range(2):
        with phases.phase("rollout") as permit:
            assert permit.nodes == nodes("r0")
        assert train([1, 2]) == 3
    assert [start.kind for start in phases.starts] == [ROLLOUT, TRAINING] * 2


def test_the_installed_control_is_found_when_a_phase_is_entered(
    embedded: EmbeddedControl,
) -> None:
    @PhaseClient.late_phase("rollout")
    def roll_out() -> str:
        return "done"

    with pytest.raises(ConfigError, match="install"):
        roll_out()
    PhaseClient(embedded, terms("a")).install()
    assert roll_out() == "done"
    # A thread begins with a context of its own, as a method of a Ray actor may.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(roll_out).result() == "done"


def test_a_job_without_a_control_says_that_it_waits_and_for_what(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(Exhausted, match="no phase control"):
        PhaseClient(SocketTransport(tmp_path / "none.sock"), terms("a"), timeout_s=0.2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("job a waits for a phase control: no phase control at")
    assert line.endswith("none.sock: No such file or directory")


class Full(Transport):
    """A control that plans and has no node free."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(self, message: Call) -> Reply:
        self.calls.append(message)
        return Waiting(ahead=0, reason="needs 1 h20") if isinstance(message, Submit) else Accepted()


def test_a_job_that_gives_up_its_wait_for_a_placement_leaves_the_queue() -> None:
    control = Full()
    with pytest.raises(Exhausted, match="needs 1 h20"):
        PhaseClient(control, submission("a"), timeout_s=0.1)
    assert isinstance(control.calls[-1], Withdraw)
    assert not any(isinstance(one, Withdraw) for one in control.calls[:-1])


class Leaving(Transport):
    """A control that is gone when a phase ends, and comes back."""

    def __init__(self) -> None:
        self.leaves = 0

    def call(self, message: Call) -> Reply:
        if isinstance(message, Enter):
            return Granted(epoch=Epoch(1), nodes=nodes("r0"), lease_s=600.0)
        if isinstance(message, Leave):
            self.leaves += 1
            if self.leaves < 3:
                raise ControlUnreachable("no phase control here")
        return Accepted()


def test_a_job_that_cannot_report_a_phase_s_end_says_that_it_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = Leaving()
    with PhaseClient(control, terms("a")).phase("rollout"):
        assert not caplog.records
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "job a waits for a phase control: no phase control here"
    assert control.leaves == 3


@pytest.mark.parametrize("max_s", [math.nan, math.inf, 0.0, -1.0])
def test_terms_without_a_number_for_a_bound_are_refused_before_they_are_sent(
    tmp_path: Path, max_s: float
) -> None:
    with pytest.raises(ConfigError, match="max_s is a number above 0"):
        PhaseClient(SocketTransport(tmp_path / "none.sock"), terms("a", max_s=max_s))


@pytest.mark.parametrize("ratio", [math.nan, math.inf, 2.0, -1.0])
def test_a_progress_that_is_no_share_is_refused(embedded: EmbeddedControl, ratio: float) -> None:
    phases = PhaseClient(embedded, terms("a"))
    with phases.phase("rollout") as permit:
        with pytest.raises(ConfigError, match="a share from 0 to 1"):
            permit.progress(ratio)
        assert permit.complete_ratio == 0.0


def test_two_jobs_are_never_on_one_node_and_their_phases_overlap_across_pools(
    embedded: EmbeddedControl,
) -> None:
    inside = {ROLLOUT: 0, TRAINING: 0}
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()
    met = threading.Barrier(2, timeout=LONG_S)
    order = {"a": (ROLLOUT, TRAINING), "b": (TRAINING, ROLLOUT)}

    def alternate(job: str) -> None:
        phases = PhaseClient(embedded, terms(job), timeout_s=LONG_S)
        for _ in range(5):
            for kind in order[job]:
                with phases.phase(kind):
                    with lock:
                        inside[kind] += 1
                        seen.append((inside[ROLLOUT], inside[TRAINING]))
                    # No job comes past here unless one trains while the other rolls out.
                    met.wait()
                    with lock:
                        inside[kind] -= 1

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(alternate, job) for job in order]:
            done.result(timeout=LONG_S)
    assert max(rollouts for rollouts, _ in seen) == 1
    assert max(trainings for _, trainings in seen) == 1
    assert (1, 1) in seen
    assert len(seen) == 20


def test_state_is_loaded_after_the_permit_and_offloaded_before_the_nodes_are_given_back(
    embedded: EmbeddedControl,
) -> None:
    said: list[str] = []
    phases = PhaseClient(embedded, terms("a"))
    other = PhaseClient(embedded, terms("b"), timeout_s=0.0)

    def on_release() -> None:
        said.append("offloaded")
        with pytest.raises(Exhausted):
            other.begin(ROLLOUT)

    phases.resident(
        ROLLOUT,
        on_resume=lambda cold: said.append("cold" if cold else "warm"),
        on_release=on_release,
        stays_loaded=False,
    )
    for _ in range(2):
        with phases.phase(ROLLOUT):
            said.append("runs")
        with phases.phase(TRAINING):
            said.append("trains")
    assert said == ["cold", "runs", "offloaded", "trains", "warm", "runs", "offloaded", "trains"]
    assert [start.cold for start in phases.starts] == [True, True, False, False]


def test_a_state_stays_loaded_until_another_job_is_to_start_there(
    embedded: EmbeddedControl,
) -> None:
    said: list[str] = []
    phases = PhaseClient(embedded, terms("a"))
    phases.resident(
        ROLLOUT,
        on_resume=lambda _cold: said.append("loaded"),
        on_release=lambda: said.append("offloaded"),
    )
    for _ in range(2):
        with phases.phase(ROLLOUT):
            said.append("runs")
    assert said == ["loaded", "runs", "runs"]
    other = PhaseClient(embedded, terms("b"), timeout_s=LONG_S)
    with phases.phase(TRAINING), other.phase(ROLLOUT):
        said.append("other runs")
    with phases.phase(ROLLOUT):
        said.append("runs")
    assert said[3:] == ["offloaded", "other runs", "loaded", "runs"]


def test_a_job_between_two_phases_takes_its_state_off_for_another(
    embedded: EmbeddedControl,
) -> None:
    said: list[str] = []
    phases = PhaseClient(embedded, terms("a"))

    def on_release() -> None:
        said.append("leaves")
        time.sleep(0.3)
        said.append("left")

    phases.resident(ROLLOUT, on_release=on_release)
    with phases.phase(ROLLOUT):
        pass
    with PhaseClient(embedded, terms("b"), timeout_s=LONG_S).phase(ROLLOUT):
        said.append("other runs")
    assert said == ["leaves", "left", "other runs"]


def test_a_job_that_waits_itself_takes_its_state_off_for_another(embedded: EmbeddedControl) -> None:
    said: list[str] = []
    phases = PhaseClient(embedded, terms("a"), timeout_s=LONG_S)
    phases.resident(ROLLOUT, on_release=lambda: said.append("offloaded"))
    with phases.phase(ROLLOUT):
        pass
    trains = PhaseClient(embedded, terms("b", rollout="r1"))
    with trains.phase(ROLLOUT):
        pass
    other = PhaseClient(embedded, terms("c", training="t1"), timeout_s=LONG_S)
    with trains.phase(TRAINING):
        waiting = threading.Thread(target=lambda: phases.end(phases.begin(TRAINING)))
        waiting.start()
        with other.phase(ROLLOUT):
            said.append("other runs")
    waiting.join(LONG_S)
    assert said == ["offloaded", "other runs"]


def test_phases_of_one_job_on_one_node_take_each_other_s_state_off(
    embedded: EmbeddedControl,
) -> None:
    said: list[str] = []
    phases = PhaseClient(embedded, terms("a", rollout="n0", training="n0"))
    for kind in (ROLLOUT, TRAINING):
        phases.resident(
            kind,
            on_resume=lambda _cold, kind=kind: said.append(f"{kind} on"),
            on_release=lambda kind=kind: said.append(f"{kind} off"),
        )
    for kind in (ROLLOUT, TRAINING, ROLLOUT):
        with phases.phase(kind):
            pass
    on, off = "rollout on", "rollout off"
    assert said == [on, off, "training on", "training off", on]


def test_a_phase_without_hooks_takes_the_job_s_other_states_off_its_nodes(
    embedded: EmbeddedControl,
) -> None:
    said: list[str] = []
    phases = PhaseClient(embedded, terms("a", rollout="n0", training="n0"))
    phases.resident(ROLLOUT, on_release=lambda: said.append("offloaded"))
    with phases.phase(ROLLOUT):
        pass
    with phases.phase(TRAINING):
        said.append("trains")
    with PhaseClient(embedded, terms("b", rollout="n0"), timeout_s=LONG_S).phase(ROLLOUT):
        said.append("other runs")
    assert said == ["offloaded", "trains", "other runs"]


def test_a_state_that_makes_way_for_the_job_s_next_phase_frees_its_other_nodes() -> None:
    with EmbeddedControl(PATIENT) as embedded:
        phases = PhaseClient(embedded, terms("a", rollout="n0 n1", training="n0"))
        other = PhaseClient(embedded, terms("b", rollout="n1"), timeout_s=LONG_S)
        for kind in (ROLLOUT, TRAINING):
            phases.resident(kind)
        with phases.phase(ROLLOUT):
            pass
        with phases.phase(TRAINING), other.phase(ROLLOUT) as permit:
            assert permit.nodes == nodes("n1")


def test_a_new_process_of_a_job_starts_once_the_states_of_the_one_before_are_off() -> None:
    said: list[str] = []
    with EmbeddedControl(PATIENT) as embedded:
        before = PhaseClient(embedded, terms("a"))
        before.resident(TRAINING, on_release=lambda: said.append("offloaded"))
        with before.phase(TRAINING):
            pass
        with PhaseClient(embedded, terms("a"), timeout_s=LONG_S).phase(ROLLOUT):
            said.append("rolls out")
    assert said == ["offloaded", "rolls out"]


class Restarted(Transport):
    """A way to a control that may begin anew, without a state file."""

    def __init__(self, control: EmbeddedControl) -> None:
        self.control = control

    def call(self, message: Call) -> Reply:
        return self.control.call(message)


def test_a_control_that_begins_anew_starts_no_job_beside_a_state_that_it_does_not_know() -> None:
    said: list[str] = []
    with EmbeddedControl(PATIENT) as first, EmbeddedControl(PATIENT) as anew:
        way = Restarted(first)
        a = PhaseClient(way, terms("a"), timeout_s=LONG_S)
        a.resident(TRAINING, on_release=lambda: said.append("a is off"))
        with a.phase(TRAINING):
            pass
        way.control = anew
        # It is registered again and runs: the new control knows the process, not its states.
        with a.phase(ROLLOUT), PhaseClient(anew, terms("b"), timeout_s=LONG_S).phase(TRAINING):
            said.append("b trains")
    assert said == ["a is off", "b trains"]


def test_a_state_whose_release_failed_is_not_reported_and_makes_no_way() -> None:
    transport = Answering()
    states = LoadedStates(transport, VirtualClock(), JobId("a"), "a.1")
    states.leave(ROLLOUT, nodes("n0 n1"), _breaks, lease_s=LONG_S)
    with pytest.raises(OSError, match="host memory"):
        states.take(TRAINING, nodes("n0"))
    states.release(nodes("n1 n2"))
    reports = [call for call in transport.calls if isinstance(call, Unloaded) and call.nodes]
    assert [report.nodes for report in reports] == [nodes("n2")]


def test_a_phase_that_lost_a_node_stops_before_another_job_starts_on_its_living_one() -> None:
    said: list[str] = []
    nodes_there = cluster("r0 r1", "t0 t1")
    with EmbeddedControl(cluster=nodes_there) as control, ThreadPoolExecutor(1) as pool:
        wide = submission("a", rollout_nodes=2, slo=3.0)
        a = PhaseClient(control, wide, timeout_s=LONG_S)
        b = PhaseClient(control, submission("b", slo=3.0), timeout_s=LONG_S)
        a.resident(ROLLOUT, on_release=lambda: said.append("a is off"))
        a.resident(TRAINING)
        for kind in (ROLLOUT, TRAINING):
            with a.phase(kind):
                pass
        permit = a.begin(ROLLOUT)
        waiting = pool.submit(b.begin, ROLLOUT)
        control.call(NodeReport(node=NodeId("r1"), failed=True))
        while not permit.lost:
            time.sleep(0.01)
        # Its training state is still loaded: the process goes on asking what to unload.
        with pytest.raises(TimeoutError):
            waiting.result(1.5)
        a.end(permit, failed="its node failed")
        assert said == ["a is off"]
        granted = waiting.result(LONG_S)
        assert granted.nodes == nodes("r0")
        b.end(granted)


def test_a_state_that_fails_to_load_gives_the_nodes_back(embedded: EmbeddedControl) -> None:
    phases = PhaseClient(embedded, terms("a"))
    phases.resident(ROLLOUT, stays_loaded=False, on_resume=_breaks)
    with pytest.raises(OSError, match="host memory"), phases.phase(ROLLOUT):
        pass
    other = PhaseClient(embedded, terms("b"), timeout_s=LONG_S)
    with other.phase(ROLLOUT) as permit:
        assert permit.nodes == nodes("r0")


class Hook:
    """Fails the first time; `done` counts the times that it succeeded."""

    def __init__(self) -> None:
        self.calls = self.done = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            _breaks()
        self.done += 1


def test_a_state_that_fails_to_leave_keeps_other_jobs_off_until_it_has_left(
    embedded: EmbeddedControl,
) -> None:
    phases, offloads = PhaseClient(embedded, terms("a")), Hook()
    phases.resident(ROLLOUT, stays_loaded=False, on_release=offloads)
    with pytest.raises(OSError, match="host memory"), phases.phase(ROLLOUT):
        pass
    assert not offloads.done
    with PhaseClient(embedded, terms("b"), timeout_s=LONG_S).phase(ROLLOUT):
        assert offloads.done == 1


def test_a_state_that_fails_to_make_way_for_the_job_s_own_phase_keeps_other_jobs_off(
    embedded: EmbeddedControl,
) -> None:
    phases, offloads, loads = (
        PhaseClient(embedded, terms("a", rollout="n0", training="n0")),
        Hook(),
        Hook(),
    )
    phases.resident(TRAINING, on_release=offloads)
    phases.resident(ROLLOUT, on_resume=loads)
    with phases.phase(TRAINING):
        pass
    with pytest.raises(OSError, match="host memory"), phases.phase(ROLLOUT):
        pass
    assert (offloads.calls, loads.calls) == (1, 0)
    with PhaseClient(embedded, terms("b", rollout="n0", training="n0"), timeout_s=LONG_S).phase(
        ROLLOUT
    ):
        assert offloads.done == 1


def test_a_state_that_failed_to_leave_is_loaded_anew_by_the_job_s_next_phase(
    embedded: EmbeddedControl,
) -> None:
    phases, offloads, loads = PhaseClient(embedded, terms("a")), Hook(), Hook()
    loads.calls = 1
    phases.resident(ROLLOUT, stays_loaded=False, on_resume=loads, on_release=offloads)
    with pytest.raises(OSError, match="host memory"), phases.phase(ROLLOUT):
        pass
    with phases.phase(ROLLOUT):
        assert (offloads.done, loads.done) == (1, 2)


def _breaks(*_: Any) -> None:
    raise OSError("no host memory")


def test_an_error_in_a_phase_fails_the_job_and_frees_its_nodes(
    embedded: EmbeddedControl,
) -> None:
    phases = PhaseClient(embedded, terms("a"))
    with pytest.raises(ZeroDivisionError), phases.phase(ROLLOUT):
        raise ZeroDivisionError
    with PhaseClient(embedded, terms("b"), timeout_s=LONG_S).phase(ROLLOUT):
        pass
    with phases.phase(ROLLOUT):
        pass


def test_phases_of_one_job_do_not_nest(embedded: EmbeddedControl) -> None:
    phases = PhaseClient(embedded, terms("a"))
    with phases.phase(ROLLOUT), pytest.raises(ConfigError, match="must end"):
        phases.begin(TRAINING)


def test_no_two_threads_of_a_job_run_under_one_permit() -> None:
    with EmbeddedControl() as control, ThreadPoolExecutor(2) as pool:
        a, b = (PhaseClient(control, terms(job), timeout_s=LONG_S) for job in "ab")
        over = threading.Event()

        def roll_out() -> None:
            with a.phase(ROLLOUT):
                over.wait(LONG_S)

        with b.phase(ROLLOUT):
            running = [pool.submit(roll_out) for _ in range(2)]
            refused, _ = wait(running, timeout=LONG_S, return_when=FIRST_COMPLETED)
        over.set()
        (fault,) = [one.exception() for one in refused]
        assert isinstance(fault, ConfigError)
        assert "must end before" in str(fault)


def test_a_phase_that_the_terms_do_not_name_is_an_error_and_no_wait(
    embedded: EmbeddedControl,
) -> None:
    only = JobTerms(job=JobId("a"), phases=terms("a").phases[:1])
    with pytest.raises(ConfigError, match="no training phase"):
        PhaseClient(embedded, only).begin(TRAINING)
    with pytest.raises(ConfigError, match="tail_ratio"):
        PhaseClient(embedded, terms("b", tail_ratio=2.0))


def test_a_holder_is_kept_by_its_beats_for_many_leases() -> None:
    with EmbeddedControl(QUICK) as embedded:
        phases = PhaseClient(embedded, terms("a"))
        other = PhaseClient(embedded, terms("b"), timeout_s=4 * QUICK.lease_s)
        with phases.phase(ROLLOUT), pytest.raises(Exhausted, match="1 jobs"):
            other.begin(ROLLOUT)


def test_a_tail_makes_room_on_request_and_the_other_job_starts_beside_it(
    embedded: EmbeddedControl,
) -> None:
    phases = PhaseClient(embedded, terms("a", rollout="r0 r1", tail_ratio=0.8))
    other = PhaseClient(embedded, terms("b", rollout="r1"), timeout_s=LONG_S)
    with ThreadPoolExecutor(1) as pool, phases.phase(ROLLOUT) as permit:
        started = pool.submit(other.begin, ROLLOUT)
        permit.progress(0.9)
        while permit.keep is None:
            threading.Event().wait(0.01)
        assert permit.keep == nodes("r0")
        permit.narrowed()
        beside = started.result(timeout=LONG_S)
        assert beside.nodes == nodes("r1")
        other.end(beside)


class Scripted(Transport):
    """A control with scripted answers to beats; everything else is granted."""

    def __init__(self, *beats: Reply | Exception) -> None:
        self.beats = list(beats)
        self.beaten = threading.Event()
        self.left: list[Leave] = []

    def call(self, message: Call) -> Reply:
        if isinstance(message, Beat) and self.beats:
            said = self.beats.pop(0)
            if not self.beats:
                self.beaten.set()
            if isinstance(said, Exception):
                raise said
            return said
        if isinstance(message, Leave):
            self.left.append(message)
            return Ended(reason="gone")
        if isinstance(message, Register):
            return Accepted()
        return Granted(epoch=Epoch(1), nodes=nodes("r0"), lease_s=QUICK.lease_s)


def _permit(transport: Transport, clock: VirtualClock) -> Permit:
    granted = Granted(epoch=Epoch(1), nodes=nodes("r0"), lease_s=0.03)
    return Permit(transport, clock, job=JobId("a"), kind=ROLLOUT, granted=granted, asked_s=0.0)


def test_a_permit_that_was_taken_away_is_seen_while_the_phase_runs() -> None:
    transport = Scripted(Ended(reason="epoch 1 is not in force"))
    permit = _permit(transport, VirtualClock())
    assert transport.beaten.wait(LONG_S)
    permit.end()
    assert permit.lost == "epoch 1 is not in force"
    with pytest.raises(Stale, match="not in force"):
        permit.check()


def test_a_holder_goes_on_while_there_is_no_control() -> None:
    clock = VirtualClock()
    transport = Scripted(ControlUnreachable("killed"), ControlUnreachable("killed"))
    permit = _permit(transport, clock)
    clock.now_s = 1000.0
    assert transport.beaten.wait(LONG_S)
    permit.end()
    permit.check()


def test_a_disconnected_holder_stops_before_its_lease_ends() -> None:
    clock = VirtualClock()
    transport = Scripted(Exhausted("cut off"))
    permit = _permit(transport, clock)
    clock.now_s = 0.028
    assert transport.beaten.wait(LONG_S)
    permit.end()
    with pytest.raises(Stale, match="silent"):
        permit.check()


class Hanging(Scripted):
    """A control that takes a beat and answers it only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.answers = threading.Event(), threading.Event()

    def call(self, message: Call) -> Reply:
        if isinstance(message, Beat):
            self.taken.set()
            self.answers.wait(LONG_S)
            raise Exhausted("no answer in time")
        return super().call(message)


def test_a_holder_stops_before_its_lease_ends_although_its_beat_has_not_failed_yet() -> None:
    clock, transport = VirtualClock(), Hanging()
    permit = _permit(transport, clock)
    assert transport.taken.wait(LONG_S)
    clock.now_s = 0.026
    permit.check()
    clock.now_s = 0.028
    with pytest.raises(Stale, match="silent"):
        permit.check()
    transport.answers.set()
    permit.end()


def test_a_phase_that_ends_after_its_lease_leaves_no_state_loaded() -> None:
    clock, transport, released = VirtualClock(), Hanging(), list[str]()
    phases = PhaseClient(transport, terms("a"), clock=clock, timeout_s=LONG_S)
    phases.resident(ROLLOUT, on_release=lambda: released.append("rollout"))
    permit = phases.begin(ROLLOUT)
    clock.now_s += QUICK.lease_s
    transport.answers.set()
    with pytest.raises(Stale):
        phases.end(permit)
    assert released == ["rollout"]


class Deaf(Transport):
    """A control that hears no end of a phase."""

    def __init__(self, control: Transport) -> None:
        self.control = control

    def call(self, message: Call) -> Reply:
        if isinstance(message, Leave):
            raise Exhausted("no answer in time")
        return self.control.call(message)


def test_a_phase_whose_end_is_not_heard_leaves_no_state_loaded_for_the_next_holder() -> None:
    released: list[str] = []
    with EmbeddedControl(PermitsConfig(lease_s=1.0)) as control:
        phases = PhaseClient(Deaf(control), terms("a"), timeout_s=0.1)
        phases.resident(ROLLOUT, on_release=lambda: released.append("a"))
        permit = phases.begin(ROLLOUT)
        with pytest.raises(Exhausted):
            phases.end(permit)
        others = PhaseClient(control, terms("b"), timeout_s=LONG_S)
        with others.phase("rollout"):
            assert released == ["a"]


def test_a_holder_counts_its_lease_from_the_request_and_not_from_a_late_answer() -> None:
    clock, transport = VirtualClock(now_s=0.028), Hanging()
    permit = _permit(transport, clock)
    with pytest.raises(Stale, match="silent"):
        permit.check()
    transport.answers.set()
    permit.end()


def test_a_permit_that_ended_in_time_stays_so_however_long_its_leave_takes() -> None:
    clock, transport = VirtualClock(), Hanging()
    transport.answers.set()
    permit = _permit(transport, clock)
    permit.end()
    clock.now_s = 1000.0
    permit.check()


class Slow(Scripted):
    """A control whose first grant comes when half of its lease is over."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.entered: list[Enter] = []

    def call(self, message: Call) -> Reply:
        if isinstance(message, Enter):
            self.entered.append(message)
            if len(self.entered) == 1:
                self.clock.now_s += QUICK.lease_s / 2
        return super().call(message)


def test_a_grant_that_comes_late_is_asked_for_again_for_a_whole_lease() -> None:
    clock = VirtualClock()
    transport = Slow(clock)
    phases = PhaseClient(transport, terms("a"), clock=clock, timeout_s=LONG_S)
    permit = phases.begin(ROLLOUT)
    clock.now_s += 0.8 * QUICK.lease_s
    permit.check()
    permit.end()
    assert [entry.wait_s for entry in transport.entered] == [1.0, 0.0]


class Lagging(Transport):
    """A control whose calls fail after half of a lease."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def call(self, message: Call) -> Reply:
        self.clock.now_s += 0.5 * QUICK.lease_s
        raise Exhausted("no answer in time")


def test_a_loaded_state_is_gone_before_its_lease_ends_although_calls_take_long_to_fail() -> None:
    clock, gone_s, gone = VirtualClock(), list[float](), threading.Event()

    def release() -> None:
        gone_s.append(clock.now_s)
        gone.set()

    states = LoadedStates(Lagging(clock), clock, JobId("a"), "a.1")
    states.leave(ROLLOUT, nodes("r0"), release, lease_s=QUICK.lease_s)
    assert gone.wait(LONG_S)
    assert gone_s[0] <= 0.9 * QUICK.lease_s


class Answering(Transport):
    """A control that asks for nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(self, message: Call) -> Reply:
        self.calls.append(message)
        return Accepted()


def test_a_process_that_stood_still_releases_its_states_before_it_asks() -> None:
    clock, transport, gone = VirtualClock(), Answering(), threading.Event()
    states = LoadedStates(transport, clock, JobId("a"), "a.1")
    states.leave(ROLLOUT, nodes("r0"), gone.set, lease_s=LONG_S)
    clock.now_s = 0.95 * LONG_S
    assert gone.wait(LONG_S)
    while not transport.calls:
        time.sleep(0.01)
    assert transport.calls[0] == Unloaded(job=JobId("a"), holder="a.1", nodes=nodes("r0"))


def test_no_other_call_hides_that_the_process_stood_still() -> None:
    clock, gone = VirtualClock(), threading.Event()
    states = LoadedStates(Answering(), clock, JobId("a"), "a.1")
    states.leave(TRAINING, nodes("t0"), gone.set, lease_s=LONG_S)
    clock.now_s = 0.95 * LONG_S
    states.leave(ROLLOUT, nodes("r0"), lambda: None, lease_s=LONG_S)
    states.release(nodes("r0"))
    assert gone.wait(LONG_S)


class Fencing(Scripted):
    """A control that has given the second phase's nodes to another job when it ends."""

    def call(self, message: Call) -> Reply:
        if isinstance(message, Leave):
            self.left.append(message)
            return Accepted() if len(self.left) == 1 else Ended(reason="gone")
        if isinstance(message, Enter):
            on = nodes("t0" if message.kind is TRAINING else "r0")
            return Granted(epoch=Epoch(1), nodes=on, lease_s=LONG_S)
        return super().call(message)


@pytest.mark.parametrize("failed", ["", "no more data"])
def test_a_job_whose_permit_was_lost_unseen_leaves_no_state_loaded(failed: str) -> None:
    released: list[str] = []
    phases = PhaseClient(Fencing(), terms("a"), timeout_s=LONG_S)
    for kind in (TRAINING, ROLLOUT):
        phases.resident(kind, on_release=lambda kind=kind: released.append(kind))
    with phases.phase(TRAINING):
        pass
    permit = phases.begin(ROLLOUT)
    with nullcontext() if failed else pytest.raises(Stale):
        phases.end(permit, failed=failed)
    assert sorted(released) == ["rollout", "training"]


class Held(Transport):
    """A control whose answers to entries come when they are let through."""

    def __init__(self, control: Transport) -> None:
        self.control = control
        self.taken, self.answers = threading.Event(), threading.Event()

    def call(self, message: Call) -> Reply:
        reply = self.control.call(message)
        if isinstance(message, Enter):
            self.taken.set()
            self.answers.wait(LONG_S)
        return reply


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_task_cancelled_while_it_enters_gives_its_permit_back_before_it_ends(
    embedded: EmbeddedControl, times: int
) -> None:
    transport = Held(embedded)
    phases = PhaseClient(transport, terms("a"))

    async def roll_out() -> None:
        async with phases.phase(ROLLOUT):
            raise AssertionError("it was cancelled before")

    async def cancelled() -> None:
        task = asyncio.create_task(roll_out())
        await asyncio.to_thread(transport.taken.wait, LONG_S)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        transport.answers.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert embedded.jobs()[0].stage is PermitStage.APART

    asyncio.run(cancelled())
    with PhaseClient(embedded, terms("b"), timeout_s=LONG_S).phase(ROLLOUT):
        pass
    with phases.phase(ROLLOUT):
        pass


@pytest.mark.parametrize("times", [1, 2])
def test_a_task_cancelled_while_it_loads_or_leaves_gives_its_permit_back_before_it_ends(
    embedded: EmbeddedControl, times: int
) -> None:
    phases = PhaseClient(embedded, terms("a"))
    busy, goes_on = threading.Event(), threading.Event()

    def work(*_: object) -> None:
        busy.set()
        goes_on.wait(LONG_S)

    async def roll_out() -> None:
        async with phases.phase(ROLLOUT):
            pass

    async def cancelled() -> None:
        task = asyncio.create_task(roll_out())
        await asyncio.to_thread(busy.wait, LONG_S)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not embedded.jobs()[0].nodes

    for hook in ("on_resume", "on_release"):
        busy.clear()
        goes_on.clear()
        hooks: dict[str, Callable[..., None]] = {hook: work}
        phases.resident(ROLLOUT, stays_loaded=False, **hooks)
        asyncio.run(cancelled())


def test_a_permit_that_comes_after_its_request_was_cancelled_is_given_back(
    embedded: EmbeddedControl,
) -> None:
    transport, cancelled, off = Held(embedded), threading.Event(), threading.Event()
    transport.answers.set()
    phases = PhaseClient(transport, terms("a"))
    phases.resident(ROLLOUT, on_release=off.set)
    with phases.phase(ROLLOUT):
        pass
    transport.taken.clear()
    transport.answers.clear()
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(phases.begin, ROLLOUT, cancelled=cancelled)
        assert transport.taken.wait(LONG_S)
        cancelled.set()
        transport.answers.set()
        with pytest.raises(Exhausted, match="cancelled"):
            beginning.result()
    assert embedded.jobs()[0].stage is PermitStage.APART
    assert off.is_set(), "another job may start there now"


class Gone(Scripted):
    """A control that dies once it has granted."""

    def call(self, message: Call) -> Reply:
        if isinstance(message, Beat | Leave):
            raise ControlUnreachable("killed")
        return super().call(message)


def test_an_error_leaves_the_phase_also_while_there_is_no_control() -> None:
    phases = PhaseClient(Gone(), terms("a"), timeout_s=LONG_S)
    with pytest.raises(ZeroDivisionError), phases.phase(ROLLOUT):
        raise ZeroDivisionError
