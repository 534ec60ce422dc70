"""A slot on a full disk, over restarts, and released by an operator: the agent without sockets."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.page_beats import shared_group
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.journal import JournalWriter, Opened, read_journal
from harvester.contracts.page import Grant, Guest, PageDirectory, Pulse
from harvester.contracts.process import ProcessId, process_ids
from harvester.contracts.wire.leases import LeaseGranted, LeaseRefused, LeaseRequest
from harvester.contracts.wire.stops import StopOrder, StopRequest
from harvester.platform import whole_file
from harvester.policy.budget import ErrorBudget
from harvester.policy.states import Condition
from scheduler.sim.replay import replay_journal

SLOT = SlotId("slot0")
KV_TOKENS = 1000


class Stage:
    def __init__(self, root: Path) -> None:
        self.state_dir = root / "state"
        self.config = AgentConfig.model_validate(
            {
                "mode": "harvest",
                "page_root": root / "pages",
                "state_dir": self.state_dir,
                "slots": [
                    {
                        "name": SLOT,
                        "memory_group": shared_group(root / "group"),
                        "policy": {
                            "proof": {"share_ratio": 0.0},
                            "cooldown_s": 0.0,
                            "kv_deadline_s": 0.01,
                        },
                    }
                ],
            }
        )
        self.pages = PageDirectory.create(root / "pages" / SLOT)
        self.journal = self.state_dir / f"{SLOT}.journal"
        self.start()

    def start(self) -> None:
        self.node = NodeAgent(self.config, clock=MonotonicClock(), version="1")

    def production(self, **fields: Any) -> None:
        pulse = Pulse(model_samples=1000, **fields)
        self.pages.pulse_writer("prod", 0).write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)

    def guest(self, **fields: Any) -> None:
        record = Guest(kv_tokens_total=KV_TOKENS, **fields)
        self.pages.guest_writer().write(record, now_ns=monotonic_ns(), ttl_ns=10**11)

    def take(self, request_id: str = "r1") -> LeaseGranted | LeaseRefused:
        request = LeaseRequest(
            request_id=request_id,
            slot=SLOT,
            tenant=TenantId("t"),
            job=JobId("j"),
            duration_s=10.0,
        )
        return self.node.take(request)

    def grant(self) -> Grant:
        record = self.pages.grant_reader().read().record
        assert record is not None
        return record

    def beats(self, count: int = 1) -> None:
        for _ in range(count):
            self.node.beat()

    def harvest(self, *, processes: tuple[ProcessId, ...] = ()) -> None:
        self.production()
        self.guest(processes=processes)
        self.beats(3)
        assert isinstance(self.take(), LeaseGranted)
        self.beats(2)
        assert self.grant().mode == "open"

    def quarantine(self, reason: str) -> None:
        self.node.slots[0].policy.quarantine(reason)
        self.beats()

    @property
    def condition(self) -> Condition:
        return self.node.slots[0].policy.condition

    @property
    def reason(self) -> str:
        return self.node.slots[0].policy.reason

    def metric(self, name: str, **labels: str) -> float | None:
        self.node.refresh_metrics()
        return self.node.metrics.registry.get_sample_value(name, {"slot": SLOT, **labels})

    def actions(self, action: str) -> tuple[float | None, ...]:
        return tuple(
            self.metric("harvester_guest_actions_total", action=action, outcome=outcome)
            for outcome in ("requested", "done", "failed")
        )


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.node.close()


class Disk:
    """Full where a test fills it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def fill(self) -> None:
        self._patch.setattr(JournalWriter, "_append", _full)
        self._patch.setattr(whole_file, "replace", _full)

    def clear(self) -> None:
        self._patch.undo()


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def beats_until(stage: Stage, holds: Any) -> None:
    until_s = stage.node.clock.now() + 20.0
    while not holds():
        assert stage.node.clock.now() < until_s, "it never came"
        stage.beats()


def test_a_full_disk_closes_the_grant_ends_the_lease_and_withdraws_the_slot(
    stage: Stage, disk: Disk
) -> None:
    stage.harvest()
    disk.fill()
    stage.beats()
    refused = stage.take("r2")
    assert stage.grant().mode == "closed"
    assert isinstance(refused, LeaseRefused)
    stage.beats()
    refused = stage.take("r3")
    assert isinstance(refused, LeaseRefused)
    assert "journal: No space left on device" in refused.reason
    assert stage.node.leases.live(SLOT) is None
    assert stage.condition is Condition.UNRECORDED
    assert stage.metric("harvester_unrecorded") == 1.0
    assert stage.metric("harvester_journal_missing_lines_total") == 2.0


def test_a_guest_that_owes_memory_is_ended_with_the_disk_full(
    stage: Stage, disk: Disk, child: "subprocess.Popen[bytes]"
) -> None:
    named = process_ids([child.pid])
    stage.harvest(processes=named)
    disk.fill()
    stage.production(kv_usage_ratio=0.97)
    beats_until(stage, lambda: child.poll() is not None)
    beats_until(stage, lambda: stage.actions("kill")[1])
    requested, done, failed = stage.actions("kill")
    assert requested
    assert (done, failed) == (1.0, 0.0)


def test_the_journal_goes_on_when_there_is_room_and_says_what_it_lacks(
    stage: Stage, disk: Disk
) -> None:
    stage.harvest()
    disk.fill()
    stage.beats(7)
    disk.clear()
    beats_until(stage, lambda: stage.metric("harvester_unrecorded") == 0.0)
    stage.beats(3)
    assert isinstance(stage.take("again"), LeaseGranted)
    stage.beats(2)
    assert stage.grant().mode == "open"
    opened = [line for line in read_journal(stage.journal) if isinstance(line, Opened)]
    missing = stage.metric("harvester_journal_missing_lines_total")
    assert sum(line.missing for line in opened) == missing
    assert missing is not None
    assert missing >= 7
    replayed = replay_journal(stage.journal)
    assert replayed.difference is None


def test_a_full_disk_is_logged_once_and_its_end_once(
    stage: Stage, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    stage.harvest()
    caplog.set_level(logging.WARNING, logger="harvester.agent.record")
    disk.fill()
    stage.beats(20)
    assert len(said_by_record(caplog)) == 1
    assert "withdrawn: journal: No space left" in caplog.text
    disk.clear()
    beats_until(stage, lambda: stage.metric("harvester_unrecorded") == 0.0)
    stage.beats(20)
    assert len(said_by_record(caplog)) == 2


def said_by_record(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name == "harvester.agent.record"]


def test_an_agent_starts_reloads_and_stops_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    disk.fill()
    stage = Stage(tmp_path)
    stage.production()
    stage.guest()
    stage.beats(5)
    stage.node.reconfigure(stage.config)
    stage.beats()
    assert stage.condition is Condition.UNRECORDED
    assert stage.grant().mode == "closed"
    assert isinstance(stage.take(), LeaseRefused)
    stage.node.close()


def test_two_runs_of_one_number_are_not_both_reported(stage: Stage, disk: Disk) -> None:
    """A scheduler takes the second's counts for late ones, until they exceed the first's."""
    stage.node.close()
    disk.fill()
    stage.start()
    stage.beats()
    unsaved = stage.node.slots[0].offer().budget
    stage.node.close()
    stage.start()
    stage.beats()
    disk.clear()
    beats_until(stage, lambda: stage.condition is not Condition.UNRECORDED)
    saved = stage.node.slots[0].offer().budget
    assert saved is not None
    assert unsaved is None or (unsaved.life, unsaved.run) != (saved.life, saved.run)


def test_a_state_that_cannot_be_saved_withdraws_the_slot_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.harvest()
    monkeypatch.setattr(whole_file, "replace", _full)
    stage.node.slots[0].policy.guest.state.losses_s = [stage.node.clock.now()]
    stage.beats(2)
    assert (stage.condition, stage.reason) == (
        Condition.UNRECORDED,
        "state: No space left on device",
    )
    monkeypatch.undo()
    beats_until(stage, lambda: stage.condition is not Condition.UNRECORDED)


def test_a_quarantine_outlives_a_restart_and_a_kill(stage: Stage) -> None:
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    saved = (stage.state_dir / f"{SLOT}.state").read_bytes()
    stage.node.close()
    stage.start()
    stage.beats(3)
    assert (stage.condition, stage.reason) == (Condition.QUARANTINED, "guest lost 3 times")
    stage.node.close()
    # As a kill in the beat of the quarantine would have left it.
    (stage.state_dir / f"{SLOT}.state").write_bytes(saved)
    stage.start()
    stage.beats(3)
    assert stage.condition is Condition.QUARANTINED


def test_a_budget_that_stopped_harvesting_goes_on_stopping_it_after_a_restart(
    stage: Stage,
) -> None:
    stage.harvest()
    budget: ErrorBudget = stage.node.slots[0].policy.guards.budget
    budget.lose_history(now=stage.node.clock.now())
    stage.beats()
    assert stage.condition is Condition.OVERSPENT
    stage.node.close()
    stage.start()
    stage.beats(3)
    assert stage.condition is Condition.OVERSPENT


def test_the_journal_of_an_agent_that_resumed_replays(stage: Stage) -> None:
    stage.harvest()
    stage.node.close()
    stage.start()
    stage.beats(5)
    replayed = replay_journal(stage.journal)
    assert replayed.difference is None
    assert replayed.decisions == 11


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}\n{}\n", bytes(range(64))),
        b'{"type":"slot_state","node":"\xff","slot":"s","origin":"","at_s":1,"digest":""}\n{}\n',
        b'{"x":' + b"[" * 100_000,
    ],
    ids=["empty", "no head", "no text", "no UTF-8", "nested without end"],
)
def test_a_state_that_cannot_be_believed_waits_for_an_operator(stage: Stage, text: bytes) -> None:
    stage.harvest()
    stage.node.close()
    (stage.state_dir / f"{SLOT}.state").write_bytes(text)
    stage.start()
    stage.beats(3)
    assert stage.condition is Condition.QUARANTINED
    assert stage.reason.startswith("history not known")
    assert (stage.state_dir / f"{SLOT}.state.refused").read_bytes() == text
    stage.node.close()
    stage.start()
    stage.beats(3)
    assert stage.condition is Condition.QUARANTINED, "another restart is no way out"


def test_a_state_file_that_was_removed_ends_no_quarantine(stage: Stage) -> None:
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    stage.node.close()
    (stage.state_dir / f"{SLOT}.state").unlink()
    stage.start()
    stage.beats(3)
    assert stage.condition is Condition.QUARANTINED
    assert stage.reason == "history not known: there is a journal but no state file"
    (stage.state_dir / f"{SLOT}.release").write_text("the state was removed by mistake")
    stage.beats(3)
    assert stage.condition is Condition.OVERSPENT
    assert "history not known" in stage.reason


def test_a_new_slot_is_not_stopped_for_a_history_that_it_cannot_have(stage: Stage) -> None:
    stage.harvest()
    assert stage.metric("harvester_guard_binds", guard="error_budget") == 0.0


def test_an_operator_s_release_is_obeyed_once_and_is_in_the_journal(stage: Stage) -> None:
    release = stage.state_dir / f"{SLOT}.release"
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    release.write_text("driver replaced\n")
    stage.beats(3)
    assert stage.condition is not Condition.QUARANTINED
    assert not release.exists()
    said = msgspec.json.encode(list(read_journal(stage.journal))).decode()
    assert said.count('"release":"driver replaced"') == 1
    stage.quarantine("again")
    stage.beats(3)
    assert stage.condition is Condition.QUARANTINED
    assert replay_journal(stage.journal).decisions > 0


def test_a_release_waits_for_its_journal_line(stage: Stage, disk: Disk) -> None:
    release = stage.state_dir / f"{SLOT}.release"
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    disk.fill()
    stage.beats(2)
    release.write_text("driver replaced")
    stage.beats(3)
    assert stage.condition is Condition.QUARANTINED
    disk.clear()
    beats_until(stage, lambda: not release.exists())
    stage.beats()
    assert stage.condition is not Condition.QUARANTINED


def test_a_release_that_is_a_link_or_another_user_s_is_none(stage: Stage, tmp_path: Path) -> None:
    release = stage.state_dir / f"{SLOT}.release"
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    (tmp_path / "elsewhere").write_text("please")
    release.symlink_to(tmp_path / "elsewhere")
    stage.beats(2)
    assert stage.condition is Condition.QUARANTINED
    release.unlink()
    if os.geteuid() == 0:
        release.write_text("please")
        os.chown(release, 65534, 65534)
        stage.beats(2)
        assert stage.condition is Condition.QUARANTINED


def test_a_guest_that_cannot_be_ended_is_counted_as_that_and_quarantined(stage: Stage) -> None:
    stage.harvest(processes=(ProcessId(pid=4_000_000, start_ticks=7),))
    stage.production(kv_usage_ratio=0.97)
    beats_until(stage, lambda: stage.condition is Condition.QUARANTINED)
    assert "could not be ended: process 4000000: not seen here" in stage.reason
    requested, done, failed = stage.actions("kill")
    assert requested
    assert failed
    assert done == 0.0
    assert stage.metric("harvester_leases_ended_total", reason="guest_lost") == 0.0


def test_mode_and_state_are_two_series_of_which_one_holds_each(stage: Stage) -> None:
    stage.harvest()
    stage.node.refresh_metrics()
    sets: dict[str, dict[str, float]] = {}
    for family in stage.node.metrics.registry.collect():
        if family.name in {"harvester_mode", "harvester_slot_state"}:
            label = "mode" if family.name == "harvester_mode" else "state"
            sets[label] = {one.labels[label]: one.value for one in family.samples}
    assert sets == {
        "mode": {"off": 0.0, "observe": 0.0, "harvest": 1.0},
        "state": {"off": 0.0, "learning": 0.0, "closed": 0.0, "cooldown": 0.0, "open": 1.0},
    }


def test_a_guest_that_was_stopped_on_purpose_has_no_age(stage: Stage) -> None:
    stage.harvest()
    assert stage.metric("harvester_signal_age_seconds", source="guest") is not None
    stage.guest(leaving=True)
    stage.beats()
    age_s = stage.metric("harvester_signal_age_seconds", source="guest")
    assert age_s != age_s


def test_an_agent_that_is_killed_before_its_first_beat_has_lost_no_history(
    stage: Stage, tmp_path: Path
) -> None:
    left = shutil.copytree(stage.state_dir, tmp_path / "left")
    stage.node.close()
    shutil.rmtree(stage.state_dir)
    shutil.copytree(left, stage.state_dir)
    stage.start()
    stage.harvest()
    assert stage.condition is Condition.CLEAR


def moved_away(stage: Stage) -> None:
    stage.journal.rename(stage.journal.with_name("elsewhere"))


def emptied(stage: Stage) -> None:
    for path in stage.state_dir.iterdir():
        path.unlink()


def removed(stage: Stage) -> None:
    shutil.rmtree(stage.state_dir)


def cut(stage: Stage) -> None:
    os.truncate(stage.journal, 0)
    stage.beats()


@pytest.mark.parametrize("take_away", [moved_away, emptied, removed, cut])
def test_a_journal_that_another_program_took_away_withdraws_the_slot_until_a_new_one_replays(
    stage: Stage, caplog: pytest.LogCaptureFixture, take_away: Any
) -> None:
    stage.harvest()
    take_away(stage)
    beats_until(stage, lambda: stage.condition is Condition.UNRECORDED)
    assert stage.reason == "journal: moved, removed or cut by another program"
    assert stage.grant().mode == "closed"
    stage.beats()
    assert stage.node.leases.live(SLOT) is None
    assert stage.metric("harvester_unrecorded") == 1.0
    assert "withdrawn: journal: moved" in caplog.text
    beats_until(stage, lambda: stage.metric("harvester_unrecorded") == 0.0)
    stage.beats(3)
    assert isinstance(stage.take("again"), LeaseGranted)
    stage.beats(2)
    assert stage.grant().mode == "open"
    assert replay_journal(stage.journal).difference is None
    first = next(iter(read_journal(stage.journal)))
    assert isinstance(first, Opened)
    assert first.snapshot is not None
    assert first.missing == stage.metric("harvester_journal_missing_lines_total")
    # A restart would else take the history for unknown.
    assert (stage.state_dir / f"{SLOT}.state").exists()


def test_a_stop_whose_table_was_removed_is_written_again(stage: Stage) -> None:
    stage.node.order(StopRequest(order=StopOrder.DRAIN, by="alice", reason="incident"))
    removed(stage)
    beats_until(stage, (stage.state_dir / "stops.json").exists)
    stage.node.close()
    stage.start()
    stage.beats()
    assert stage.node.stops.stops[0].reason == "incident"


def test_a_wrong_node_opens_no_slot_and_costs_no_history(stage: Stage) -> None:
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    stage.node.close()
    files = {path.name: path.read_bytes() for path in stage.state_dir.iterdir()}
    renamed = stage.config.model_copy(update={"node": "copied-from-the-example"})
    with pytest.raises(ConfigError, match=r"belongs to node .*, this is node copied-from"):
        NodeAgent(renamed, clock=MonotonicClock(), version="1")
    assert {path.name: path.read_bytes() for path in stage.state_dir.iterdir()} == files
    stage.start()
    stage.beats(3)
    assert (stage.condition, stage.reason) == (Condition.QUARANTINED, "guest lost 3 times")


def test_a_quarantine_outlives_a_new_name_of_its_slot_with_the_state_that_was_moved(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    stage.node.close()
    state, (slot,) = stage.state_dir / f"{SLOT}.state", stage.config.slots
    slots = (slot.model_copy(update={"name": "chat0"}),)
    renamed = stage.config.model_copy(update={"slots": slots})
    node = NodeAgent(renamed, clock=MonotonicClock(), version="1")
    assert f"not configured: {SLOT}. If one of them was renamed" in caplog.text
    node.close()
    state.replace(stage.state_dir / "chat0.state")
    node = NodeAgent(renamed, clock=MonotonicClock(), version="1")
    node.beat()
    assert node.slots[0].policy.quarantined == "guest lost 3 times"
    node.close()


def test_swapped_states_open_no_slot_and_cost_no_history(stage: Stage) -> None:
    stage.harvest()
    stage.quarantine("guest lost 3 times")
    stage.node.close()
    (slot,) = stage.config.slots
    other = slot.model_copy(update={"name": "slot1", "engine_url": "http://127.0.0.1:9"})
    both = stage.config.model_copy(update={"slots": (slot, other)})
    states = [stage.state_dir / f"{each.name}.state" for each in both.slots]
    NodeAgent(both, clock=MonotonicClock(), version="1").close()
    kept = [path.read_bytes() for path in states]
    for path, text in zip(states, reversed(kept), strict=True):
        path.write_bytes(text)
    with pytest.raises(ConfigError, match="is of slot slot1, which is configured too"):
        NodeAgent(both, clock=MonotonicClock(), version="1")
    assert [path.read_bytes() for path in states] == kept[::-1]


def test_a_state_that_cannot_be_read_opens_no_slot_and_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.harvest()
    stage.node.close()
    state = stage.state_dir / f"{SLOT}.state"
    kept, opens = state.read_bytes(), Path.open

    def denied(path: Path, *given: Any, **named: Any) -> Any:
        if path == state:
            raise PermissionError(13, "Permission denied", str(path))
        return opens(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        with pytest.raises(ConfigError, match=r"slot0[.]state: Permission denied"):
            NodeAgent(stage.config, clock=MonotonicClock(), version="1")
    assert state.read_bytes() == kept
    stage.start()
    stage.beats(3)
    assert stage.condition is not Condition.QUARANTINED
