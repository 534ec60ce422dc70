"""The desk: restarts, pauses of its own, and a journal that replays."""

from pathlib import Path

import pytest

from harvester.contracts.clock import VirtualClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import Epoch, JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.control import desk as desk_module
from scheduler.rollmux.control.desk import PhaseService
from scheduler.rollmux.control.state import PermitState
from scheduler.rollmux.control.wire import (
    Beat,
    CallRefused,
    Ended,
    Enter,
    Forget,
    Granted,
    Leave,
    Left,
    Orders,
    Unloaded,
    Waiting,
)
from scheduler.rollmux.permits.standing import PermitStage
from scheduler.sim.replay import replay_journal
from tests.unit.scheduler.phases.said import CONFIG, ROLLOUT, TRAINING, nodes, terms


def _enter(desk: PhaseService, job: str, kind: PhaseKind = ROLLOUT) -> object:
    return desk.enter(Enter(job=JobId(job), kind=kind, holder=f"{job}.1"))


def _desk(clock: VirtualClock, path: Path | None = None, **more: Path) -> PhaseService:
    return PhaseService(CONFIG, clock, state=path, **more)


def _pass_time(desk: PhaseService, clock: VirtualClock, seconds: float) -> None:
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        clock.now_s = min(until_s, clock.now_s + 1.0)
        desk.tick()


def test_an_entry_is_granted_or_says_how_many_come_before() -> None:
    desk = _desk(VirtualClock())
    for job in ("a", "b"):
        desk.place(terms(job))
    assert _enter(desk, "a") == Granted(epoch=Epoch(1), nodes=nodes("r0"), lease_s=10.0)
    assert _enter(desk, "b") == Waiting(ahead=1)
    assert desk.leave(Leave(job=JobId("a"), epoch=Epoch(1))) == Left()
    assert isinstance(_enter(desk, "b"), Granted)


def _leave_loaded(desk: PhaseService) -> None:
    """Job a has left its state on r0, and b waits for it."""
    for job in ("a", "b"):
        desk.place(terms(job))
    _enter(desk, "a")
    assert desk.leave(Leave(job=JobId("a"), epoch=Epoch(1), stays_loaded=True)) == Left()
    assert isinstance(_enter(desk, "b"), Waiting)


def test_a_state_that_is_not_released_yet_is_waited_for_while_its_process_lives() -> None:
    clock = VirtualClock()
    desk = _desk(clock)
    _leave_loaded(desk)
    for _ in range(40):
        reply = desk.call(Unloaded(job=JobId("a"), holder="a.1"))
        assert reply == Left(unload=nodes("r0"))
        assert isinstance(_enter(desk, "b"), Waiting)
        _pass_time(desk, clock, 3.0)
    desk.call(Unloaded(job=JobId("a"), holder="a.1", nodes=nodes("r0")))
    assert isinstance(_enter(desk, "b"), Granted)


def test_a_process_that_is_not_heard_for_a_lease_keeps_no_node_by_its_state() -> None:
    clock = VirtualClock()
    desk = _desk(clock)
    _leave_loaded(desk)
    for _ in range(3):
        _pass_time(desk, clock, 3.0)
        desk.call(Unloaded(job=JobId("a"), holder="another process", nodes=nodes("r0")))
        assert isinstance(_enter(desk, "b"), Waiting)
    _pass_time(desk, clock, 3.0)
    assert isinstance(_enter(desk, "b"), Granted)


def test_a_state_left_loaded_outlives_a_restart_of_the_control(tmp_path: Path) -> None:
    clock = VirtualClock()
    desk = _desk(clock, tmp_path / "state.sqlite")
    _leave_loaded(desk)
    desk.close()
    desk = _desk(clock, tmp_path / "state.sqlite")
    assert isinstance(_enter(desk, "b"), Waiting)
    desk.call(Unloaded(job=JobId("a"), holder="a.1", nodes=nodes("r0")))
    assert isinstance(_enter(desk, "b"), Granted)


def test_repeating_a_call_changes_nothing() -> None:
    desk = _desk(VirtualClock())
    desk.place(terms("a"))
    assert _enter(desk, "a") == _enter(desk, "a")
    desk.place(terms("a"))
    leave = Leave(job=JobId("a"), epoch=Epoch(1))
    assert desk.leave(leave) == Left()
    assert desk.leave(leave) == Left()
    assert isinstance(_enter(desk, "a", TRAINING), Granted)


def test_orders_hold_all_that_the_holder_must_know() -> None:
    desk = _desk(VirtualClock())
    desk.place(terms("a", rollout="r0 r1", tail_ratio=0.5))
    desk.place(terms("b", rollout="r1"))
    _enter(desk, "a")
    _enter(desk, "b")
    beat = Beat(job=JobId("a"), epoch=Epoch(1), complete_ratio=0.5)
    asked = desk.beat(beat)
    assert isinstance(asked, Orders)
    assert (asked.stage, asked.keep) == (PermitStage.NARROWING, nodes("r0"))
    done = desk.beat(Beat(job=JobId("a"), epoch=Epoch(1), complete_ratio=0.6, narrowed=True))
    assert isinstance(done, Orders)
    assert done.nodes == nodes("r0")
    assert isinstance(_enter(desk, "b"), Granted)


def test_a_restarted_desk_knows_its_holders_and_gives_no_epoch_again(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    first = _desk(clock, path)
    for job in ("a", "b"):
        first.place(terms(job))
        _enter(first, job)
    first.close()
    clock.advance_to(100.0)
    second = _desk(clock, path)
    assert isinstance(second.beat(Beat(job=JobId("a"), epoch=Epoch(1))), Orders)
    assert _enter(second, "b") == Waiting(ahead=1)
    second.leave(Leave(job=JobId("a"), epoch=Epoch(1)))
    granted = _enter(second, "b")
    assert isinstance(granted, Granted)
    assert granted.epoch == 2


def test_a_holder_that_does_not_come_back_after_a_restart_loses_its_permit(
    tmp_path: Path,
) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    first = _desk(clock, path)
    first.place(terms("a"))
    _enter(first, "a")
    first.close()
    second = _desk(clock, path)
    _pass_time(second, clock, 11.0)
    assert isinstance(second.beat(Beat(job=JobId("a"), epoch=Epoch(1))), Ended)


def test_a_desk_that_was_stopped_itself_takes_no_permit_for_it() -> None:
    clock = VirtualClock()
    desk = _desk(clock)
    desk.place(terms("a"))
    _enter(desk, "a")
    desk.tick()
    clock.advance_to(60.0)
    desk.tick()
    assert isinstance(desk.beat(Beat(job=JobId("a"), epoch=Epoch(1))), Orders)
    _pass_time(desk, clock, 11.0)
    assert isinstance(desk.beat(Beat(job=JobId("a"), epoch=Epoch(1))), Ended)


def test_a_job_that_is_forgotten_must_be_placed_again(tmp_path: Path) -> None:
    desk = _desk(VirtualClock(), tmp_path / "state.sqlite")
    desk.place(terms("a"))
    desk.call(Forget(job=JobId("a")))
    refused = _enter(desk, "a")
    assert isinstance(refused, CallRefused)
    assert refused.unknown
    desk.close()
    assert _desk(VirtualClock(), tmp_path / "state.sqlite").policy.jobs == ()


def test_a_state_has_one_control_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    first = PermitState(path)
    with pytest.raises(ConfigError, match="locked"):
        PermitState(path, lock_s=0.0)
    first.close()
    PermitState(path, lock_s=0.0).close()


def test_what_a_full_disk_did_not_take_is_answered_by_nobody_until_it_did(
    tmp_path: Path, monkeypatch
) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    desk = _desk(clock, path)
    desk.place(terms("a"))
    keep, full = PermitState.keep, Exhausted("disk full")

    def refuse(*_: object) -> None:
        raise full

    monkeypatch.setattr(PermitState, "keep", refuse)
    for _ in range(2):
        with pytest.raises(Exhausted):
            _enter(desk, "a")
        desk.tick()
    monkeypatch.setattr(PermitState, "keep", keep)
    assert isinstance(_enter(desk, "a"), Granted)
    desk.close()
    assert isinstance(_desk(clock, path).beat(Beat(job=JobId("a"), epoch=Epoch(1))), Orders)


def test_there_is_a_most_of_jobs(monkeypatch) -> None:
    monkeypatch.setattr(desk_module, "JOBS_MAX", 1)
    desk = _desk(VirtualClock())
    desk.place(terms("a"))
    refused = desk.place(terms("b"))
    assert isinstance(refused, CallRefused)
    assert refused.retry_after_s is not None


def test_its_journal_replays_also_after_a_restart(tmp_path: Path) -> None:
    clock, state, journal = VirtualClock(), tmp_path / "state.sqlite", tmp_path / "journal"
    for _ in range(2):
        desk = _desk(clock, state, journal=journal)
        for job in ("a", "b"):
            desk.place(terms(job))
            _enter(desk, job)
        _pass_time(desk, clock, 12.0)
        for job in ("a", "b"):
            _enter(desk, job)
        desk.close()
    replayed = replay_journal(journal / "scheduler.policy.phases.jsonl")
    assert replayed.difference is None
    assert replayed.effects > 10


def test_a_leave_after_the_permit_was_lost_says_so(tmp_path: Path) -> None:
    clock = VirtualClock()
    desk = _desk(clock)
    desk.place(terms("a"))
    _enter(desk, "a")
    _pass_time(desk, clock, 11.0)
    assert isinstance(desk.leave(Leave(job=JobId("a"), epoch=Epoch(1))), Ended)
