"""The control's metrics: from the first scrape on, by phase and reason, never by job."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from harvester.contracts.ids import JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.wire import (
    Granted,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Forget,
    Leave,
    Register,
)
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms
from tests.unit.scheduler.rollmux.permits.permit_scenario import (
    CONFIG,
    ROLLOUT,
    TRAINING,
    nodes,
    terms,
)
from tests.virtual_clock import VirtualClock

Labels = frozenset[tuple[str, str]]


class Scene:
    """A phase service, its jobs' processes and its scrapes."""

    def __init__(self, state: Path | None = None) -> None:
        self.clock = VirtualClock()
        self.state = state
        self.service = PhaseService(ControlSettings(permits=CONFIG, state=state), self.clock)

    def enter(self, job: str, kind: PhaseKind = ROLLOUT, *, process: str = "1") -> object:
        return self.service.enter(Enter(job=JobId(job), kind=kind, holder=f"{job}.{process}"))

    def run(self, job: str, kind: PhaseKind, seconds: float = 0.0, *, process: str = "1") -> None:
        granted = self.enter(job, kind, process=process)
        assert isinstance(granted, Granted)
        self.clock.now_s += seconds
        self.service.leave(Leave(job=JobId(job), epoch=granted.epoch))

    def beat(self, job: str, **said: float | bool) -> None:
        permit = self.service.policy.permit(JobId(job))
        assert permit is not None
        self.service.beat(Beat(job=JobId(job), epoch=permit.epoch, **said))

    def pass_time(self, seconds: float, *alive: str) -> None:
        """Passes time second by second, with beats of the `alive` jobs."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s = min(until_s, self.clock.now_s + 1.0)
            for job in alive:
                self.beat(job)
            self.service.tick()

    def said(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        found = [
            sample.value
            for family in text_string_to_metric_families(self.service.metrics().decode())
            for sample in family.samples
            if sample.name == f"scheduler_phase_{name}" and wanted <= set(sample.labels.items())
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)


def test_waiting_and_holding_jobs_are_counted_by_phase() -> None:
    scene = Scene()
    for job in ("a", "b", "c"):
        scene.service.register(Register(terms=terms(job)))
        scene.enter(job)
    scene.clock.now_s = 40.0
    assert scene.said("permits_held", phase="rollout") == 1
    assert scene.said("nodes_held", phase="rollout") == 1
    assert scene.said("permits_waiting", phase="rollout") == 2
    assert scene.said("permits_waiting", phase="training") == 0
    assert scene.said("longest_wait_seconds", phase="rollout") == 40.0
    assert scene.said("jobs", stage="waiting") == 2


def test_a_placed_job_without_a_request_does_not_count_as_waiting() -> None:
    scene = Scene()
    scene.service.register(Register(terms=terms("a")))
    scene.run("a", ROLLOUT)
    assert scene.said("jobs", stage="waiting") == 1
    assert scene.said("permits_waiting", phase="training") == 0


def test_the_first_start_of_a_phase_in_a_process_is_cold_and_all_later_ones_are_warm() -> None:
    scene = Scene()
    scene.service.register(Register(terms=terms("a")))
    for _ in range(3):
        scene.run("a", ROLLOUT)
        scene.run("a", TRAINING)
    scene.run("a", ROLLOUT, process="2")
    assert scene.said("starts_total", phase="rollout", start="cold") == 2
    assert scene.said("starts_total", phase="rollout", start="warm") == 2
    assert scene.said("starts_total", phase="training", start="cold") == 1


def test_a_node_that_goes_to_another_job_is_a_switch() -> None:
    scene = Scene()
    for job in ("a", "b"):
        scene.service.register(Register(terms=terms(job)))
    scene.run("a", ROLLOUT)
    scene.run("a", TRAINING)
    scene.run("a", ROLLOUT)
    assert scene.said("switches_total", phase="rollout") == 0
    scene.run("b", ROLLOUT)
    assert scene.said("switches_total", phase="rollout") == 1
    assert scene.said("switches_total", phase="training") == 0


def test_a_lost_lease_an_overrun_and_a_revocation_are_counted_apart() -> None:
    scene = Scene()
    long = JobTerms(
        job=JobId("long"), phases=(PhaseTerms(kind=ROLLOUT, nodes=nodes("r0"), max_s=2.0),)
    )
    scene.service.register(Register(terms=long))
    scene.service.register(Register(terms=terms("dead", rollout="r1")))
    scene.service.register(Register(terms=terms("next")))
    for job in ("long", "dead"):
        scene.enter(job)
    for _ in range(30):
        scene.enter("next")
        scene.pass_time(
            1.0, *(("long",) if scene.service.policy.on(nodes("r0")[0]) == "long" else ())
        )
    assert scene.said("overruns_total", phase="rollout") == 1
    assert scene.said("revocations_total", phase="rollout") == 1
    assert scene.said("permits_ended_total", phase="rollout", reason="overran") == 1
    assert scene.said("permits_ended_total", phase="rollout", reason="silent") == 1
    assert scene.said("permits_ended_total", phase="rollout", reason="done") == 0


def test_a_tail_that_made_room_and_the_times_of_phases_are_seen() -> None:
    scene = Scene()
    scene.service.register(Register(terms=terms("a", tail_ratio=0.5, tail_accelerators=0)))
    scene.service.register(Register(terms=terms("b")))
    scene.enter("a")
    scene.clock.now_s = 3.0
    scene.enter("b")
    scene.beat("a", complete_ratio=0.6)
    scene.clock.now_s = 5.0
    scene.beat("a", complete_ratio=0.7, narrowed=True)
    assert isinstance(scene.enter("b"), Granted)
    assert scene.said("tails_moved_total", phase="rollout") == 1
    assert scene.said("wait_seconds_sum", phase="rollout") == 2.0
    scene.clock.now_s = 9.0
    permit = scene.service.policy.permit(JobId("a"))
    assert permit is not None
    scene.service.leave(Leave(job=JobId("a"), epoch=permit.epoch))
    assert scene.said("hold_seconds_sum", phase="rollout") == 9.0
    assert scene.said("switches_total", phase="rollout") == 1


def test_the_number_of_series_does_not_grow_with_jobs() -> None:
    scene = Scene()
    before = scene.service.metrics().count(b"\n")
    for job in range(40):
        scene.service.register(
            Register(terms=terms(f"job{job}", rollout=f"r{job}", training=f"t{job}"))
        )
        scene.run(f"job{job}", ROLLOUT)
        scene.service.call(Forget(job=JobId(f"job{job}")))
    assert scene.service.metrics().count(b"\n") == before


def test_a_restarted_control_calls_no_process_cold_that_it_knew(tmp_path: Path) -> None:
    first = Scene(tmp_path / "state.sqlite")
    first.service.register(Register(terms=terms("a")))
    first.run("a", ROLLOUT)
    first.run("a", TRAINING)
    first.service.close()
    second = Scene(tmp_path / "state.sqlite")
    second.run("a", ROLLOUT)
    assert second.said("starts_total", phase="rollout", start="warm") == 1
    assert second.said("starts_total", phase="rollout", start="cold") == 0
