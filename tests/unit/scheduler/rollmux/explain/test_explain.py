"""A newcomer's questions to a job's journal, and the answers of `rosemux phases explain`."""

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.runtime_events import (
    NodeReport,
)
from scheduler.rollmux.control.command import explain
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.explain.explanation import EVER, Explanation, explanation, moment
from scheduler.rollmux.explain.history_entry import EventKind
from scheduler.rollmux.explain.journal_lines import journal_lines
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Forget,
    Register,
    Withdraw,
)
from tests.unit.scheduler.rollmux.cluster.submissions import (
    PERMITS,
    ROLLOUT,
    TRAINING,
    Control,
    cluster,
    submission,
)
from tests.unit.scheduler.rollmux.permits.permit_scenario import terms
from tests.virtual_clock import VirtualClock

HOUR_S = 3600.0


Opens = Callable[..., Control]


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Opens]:
    """Controls with a journal in the test's directory, closed at its end."""
    controls: list[Control] = []

    def make(config: ClusterConfig | None = None, **more: Any) -> Control:
        controls.append(Control(config, journal=tmp_path, **more))
        return controls[-1]

    yield make
    for one in controls:
        one.service.close()


@pytest.fixture
def control(opens: Opens) -> Control:
    return opens(cluster(gone_s=1e6))


def _explained(control: Control, job: str, *, permits: bool = False) -> Explanation:
    directory = control.kept["journal"]
    return explanation(directory, job, since=EVER, permits=permits)


def _told(found: Explanation, kind: EventKind) -> list[str]:
    return [entry.text for entry in found.entries if entry.kind is kind]


def _owe(control: Control, job: str, *, credit_s: float) -> None:
    """The job's account, as if it had lived for a day."""
    account = control.service.cluster.planner.facts[JobId(job)].account
    account.solo_s = 24 * HOUR_S
    account.began_s = control.clock.now_s + credit_s - account.slo * account.solo_s


def _in_danger(control: Control) -> None:
    """Two jobs on one training node: `tight` is behind and `easy` can pay for a move."""
    control.submit(
        submission("easy", 60.0, 20.0, slo=2.5, measured=True),
        submission("tight", 300.0, 100.0, slo=1.5, measured=True),
    )
    for job in ("easy", "tight"):
        control.iteration(job)
        control.pass_time(1.0)
    _owe(control, "tight", credit_s=-HOUR_S)
    _owe(control, "easy", credit_s=24 * HOUR_S)
    control.pass_time(1861.0)


def test_the_explanation_of_a_move_names_the_job_with_the_promise_at_risk(control: Control) -> None:
    _in_danger(control)
    control.iteration("easy")
    control.submit(control.service.cluster.placements[JobId("easy")].spec)
    assert control.runs("easy")
    found = _explained(control, "easy")
    (asked,) = _told(found, EventKind.MOVE_REQUESTED)
    assert asked.startswith("asked to move to group-")
    assert "at its iteration's end: the promise to tight was at risk" in asked
    (told,), (arrived,) = _told(found, EventKind.MOVE_ORDERED), _told(found, EventKind.ARRIVED)
    where = " | ".join(" ".join(side) for side in control.at("easy"))
    assert told == f"iteration ended: ordered to move to {where}"
    assert arrived.endswith(f"on {where} now")
    order = [entry.kind for entry in found.entries]
    assert order == [
        EventKind.SUBMITTED,
        EventKind.PLACED,
        EventKind.MOVE_REQUESTED,
        EventKind.MOVE_ORDERED,
        EventKind.ARRIVED,
    ]


def test_a_placement_names_nodes_neighbours_and_price(control: Control) -> None:
    control.submit(submission("a"), submission("b"))
    assert _told(_explained(control, "a"), EventKind.PLACED) == [
        "placed in group-3 on r0 | t0 alone: new isolated group, +57.00 $/h"
    ]
    (placed,) = _told(_explained(control, "b"), EventKind.PLACED)
    assert re.fullmatch(r"placed in group-3 on .* beside a: .*, \+\d+\.00 \$/h", placed)


def test_a_job_without_a_place_hears_what_is_missing_once(opens: Opens) -> None:
    control = opens(cluster("r0", "t0"))
    control.submit(submission("a", slo=1.0), submission("b", slo=1.0))
    control.submit(submission("b", slo=1.0))
    control.service.call(Forget(job=JobId("a")))
    found = _explained(control, "b")
    assert [entry.kind for entry in found.entries] == [
        EventKind.SUBMITTED,
        EventKind.QUEUED,
        EventKind.PLACED,
    ]
    assert "1 h20 of which 0 are free" in found.entries[1].text


def test_a_failed_node_is_named_with_the_phase_that_it_ended(control: Control) -> None:
    control.submit(submission("a"))
    control.runs("a")
    control.pass_time(8.0, beats="a")
    control.service.call(NodeReport(node=NodeId("r0"), failed=True))
    found = _explained(control, "a")
    assert _told(found, EventKind.RESTARTED) == [
        "gets other nodes, in group-3 on r1 | t0 alone: node r0 failed; it is replaced"
    ]
    assert _told(found, EventKind.LOST) == [
        "its rollout permit ended after 8.0 s, left: node r0 failed"
    ]
    assert not _told(found, EventKind.ARRIVED)


def test_a_tenant_s_reason_of_a_failure_stays_one_line_of_text(control: Control) -> None:
    """An operator reads it in a terminal, between lines of the control's own."""
    control.submit(submission("a"))
    control.runs("a")
    control.leave("a", failed="\x1b]0;owned\x07\x1b[2J\n2026-11-29 01:00:00  forged \x9b2J")
    (line,) = [one for one in _explained(control, "a").lines() if "forged" in one]
    assert line.isprintable()
    assert "2026-11-29" in line


def test_a_job_without_nodes_is_notified_of_its_next_node(opens: Opens) -> None:
    control = opens(cluster("r0", "t0"))
    control.submit(submission("a"))
    control.service.call(NodeReport(node=NodeId("t0"), failed=True))
    control.service.call(NodeReport(node=NodeId("t0"), failed=False))
    found = _explained(control, "a")
    (restarted,), (arrived,) = (
        _told(found, EventKind.RESTARTED),
        _told(found, EventKind.ARRIVED),
    )
    assert "on r0 | (no node is free) alone: node t0 failed" in restarted
    assert arrived == "is in group-3 on r0 | t0 now"


def test_a_permit_names_its_wait_and_the_jobs_before_it(control: Control) -> None:
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    assert control.at("a")[1] == control.at("b")[1]
    for job in ("a", "b"):
        control.phase(job, ROLLOUT, 4.0)
    control.runs("a", TRAINING)
    control.enter("b", TRAINING)
    for _ in range(5):
        control.pass_time(4.0, beats="a")
        control.enter("b", TRAINING)
    control.leave("a")
    control.pass_time(12.0, beats="b")
    control.leave("b")
    found = _explained(control, "b", permits=True)
    granted = _told(found, EventKind.GRANTED)[-1]
    assert granted == "training begins on t0, after 20.0 s of waiting, behind a (20.0 s)"
    assert (
        _told(found, EventKind.DONE)[-1]
        == "training is done after 12.0 s; alone it would have taken 12.0 s"
    )
    summary = next(one for one in found.permits if one.kind is TRAINING)
    assert summary.behind_s == {"a": 20.0}
    assert not _told(_explained(control, "b"), EventKind.GRANTED)
    assert any(
        line.startswith(
            "training: 1 permits, waited 20.0 s in the median, 20.0 s at most, behind a"
        )
        for line in found.lines()
    )


def test_a_tail_that_is_narrowed_says_to_which_accelerators_and_why(opens: Opens) -> None:
    control = opens(cluster("r0", "t0", tail_ratio=0.8))
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    control.runs("a")
    control.enter("b")
    permit = control.service.policy.permit(JobId("a"))
    assert permit is not None
    epoch = permit.epoch
    control.service.call(Beat(job=JobId("a"), epoch=epoch, complete_ratio=0.9))
    control.enter("b")
    control.service.call(Beat(job=JobId("a"), epoch=epoch, complete_ratio=0.9, narrowed=True))
    found = _explained(control, "a", permits=True)
    (narrowed,) = _told(found, EventKind.NARROWED)
    assert re.fullmatch(
        r"asked to bring its tail together on r0\[[\d,]+\]: 90% complete, and others wait", narrowed
    )
    assert _told(found, EventKind.FREED)
    (granted,) = _told(_explained(control, "b", permits=True), EventKind.GRANTED)
    assert re.match(r"rollout begins on r0\[[\d,]+\], after", granted)


def test_a_closed_job_gets_its_slow_down_and_its_slo(control: Control) -> None:
    control.submit(submission("a"))
    control.iteration("a")
    control.service.call(Forget(job=JobId("a")))
    (closed,) = _told(_explained(control, "a"), EventKind.CLOSED)
    assert re.fullmatch(
        r"closed: it was forgotten; after 1 iterations and 0 moves its slow-down was "
        r"[\d.]+ of 1.60: its SLO was kept",
        closed,
    )


def test_a_silent_job_is_explained_as_silent(opens: Opens) -> None:
    control = opens(cluster(gone_s=60.0))
    control.submit(submission("a"))
    control.pass_time(200.0)
    assert _told(_explained(control, "a"), EventKind.CLOSED) == [
        "closed: it was silent for too long"
    ]


def test_a_queued_job_that_falls_silent_is_closed_in_the_journal_and_the_next_is_placed(
    opens: Opens,
) -> None:
    control = opens(cluster("r0", "t0", gone_s=300.0))
    jobs = [submission(name, slo=1.01) for name in ("a", "ghost", "next")]
    control.submit(*jobs)
    for _ in range(3):
        control.pass_time(1.0)
        control.submit(*jobs)
    for _ in range(8):
        control.enter("a")
        control.pass_time(60.0, beats="a")
        control.leave("a")
        control.submit(jobs[2])
    found = _explained(control, "ghost")
    assert _told(found, EventKind.CLOSED) == ["closed: it was silent for too long"]
    assert found.entries[-1].kind is EventKind.CLOSED
    control.service.call(Forget(job=JobId("a")))
    assert _told(_explained(control, "next"), EventKind.PLACED)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_that_gave_up_its_wait_is_closed_and_listed_when_it_comes_again(
    opens: Opens, tmp_path: Path, restarts: bool
) -> None:
    control = opens(cluster("r0", "t0"), state=tmp_path / "state.sqlite")
    control.submit(submission("a", slo=1.01), submission("b", slo=1.01))
    if restarts:
        control.service.close()
        control = opens(control.config, clock=control.clock, state=tmp_path / "state.sqlite")
    control.service.call(Withdraw(job=JobId("b"), holder="b.1"))
    control.submit(submission("b", slo=1.01))
    kinds = [one.kind for one in _explained(control, "b").entries]
    again = kinds[kinds.index(EventKind.CLOSED) :]
    assert again == [EventKind.CLOSED, EventKind.SUBMITTED, EventKind.QUEUED]


def test_a_restart_is_listed_and_the_wait_behind_a_holder_comes_from_the_snapshot(
    opens: Opens, tmp_path: Path
) -> None:
    control = opens(state=tmp_path / "state.sqlite")
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    for job in ("a", "b"):
        control.phase(job, ROLLOUT, 4.0)
    control.runs("a", TRAINING)
    control.enter("b", TRAINING)
    control = control.restarted()
    control.pass_time(4.0, beats="a")
    control.enter("b", TRAINING)
    control.leave("a")
    found = _explained(control, "b", permits=True)
    control.service.close()
    assert _told(found, EventKind.CONTROL) == [
        "the control is back: holders have a whole lease again"
    ]
    assert _told(found, EventKind.GRANTED)[-1].endswith("behind a (4.0 s)")


def test_a_history_spans_rotated_files_and_names_the_beginning_of_the_journal(
    opens: Opens, tmp_path: Path
) -> None:
    control = opens(journal_bytes=30_000)
    control.submit(submission("a"))
    while not (tmp_path / "scheduler.policy.cluster.jsonl.1").exists():
        control.iteration("a")
    whole = _explained(control, "a")
    assert whole.entries[0].kind is EventKind.SUBMITTED
    first = (tmp_path / "scheduler.policy.cluster.jsonl.1").stat().st_mtime_ns
    while (tmp_path / "scheduler.policy.cluster.jsonl.1").stat().st_mtime_ns == first:
        control.iteration("a")
    control.iteration("a")
    found = _explained(control, "a")
    assert found.entries[0].text == "the journal begins; the job is there already, on r0 t0"
    assert sum(len(one.waits_s) for one in found.permits) >= 2


def test_a_torn_last_line_is_left_out(control: Control, tmp_path: Path) -> None:
    control.submit(submission("a"))
    control.service.close()
    path = tmp_path / "scheduler.policy.cluster.jsonl"
    with path.open("ab") as file:
        file.write(b'{"type":"decided","t_s":1.0,"sam')
    assert _told(_explained(control, "a"), EventKind.PLACED)


def test_a_rotation_while_the_journal_is_read_loses_no_line(opens: Opens, tmp_path: Path) -> None:
    control = opens(journal_bytes=30_000)
    control.submit(submission("a"))
    for _ in range(8):
        control.iteration("a")
    before = list(journal_lines(tmp_path))
    reading = journal_lines(tmp_path)
    first = next(reading)
    for _ in range(20):
        control.iteration("a")
    assert [first, *reading][: len(before)] == before


def test_lines_of_other_versions_are_dated_and_what_is_not_known_is_left_out(
    opens: Opens, tmp_path: Path
) -> None:
    control = opens()
    control.clock.now_s = 5000.0
    control.submit(submission("a"))
    control.service.close()
    expected = _explained(control, "a").entries
    path = tmp_path / "scheduler.policy.cluster.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    del lines[0]["t_s"]
    for line in lines[1:]:
        line["effects"].insert(0, {"type": "of_another_version", "job": "a"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _explained(control, "a").entries
    assert [entry.text for entry in found] == [entry.text for entry in expected]
    assert found[0].at == datetime.fromisoformat(lines[0]["wall"])


def test_after_a_reboot_no_wait_is_measured_over_two_clocks(opens: Opens, tmp_path: Path) -> None:
    control = opens(state=tmp_path / "state.sqlite")
    control.clock.now_s = 90_000.0
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    control.runs("a")
    control.enter("b")
    control.clock.now_s = 10.0
    again = control.restarted()
    again.pass_time(4.0, beats="a")
    again.enter("b")
    again.leave("a")
    found = _explained(again, "b", permits=True)
    again.service.close()
    waits_s = [wait_s for one in found.permits for wait_s in one.waits_s]
    assert waits_s
    assert all(0.0 <= wait_s <= 4.0 for wait_s in waits_s)


def test_a_control_without_a_plan_explains_permits(tmp_path: Path) -> None:
    service = PhaseService(ControlSettings(permits=PERMITS, journal=tmp_path), VirtualClock())
    service.call(Register(terms=terms("a", rollout="r0", training="t0")))
    service.call(Enter(job=JobId("a"), kind=ROLLOUT, holder="a.1"))
    service.close()
    found = explanation(tmp_path, "a", since=EVER, permits=True)
    assert [entry.kind for entry in found.entries] == [EventKind.PLACED, EventKind.GRANTED]


def test_other_terms_of_a_known_job_are_listed_with_their_differences(tmp_path: Path) -> None:
    state, journal = tmp_path / "state", tmp_path / "journal"
    for max_s in (5.0, 50.0, -1.0, 60.0):
        service = PhaseService(
            ControlSettings(permits=PERMITS, state=state, journal=journal), VirtualClock()
        )
        service.call(Register(terms=terms("a", max_s=max_s)))
        service.close()
    found = explanation(journal, "a", since=EVER, permits=True)
    assert _told(found, EventKind.PLACED) == [
        "placed by hand on r0 t0",
        "registered with other terms: rollout: max_s was 5.0, is 50.0",
        "registered with other terms: rollout: max_s was 50.0, is 60.0",
    ]


def test_only_later_events_are_listed_and_counted(control: Control) -> None:
    control.submit(submission("a"))
    control.iteration("a")
    whole = _explained(control, "a", permits=True)
    since = whole.entries[-1].at
    found = explanation(control.kept["journal"], "a", since=since, permits=True)
    assert [entry.kind for entry in found.entries] == [EventKind.DONE]
    assert sum(len(one.waits_s) for one in found.permits) == 0


def test_a_moment_is_given_as_a_time_of_day_or_as_how_long_ago() -> None:
    day = moment(last="24h", since="")
    assert moment(last="1d", since="") >= day
    assert moment(last="", since="2026-01-31T12:00").isoformat() == "2026-01-31T12:00:00+00:00"
    for last, since in (("24", ""), ("", "yesterday"), ("1h", "2026-01-31"), ("-1h", "")):
        with pytest.raises(ConfigError):
            moment(last=last, since=since)


@pytest.mark.parametrize("job", ["nobody", "../../etc", ""])
def test_a_job_that_is_not_there_or_no_name_is_a_user_s_error(control: Control, job: str) -> None:
    control.submit(submission("a"))
    with pytest.raises(ConfigError):
        _explained(control, job)


def test_a_directory_without_a_journal_is_a_user_s_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no journal"):
        explanation(tmp_path, "a", since=EVER, permits=False)


def test_the_command_writes_lines_or_one_document(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _in_danger(control)
    explain("easy", journal=tmp_path, socket=None, last="", since="", permits=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any("the promise to tight was at risk" in line for line in lines)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  submitted", lines[0])
    explain("easy", journal=tmp_path, socket=None, last="7d", since="", permits=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["job"] == "easy"
    kinds = [entry["kind"] for entry in document["entries"]]
    assert kinds[:2] == ["submitted", "placed"]
    assert {"granted", "done", "move_requested"} <= set(kinds)
    (rollout, training) = document["permits"]
    assert (rollout["kind"], training["kind"]) == ("rollout", "training")
    assert rollout["granted"] == 1
    with pytest.raises(ConfigError, match="--journal"):
        explain("easy", journal=None, socket=None)
