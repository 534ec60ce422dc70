"""The phase service: restarts, pauses of its own, and a journal that replays."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import Epoch, JobId
from scheduler.model import PhaseKind
from scheduler.rollmux.control import control_state
from scheduler.rollmux.control import phase_service as service_module
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.control_state import ControlState
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.wire import (
    Accepted,
    CallRefused,
    Ended,
    Granted,
    PermitSnapshot,
    Reply,
    Waiting,
    encoded_call,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Forget,
    Leave,
    Register,
    Unloaded,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.terms import PermitsConfig
from scheduler.sim.replay import replay_journal
from tests.unit.scheduler.rollmux.permits.permit_scenario import (
    CONFIG,
    ROLLOUT,
    TRAINING,
    nodes,
    terms,
)
from tests.virtual_clock import VirtualClock


def _enter(service: PhaseService, job: str, kind: PhaseKind = ROLLOUT) -> object:
    return service.enter(Enter(job=JobId(job), kind=kind, holder=f"{job}.1"))


def _service(clock: VirtualClock, path: Path | None = None, **more: Path) -> PhaseService:
    return PhaseService(ControlSettings(permits=CONFIG, state=path, **more), clock)


def _pass_time(service: PhaseService, clock: VirtualClock, seconds: float) -> None:
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        clock.now_s = min(until_s, clock.now_s + 1.0)
        service.tick()


def test_an_entry_is_granted_or_says_how_many_come_before() -> None:
    service = _service(VirtualClock())
    for job in ("a", "b"):
        service.register(Register(terms=terms(job)))
    assert _enter(service, "a") == Granted(epoch=Epoch(1), nodes=nodes("r0"), lease_s=10.0)
    assert _enter(service, "b") == Waiting(ahead=1)
    assert service.leave(Leave(job=JobId("a"), epoch=Epoch(1))) == Accepted()
    assert isinstance(_enter(service, "b"), Granted)


def test_a_call_is_held_for_no_longer_than_a_third_of_the_lease() -> None:
    clock = MonotonicClock()
    service = PhaseService(ControlSettings(permits=PermitsConfig(lease_s=0.3)), clock)
    for job in ("a", "b"):
        service.register(Register(terms=terms(job)))
    _enter(service, "a")
    entry = Enter(job=JobId("b"), kind=ROLLOUT, holder="b.1", wait_s=30.0)

    async def reply() -> bytes:
        async with asyncio.timeout(30):
            return await AsyncPhaseApi(service, clock).call("enter", encoded_call(entry))

    assert msgspec.json.decode(asyncio.run(reply()), type=Reply) == Waiting(ahead=1)


def _leave_loaded(service: PhaseService) -> None:
    """Job a has left its state on r0, and b waits for it."""
    for job in ("a", "b"):
        service.register(Register(terms=terms(job)))
    _enter(service, "a")
    assert service.leave(Leave(job=JobId("a"), epoch=Epoch(1), stays_loaded=True)) == Accepted()
    assert isinstance(_enter(service, "b"), Waiting)


def test_a_state_that_is_not_released_yet_is_waited_for_while_its_process_lives() -> None:
    clock = VirtualClock()
    service = _service(clock)
    _leave_loaded(service)
    for _ in range(40):
        reply = service.call(Unloaded(job=JobId("a"), holder="a.1"))
        assert reply == Accepted(unload=nodes("r0"))
        assert isinstance(_enter(service, "b"), Waiting)
        _pass_time(service, clock, 3.0)
    service.call(Unloaded(job=JobId("a"), holder="a.1", nodes=nodes("r0")))
    assert isinstance(_enter(service, "b"), Granted)


def test_the_loaded_state_of_a_silent_process_keeps_no_node() -> None:
    clock = VirtualClock()
    service = _service(clock)
    _leave_loaded(service)
    for _ in range(3):
        _pass_time(service, clock, 3.0)
        service.call(Unloaded(job=JobId("a"), holder="another process", nodes=nodes("r0")))
        assert isinstance(_enter(service, "b"), Waiting)
    _pass_time(service, clock, 3.0)
    assert isinstance(_enter(service, "b"), Granted)


def test_calls_of_a_new_process_do_not_keep_the_states_of_a_dead_one() -> None:
    clock = VirtualClock()
    service = _service(clock)
    service.register(Register(terms=terms("a")))
    service.register(Register(terms=terms("b", rollout="r1")))
    _enter(service, "a", TRAINING)
    service.leave(Leave(job=JobId("a"), epoch=Epoch(1), stays_loaded=True))
    again = Enter(job=JobId("a"), kind=ROLLOUT, holder="a.2")
    for _ in range(3):
        assert isinstance(service.enter(again), Waiting)
        assert isinstance(_enter(service, "b", TRAINING), Waiting)
        _pass_time(service, clock, 3.0)
    _pass_time(service, clock, 2.0)
    assert isinstance(service.enter(again), Granted)
    assert isinstance(_enter(service, "b", TRAINING), Granted)


def test_a_process_that_counts_as_gone_hears_so_once_it_calls_again() -> None:
    clock = VirtualClock()
    service = _service(clock)
    _leave_loaded(service)
    assert isinstance(_enter(service, "a", TRAINING), Granted)
    service.leave(Leave(job=JobId("a"), epoch=Epoch(2), stays_loaded=True))
    for _ in range(4):
        _pass_time(service, clock, 3.0)
        _enter(service, "b")
    assert isinstance(service.call(Unloaded(job=JobId("a"), holder="a.1")), Ended)
    service.register(Register(terms=terms("c", rollout="r1")))
    assert isinstance(_enter(service, "c", TRAINING), Granted)


def test_a_process_that_another_of_its_job_follows_has_to_unload_all_before_that_begins() -> None:
    service = _service(VirtualClock())
    service.register(Register(terms=terms("a")))
    for epoch, kind in enumerate((ROLLOUT, TRAINING), 1):
        service.enter(Enter(job=JobId("a"), kind=kind, holder="a.1"))
        service.leave(Leave(job=JobId("a"), epoch=Epoch(epoch), stays_loaded=True))
    again = Enter(job=JobId("a"), kind=ROLLOUT, holder="a.2")
    assert isinstance(service.enter(again), Waiting)
    asked = service.call(Unloaded(job=JobId("a"), holder="a.1"))
    assert asked == Accepted(unload=nodes("r0 t0"))
    for node, reply in (("r0", Waiting), ("t0", Granted)):
        service.call(Unloaded(job=JobId("a"), holder="a.1", nodes=nodes(node)))
        assert isinstance(service.enter(again), reply)
    assert service.call(Unloaded(job=JobId("a"), holder="a.2")) == Accepted()


def test_a_process_that_holds_a_permit_does_not_count_as_gone() -> None:
    service = _service(VirtualClock())
    service.register(Register(terms=terms("a")))
    _enter(service, "a")
    assert service.call(Unloaded(job=JobId("a"), holder="a.1")) == Accepted()


def test_a_state_left_loaded_outlives_a_restart_of_the_control(tmp_path: Path) -> None:
    clock = VirtualClock()
    service = _service(clock, tmp_path / "state.sqlite")
    _leave_loaded(service)
    service.close()
    service = _service(clock, tmp_path / "state.sqlite")
    assert isinstance(_enter(service, "b"), Waiting)
    service.call(Unloaded(job=JobId("a"), holder="a.1", nodes=nodes("r0")))
    assert isinstance(_enter(service, "b"), Granted)


def test_a_state_unloaded_before_a_restart_hides_none_that_came_after_it(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    service = _service(clock, path)
    for job in ("z", "b", "c"):
        service.register(Register(terms=terms(job)))
    _enter(service, "z")
    service.leave(Leave(job=JobId("z"), epoch=Epoch(1), stays_loaded=True))
    _enter(service, "b")
    unloaded = Unloaded(job=JobId("z"), holder="z.1", nodes=nodes("r0"))
    service.call(unloaded)
    service.leave(Leave(job=JobId("b"), epoch=Epoch(2), stays_loaded=True))
    service.close()
    service = _service(clock, path)
    service.call(unloaded)
    assert isinstance(_enter(service, "c"), Waiting)
    reply = service.call(Unloaded(job=JobId("b"), holder="b.1"))
    assert reply == Accepted(unload=nodes("r0"))
    service.call(Unloaded(job=JobId("b"), holder="b.1", nodes=nodes("r0")))
    assert isinstance(_enter(service, "c"), Granted)


def test_a_restart_knows_no_state_that_was_unloaded_under_the_job_s_later_phase(
    tmp_path: Path,
) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    service = _service(clock, path)
    for job in ("a", "b"):
        service.register(Register(terms=terms(job, rollout="r0" if job == "a" else "r1")))
    _enter(service, "b", TRAINING)
    service.leave(Leave(job=JobId("b"), epoch=Epoch(1), stays_loaded=True))
    _enter(service, "a", TRAINING)
    _enter(service, "b", ROLLOUT)
    service.call(Unloaded(job=JobId("b"), holder="b.1", nodes=nodes("t0")))
    granted = _enter(service, "a", TRAINING)
    assert isinstance(granted, Granted)
    service.leave(Leave(job=JobId("a"), epoch=granted.epoch, stays_loaded=True))
    service.close()
    service = _service(clock, path)
    held = service.policy.permit(JobId("b"))
    assert held is not None
    service.leave(Leave(job=JobId("b"), epoch=held.epoch))
    assert isinstance(_enter(service, "b", TRAINING), Waiting), "a's state is there"


def test_repeating_a_call_changes_nothing() -> None:
    service = _service(VirtualClock())
    service.register(Register(terms=terms("a")))
    assert _enter(service, "a") == _enter(service, "a")
    service.register(Register(terms=terms("a")))
    leave = Leave(job=JobId("a"), epoch=Epoch(1))
    assert service.leave(leave) == Accepted()
    assert service.leave(leave) == Accepted()
    assert isinstance(_enter(service, "a", TRAINING), Granted)


def test_orders_hold_all_that_the_holder_must_know() -> None:
    service = _service(VirtualClock())
    service.register(Register(terms=terms("a", rollout="r0 r1", tail_ratio=0.5)))
    service.register(Register(terms=terms("b", rollout="r1")))
    _enter(service, "a")
    _enter(service, "b")
    beat = Beat(job=JobId("a"), epoch=Epoch(1), complete_ratio=0.5)
    asked = service.beat(beat)
    assert isinstance(asked, PermitSnapshot)
    assert (asked.stage, asked.keep) == (PermitStage.NARROWING, nodes("r0"))
    done = service.beat(Beat(job=JobId("a"), epoch=Epoch(1), complete_ratio=0.6, narrowed=True))
    assert isinstance(done, PermitSnapshot)
    assert done.nodes == nodes("r0")
    assert isinstance(_enter(service, "b"), Granted)


def test_a_restarted_desk_knows_its_holders_and_gives_no_epoch_again(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    first = _service(clock, path)
    for job in ("a", "b"):
        first.register(Register(terms=terms(job)))
        _enter(first, job)
    first.close()
    clock.advance_to(100.0)
    second = _service(clock, path)
    assert isinstance(second.beat(Beat(job=JobId("a"), epoch=Epoch(1))), PermitSnapshot)
    assert _enter(second, "b") == Waiting(ahead=1)
    second.leave(Leave(job=JobId("a"), epoch=Epoch(1)))
    granted = _enter(second, "b")
    assert isinstance(granted, Granted)
    assert granted.epoch == 2


def test_a_holder_that_does_not_come_back_after_a_restart_loses_its_permit(
    tmp_path: Path,
) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    first = _service(clock, path)
    first.register(Register(terms=terms("a")))
    _enter(first, "a")
    first.close()
    second = _service(clock, path)
    _pass_time(second, clock, 11.0)
    assert isinstance(second.beat(Beat(job=JobId("a"), epoch=Epoch(1))), Ended)


def test_a_restart_under_another_clock_ends_no_phase_for_the_time_between(
    tmp_path: Path, monkeypatch
) -> None:
    clock, path = VirtualClock(100.0), tmp_path / "state.sqlite"
    first = _service(clock, path)
    for job in ("a", "b"):
        first.register(Register(terms=terms(job, max_s=900.0)))
        _enter(first, job)
    first.close()
    monkeypatch.setattr(control_state, "monotonic_origin", lambda: "another machine")
    clock.advance_to(3e6)
    second = _service(clock, path)
    for _ in range(80):
        _pass_time(second, clock, 1.0)
        permit = second.beat(Beat(job=JobId("a"), epoch=Epoch(1)))
        _enter(second, "b")
    assert isinstance(permit, PermitSnapshot)
    assert not permit.warned


def test_a_desk_that_was_stopped_itself_takes_no_permit_for_it() -> None:
    clock = VirtualClock()
    service = _service(clock)
    service.register(Register(terms=terms("a")))
    _enter(service, "a")
    service.tick()
    clock.advance_to(60.0)
    service.tick()
    assert isinstance(service.beat(Beat(job=JobId("a"), epoch=Epoch(1))), PermitSnapshot)
    _pass_time(service, clock, 11.0)
    assert isinstance(service.beat(Beat(job=JobId("a"), epoch=Epoch(1))), Ended)


def test_a_job_that_is_forgotten_must_be_placed_again(tmp_path: Path) -> None:
    service = _service(VirtualClock(), tmp_path / "state.sqlite")
    service.register(Register(terms=terms("a")))
    service.call(Forget(job=JobId("a")))
    refused = _enter(service, "a")
    assert isinstance(refused, CallRefused)
    assert refused.unknown
    service.close()
    assert _service(VirtualClock(), tmp_path / "state.sqlite").policy.jobs == ()


def test_a_state_has_one_control_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    first = ControlState(path)
    with pytest.raises(ConfigError, match="locked"):
        ControlState(path, lock_s=0.0)
    first.close()
    ControlState(path, lock_s=0.0).close()


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No decision can be kept from now on; returns what keeps them again."""
    keep, full = ControlState.keep, Exhausted("disk full")

    def refuse(*_: object) -> None:
        raise full

    monkeypatch.setattr(ControlState, "keep", refuse)
    return keep


def test_a_decision_refused_by_a_full_disk_gets_no_reply_until_it_is_written(
    tmp_path: Path, monkeypatch
) -> None:
    clock, path = VirtualClock(), tmp_path / "state.sqlite"
    service = _service(clock, path)
    service.register(Register(terms=terms("a")))
    keep = _fill_disk(monkeypatch)
    for _ in range(2):
        with pytest.raises(Exhausted):
            _enter(service, "a")
        service.tick()
    monkeypatch.setattr(ControlState, "keep", keep)
    assert isinstance(_enter(service, "a"), Granted)
    service.close()
    assert isinstance(
        _service(clock, path).beat(Beat(job=JobId("a"), epoch=Epoch(1))), PermitSnapshot
    )


def test_a_full_disk_ends_no_phase_of_a_job_whose_own_decisions_are_written(
    tmp_path: Path, monkeypatch
) -> None:
    clock = VirtualClock()
    service = _service(clock, tmp_path / "state.sqlite")
    service.register(Register(terms=terms("a", rollout="r0 r1", tail_ratio=0.5)))
    service.register(Register(terms=terms("b", rollout="r1")))
    service.register(Register(terms=terms("c", rollout="r2")))
    a, c = JobId("a"), JobId("c")
    _enter(service, "c", TRAINING)
    service.leave(Leave(job=c, epoch=Epoch(1), stays_loaded=True))
    granted = _enter(service, "a")
    keep = _fill_disk(monkeypatch)
    for _ in range(4):
        with pytest.raises(Exhausted):
            _enter(service, "b")
        with pytest.raises(Exhausted):
            service.entry_reply(Enter(job=JobId("b"), kind=ROLLOUT, holder="b.1"))
        _pass_time(service, clock, 5.0)
        assert isinstance(service.beat(Beat(job=a, epoch=Epoch(2))), PermitSnapshot)
        assert service.entry_reply(Enter(job=a, kind=ROLLOUT, holder="a.1")) == granted
    assert isinstance(service.beat(Beat(job=a, epoch=Epoch(1))), Ended)
    assert service.unloaded(Unloaded(job=c, holder="c.1", nodes=nodes("t9"))) == Accepted()
    for _ in range(2):
        with pytest.raises(Exhausted):
            service.beat(Beat(job=a, epoch=Epoch(2), complete_ratio=0.6))
    monkeypatch.setattr(ControlState, "keep", keep)
    service.tick()
    asked = service.beat(Beat(job=a, epoch=Epoch(2), complete_ratio=0.6))
    assert isinstance(asked, PermitSnapshot)
    assert asked.stage is PermitStage.NARROWING


def test_a_full_disk_does_not_end_a_control_that_stood_still(tmp_path: Path, monkeypatch) -> None:
    clock = VirtualClock()
    service = _service(clock, tmp_path / "state.sqlite")
    service.register(Register(terms=terms("a")))
    keep = _fill_disk(monkeypatch)
    with pytest.raises(Exhausted):
        _enter(service, "a")
    clock.advance_to(6.0)
    service.tick()
    monkeypatch.setattr(ControlState, "keep", keep)
    assert isinstance(_enter(service, "a"), Granted)


def test_there_is_a_most_of_jobs(monkeypatch) -> None:
    monkeypatch.setattr(service_module, "JOBS_MAX", 1)
    service = _service(VirtualClock())
    service.register(Register(terms=terms("a")))
    refused = service.register(Register(terms=terms("b")))
    assert isinstance(refused, CallRefused)
    assert refused.retry_after_s is not None


def test_its_journal_replays_also_after_a_restart(tmp_path: Path) -> None:
    clock, state, journal = VirtualClock(), tmp_path / "state.sqlite", tmp_path / "journal"
    for _ in range(2):
        service = _service(clock, state, journal=journal)
        for job in ("a", "b"):
            service.register(Register(terms=terms(job)))
            _enter(service, job)
        _pass_time(service, clock, 12.0)
        for job in ("a", "b"):
            _enter(service, job)
        service.close()
    replayed = replay_journal(journal / "scheduler.policy.phases.jsonl")
    assert replayed.difference is None
    assert replayed.effects > 10


def test_a_journal_that_was_removed_is_begun_anew_while_nothing_is_decided(tmp_path: Path) -> None:
    clock, journal = VirtualClock(), tmp_path / "journal" / "scheduler.policy.phases.jsonl"
    service = _service(clock, journal=journal.parent)
    for job in ("a", "b"):
        service.register(Register(terms=terms(job)))
    assert isinstance(_enter(service, "a"), Granted)
    journal.unlink()
    _pass_time(service, clock, 1.0)
    assert isinstance(_enter(service, "b"), Waiting)
    service.close()
    assert replay_journal(journal).difference is None


def test_a_leave_after_the_permit_was_lost_says_so(tmp_path: Path) -> None:
    clock = VirtualClock()
    service = _service(clock)
    service.register(Register(terms=terms("a")))
    _enter(service, "a")
    _pass_time(service, clock, 11.0)
    assert isinstance(service.leave(Leave(job=JobId("a"), epoch=Epoch(1))), Ended)


def test_terms_of_a_known_job_that_change_are_logged_by_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = _service(VirtualClock())
    for _ in range(2):
        service.register(Register(terms=terms("a", max_s=5.0)))
    assert not caplog.records
    for _ in range(2):
        service.register(Register(terms=terms("a", rollout="r0 r1", max_s=50.0)))
    changes = "rollout: nodes was r0, is r0 r1; rollout: max_s was 5.0, is 50.0"
    (record,) = caplog.records
    assert record.message == f"job a was registered with other terms: {changes}"
    refused = service.register(Register(terms=terms("a", max_s=-1.0)))
    assert isinstance(refused, CallRefused)
    assert len(caplog.records) == 1


def test_a_job_that_holds_or_waits_keeps_its_permit_or_its_place_when_its_terms_change() -> None:
    service = _service(VirtualClock())
    for job in ("a", "b", "c"):
        service.register(Register(terms=terms(job)))
        _enter(service, job)
    for job in ("a", "b"):
        service.register(Register(terms=terms(job, rollout="r0 r1")))
    assert _enter(service, "a") == Granted(epoch=Epoch(1), nodes=nodes("r0"), lease_s=10.0)
    assert _enter(service, "b") == Waiting(ahead=1)
    service.leave(Leave(job=JobId("a"), epoch=Epoch(1)))
    granted = _enter(service, "b")
    assert isinstance(granted, Granted)
    assert granted.nodes == nodes("r0 r1")
    assert isinstance(_enter(service, "c"), Waiting)
