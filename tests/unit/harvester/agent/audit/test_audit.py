"""Entries of an agent's audit about leases, slots, guests, operators and full disks."""

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harvester.agent import agent_process
from harvester.agent.audit.audit_file import AuditFile
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.config_file import LoadedConfig
from harvester.contracts.audit import AuditEvent, AuditKind, read_audit
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId, TenantId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.process import ProcessId, process_ids
from harvester.contracts.wire.leases import LeaseGranted, LeaseRefused, LeaseRenewal, LeaseRequest
from harvester.policy.settings import Mode
from tests.virtual_clock import VirtualClock

SLOT = SlotId("slot0")
CALLER = "token 1 of tokens, from 192.0.2.7"


class Stage:
    def __init__(self, root: Path) -> None:
        self.switch = root / "pages" / "kill"
        self.release = root / "state" / f"{SLOT}.release"
        policy = {"proof": {"share_ratio": 0.0}, "cooldown_s": 0.0, "guest_away_s": 1.0}
        self.config = AgentConfig.model_validate(
            {
                "node": "n7",
                "mode": "harvest",
                "page_root": root / "pages",
                "state_dir": root / "state",
                "slots": [{"name": SLOT, "policy": policy}],
            }
        )
        self.pages = PageDirectory.create(root / "pages" / SLOT)
        self.clock = VirtualClock(now_s=1000.0)
        self.start()

    def start(self) -> None:
        self.node = NodeAgent(self.config, clock=self.clock, version="1")

    def production(self) -> None:
        pulse = Pulse(model_samples=1000)
        self.pages.pulse_writer("prod", 0).write(pulse, now_ns=monotonic_ns(), ttl_ns=10**12)

    def guest(self, *, ttl_ns: int = 10**12, **fields: Any) -> None:
        self.pages.guest_writer().write(Guest(**fields), now_ns=monotonic_ns(), ttl_ns=ttl_ns)

    def ask(
        self, request_id: str = "r1", *, job: str = "j", who: str = CALLER
    ) -> LeaseGranted | LeaseRefused:
        request = LeaseRequest(
            request_id=request_id,
            slot=SLOT,
            tenant=TenantId("t"),
            job=JobId(job),
            duration_s=10.0,
        )
        return self.node.take(request, who=who)

    def beats(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now_s += 0.1
            self.node.beat()

    def harvest(self) -> LeaseGranted:
        self.production()
        self.guest()
        self.beats(3)
        lease = self.ask()
        assert isinstance(lease, LeaseGranted)
        return lease

    @property
    def events(self) -> list[AuditEvent]:
        found = list(read_audit(self.config.audit_file))
        assert all(isinstance(one, AuditEvent) for one in found)
        return [one for one in found if isinstance(one, AuditEvent)]

    def of(self, kind: str) -> list[AuditEvent]:
        return [event for event in self.events if event.event == kind]

    def last(self, kind: str) -> AuditEvent:
        return self.of(kind)[-1]

    def missing(self) -> float | None:
        self.node.refresh_metrics()
        return self.node.metrics.registry.get_sample_value("harvester_audit_missing_events_total")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.node.close()


def test_a_lease_is_recorded_from_its_grant_to_its_end(stage: Stage) -> None:
    lease = stage.harvest()
    stage.node.release(lease.lease, who=CALLER)
    granted, ended = stage.last("lease_granted"), stage.last("lease_ended")
    for event in (granted, ended):
        assert (event.slot, event.lease) == (SLOT, f"{SLOT}.{lease.epoch}")
        assert (event.epoch, event.tenant, event.job) == (lease.epoch, "t", "j")
        assert (event.who, event.node) == (CALLER, "n7")
    assert ended.reason == "released"
    assert granted.t_s == pytest.approx(1000.3)
    assert granted.time.endswith("+00:00")


def test_a_release_that_comes_too_late_ended_no_lease(stage: Stage) -> None:
    lease = stage.harvest()
    stage.clock.now_s += 60.0
    stage.node.release(lease.lease, who=CALLER)
    ended = stage.last("lease_ended")
    assert (ended.who, ended.reason) == ("agent", "expired")


def test_no_event_has_a_lease_s_secret(stage: Stage) -> None:
    lease = stage.harvest()
    stage.node.renew(lease.lease, LeaseRenewal(epoch=Epoch(99), duration_s=1.0), who=CALLER)
    stage.node.release(lease.lease, who=CALLER)
    stage.node.renew(lease.lease, LeaseRenewal(epoch=lease.epoch, duration_s=1.0), who=CALLER)
    secret = lease.lease.rpartition(".")[2]
    assert len(secret) >= 16
    assert secret not in stage.config.audit_file.read_text()


def test_a_repeated_request_is_one_grant(stage: Stage) -> None:
    stage.harvest()
    stage.ask()
    assert len(stage.of("lease_granted")) == 1


def test_a_refusal_has_its_job_and_reason(stage: Stage) -> None:
    stage.harvest()
    assert isinstance(stage.ask("r2", job="other"), LeaseRefused)
    refused = stage.last("lease_refused")
    assert (refused.job, refused.who, refused.reason) == ("other", CALLER, "leased to job j")


def test_a_noisy_caller_hides_no_other_caller_s_refusals(stage: Stage) -> None:
    stage.harvest()
    for number in range(200):
        stage.ask(f"n{number}", job="noisy", who="from 10.0.0.1")
    stage.ask("r2", job="quiet")
    assert stage.last("lease_refused").who == CALLER
    assert len(stage.of("lease_refused")) == 61
    stage.beats(99)
    assert stage.of("refusals_omitted") == []
    stage.beats(100)
    (omitted,) = stage.of("refusals_omitted")
    assert (omitted.who, omitted.omitted) == ("from 10.0.0.1", 140)


def test_callers_without_end_fill_no_audit(stage: Stage) -> None:
    stage.harvest()
    for number in range(1000):
        stage.ask(f"n{number}", job="j2", who=f"from 10.0.0.{number}")
        stage.ask(f"m{number}", job="j2", who="from 10.1.0.1")
    assert len(stage.of("lease_refused")) == 7 + 60 + 60
    stage.clock.now_s += 600.0
    stage.beats()
    omitted = {event.who: event.omitted for event in stage.of("refusals_omitted")}
    assert omitted == {"other callers": 1000 - 7 - 60, "from 10.1.0.1": 1000 - 60}
    stage.ask("r3", job="j2")
    stage.ask("r4", job="j3")
    assert stage.last("lease_refused").who == CALLER


def test_counts_of_what_was_left_out_are_part_of_a_caller_s_bound(stage: Stage) -> None:
    audit, now = stage.node._lease_audit, 0.0
    request = LeaseRequest(
        request_id="r", slot=SLOT, tenant=TenantId("t"), job=JobId("j"), duration_s=1.0
    )
    answer = LeaseRefused(slot=SLOT, reason="leased to job j", retry_after_s=1.0)
    for _ in range(260):
        for _ in range(2):
            audit.refused(request, answer, who=CALLER, now=now)
        now += 10.05  # Silent for long enough, and back at once.
        audit.check(now=now)
    events = len(stage.of("lease_refused")) + len(stage.of("refusals_omitted"))
    assert 60 < events <= 60 + 0.1 * now


def test_a_refused_renewal_names_the_lease_that_ended_and_no_made_up_one(stage: Stage) -> None:
    lease = stage.harvest()
    stage.clock.now_s += 60.0
    renewal = LeaseRenewal(epoch=lease.epoch, duration_s=5.0)
    stage.node.renew(lease.lease, renewal, who=CALLER)
    refused = stage.last("renewal_refused")
    assert (refused.lease, refused.reason) == (f"{SLOT}.{lease.epoch}", "expired")
    stage.node.renew(LeaseId("made.up.secret"), renewal, who=CALLER)
    refused = stage.last("renewal_refused")
    assert (refused.lease, refused.reason) == ("", "unknown")


def test_the_end_of_a_lease_by_the_agent_has_the_agent_s_reason(stage: Stage) -> None:
    stage.harvest()
    stage.switch.write_text("drain")
    stage.beats()
    ended = stage.last("lease_ended")
    assert (ended.who, ended.reason) == ("agent", "kill_switch: kill switch: drain")


def test_the_kill_switch_is_recorded_with_its_user(stage: Stage) -> None:
    stage.switch.write_text("hold")
    stage.beats()
    stage.switch.unlink()
    stage.beats()
    on, off = stage.of("kill_switch")
    assert (on.from_state, on.to_state, off.to_state) == ("none", "hold", "none")
    assert on.who.endswith("by the kill file")
    assert on.who.startswith("user ")


def test_a_kill_file_with_an_unknown_word_is_recorded_with_it(stage: Stage) -> None:
    stage.switch.write_text("halt")
    stage.beats()
    (drained,) = stage.of("kill_switch")
    assert (drained.to_state, drained.reason) == ("drain", stage.node.kill_file_fault)
    assert drained.reason == f"{stage.switch} has 'halt': known are hold, drain"
    assert drained.who.endswith("by the kill file")
    stage.switch.write_text("drain")
    stage.beats()
    assert stage.node.kill_file_fault == ""


def test_changes_of_state_are_a_chain_with_reasons(stage: Stage) -> None:
    stage.harvest()
    stage.beats()
    stage.switch.write_text("hold")
    stage.beats()
    moves = stage.of("slot_state")
    assert [move.from_state for move in moves[1:]] == [move.to_state for move in moves[:-1]]
    assert [move.to_state for move in moves] == ["closed", "open", "off"]
    assert moves[-1].reason == "killed: kill switch: hold"
    assert moves[-1].job == "j"


def test_the_beat_between_off_and_open_is_recorded_as_what_it_is(stage: Stage) -> None:
    stage.harvest()
    stage.beats()
    stage.switch.write_text("hold")
    stage.beats()
    stage.switch.unlink()
    stage.beats(2)
    between, opened = stage.of("slot_state")[-2:]
    assert (between.from_state, between.to_state) == ("off", "closed")
    assert between.reason == "clear: closed for one beat before it may open"
    assert (opened.to_state, opened.reason) == ("open", "clear")


def test_a_withheld_slice_is_no_change_of_state(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.harvest()
    stage.beats(2)
    before = len(stage.of("slot_state"))
    policy = stage.node.slots[0].policy
    policy.guards.proof.withheld = lambda *, now: True  # type: ignore[method-assign]
    stage.beats(2)
    assert policy.state == "closed"
    del policy.guards.proof.withheld
    stage.beats(2)
    assert policy.state == "open"
    assert len(stage.of("slot_state")) == before
    stage.node.close()


def test_a_slot_that_is_overspent_since_it_was_silent_does_not_seem_silent(stage: Stage) -> None:
    stage.harvest()
    stage.beats()
    writer = stage.pages.pulse_writer("prod", 0)
    writer.write(Pulse(model_samples=1000), now_ns=monotonic_ns(), ttl_ns=0)
    stage.beats(2)
    assert stage.last("slot_state").reason.startswith("silent")
    guards = stage.node.slots[0].policy.guards
    guards.account = lambda *_, **__: True  # type: ignore[method-assign]
    writer.write(Pulse(model_samples=1000), now_ns=monotonic_ns(), ttl_ns=10**12)
    stage.beats(90)
    assert stage.last("slot_state").reason.startswith("silent")
    stage.beats(200)
    moves = stage.of("slot_state")
    assert [(move.from_state, move.to_state) for move in moves[-2:]] == [
        ("open", "cooldown"),
        ("cooldown", "cooldown"),
    ]
    assert moves[-1].reason.startswith("overspent")


def test_a_state_that_flaps_is_bounded_and_its_omissions_are_counted(stage: Stage) -> None:
    stage.production()
    stage.guest()
    stage.beats(2)
    for _ in range(60):
        stage.switch.write_text("hold")
        stage.beats(3)
        stage.switch.unlink()
        stage.beats(3)
    stage.clock.now_s += 60.0
    stage.switch.write_text("hold")
    stage.beats(2)
    moves = stage.of("slot_state")
    assert 60 < len(moves) < 80
    # Two changes a turn; those back to the recorded state need no event.
    assert 20 < sum(move.omitted for move in moves) < 30
    assert [move.from_state for move in moves[1:]] == [move.to_state for move in moves[:-1]]


def test_the_bound_on_events_passes_a_burst_and_then_a_pace() -> None:
    limit = EventLimit()
    passed = sum(limit.admits(now=0.0) for _ in range(200))
    assert (passed, limit.omitted) == (60, 140)
    assert not limit.admits(now=4.0)
    assert limit.admits(now=6.0)
    assert (limit.taken(), limit.omitted) == (141, 0)


def test_a_guest_is_recorded_from_start_to_stop(stage: Stage) -> None:
    own = process_ids((os.getpid(),))
    stage.guest(processes=own)
    stage.beats()
    stage.guest(processes=own, leaving=True)
    stage.beats()
    assert str(os.getpid()) in stage.last("guest_started").reason
    assert stage.last("guest_ended").reason.startswith("stopped on purpose")
    assert len(stage.of("guest_started")) == 1


def test_a_guest_whose_page_expires_has_ended_after_a_while_and_may_come_back(
    stage: Stage,
) -> None:
    gone = (ProcessId(pid=2**22 - 3, start_ticks=1),)
    stage.guest(processes=gone * 2)
    stage.beats()
    assert stage.last("guest_started").reason == f"processes {gone[0].pid}"
    stage.guest(processes=gone * 2, ttl_ns=1)
    stage.beats(2)
    assert stage.of("guest_ended") == []
    stage.clock.now_s += 2.0
    stage.beats()
    assert stage.last("guest_ended").reason.startswith("its page is expired")
    stage.guest(processes=gone * 2)
    stage.beats()
    assert stage.last("guest_started").reason.startswith("its page is back")


def test_a_guest_with_other_processes_is_another_one(stage: Stage) -> None:
    first, second, third = (ProcessId(pid=2**22 - n, start_ticks=1) for n in (3, 4, 5))
    for processes in ((first,), (first, second), (third,)):
        stage.guest(processes=processes)
        stage.beats()
    assert [event.event for event in stage.events if event.event.startswith("guest")] == [
        "guest_started",
        "guest_ended",
        "guest_started",
    ]


def test_a_kill_says_why_and_whether_it_worked(stage: Stage) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        stage.harvest()
        processes = process_ids((child.pid,))
        stage.guest(processes=processes, kv_tokens_total=1000)
        stage.beats()
        slot = stage.node.slots[0]
        slot._guest.kill(processes)
        slot.audit._kill_reason = "owes memory"
        child.wait()
        stage.beats()
        killed = stage.last("guest_killed")
        assert killed.reason == f"owes memory; ended; processes {child.pid}"
    finally:
        child.kill()
        child.wait()


def test_a_quarantine_and_its_release_are_recorded_with_the_operator_s_reason(stage: Stage) -> None:
    stage.node.slots[0].policy.quarantine("guest died three times")
    stage.beats()
    stage.release.write_text("driver replaced")
    stage.beats()
    assert stage.last("quarantined").reason == "guest died three times"
    released = stage.last("quarantine_released")
    assert (released.reason, released.who) == (
        "driver replaced",
        "operator, by the release file",
    )


def test_start_and_stop_of_the_agent_enclose_the_others(stage: Stage) -> None:
    stage.harvest()
    stage.node.close()
    assert stage.events[0].event == "agent_started"
    assert "slot0 harvest" in stage.events[0].reason
    assert stage.events[-1].event == "agent_stopped"
    assert stage.last("lease_ended").reason == "drain: agent stopped"


def test_a_reload_says_what_changed_and_which_mode(stage: Stage) -> None:
    slot = stage.config.slots[0].model_copy(update={"model": "new"})
    update = {"mode": Mode.OBSERVE, "slots": (slot,), "lease_ttl_s": 5.0}
    stage.node.reconfigure(stage.config.model_copy(update=update))
    assert stage.last("config_reloaded").changes == (
        "mode: harvest -> observe",
        "slots.slot0.model:  -> new",
        "lease_ttl_s: needs a restart",
    )
    mode = stage.last("mode_changed")
    assert (mode.slot, mode.from_state, mode.to_state) == (SLOT, "harvest", "observe")


def test_slots_that_come_go_and_are_opened_again_are_recorded_with_their_mode(stage: Stage) -> None:
    first = stage.config.slots[0]
    observes = replace(first.policy, mode=Mode.OBSERVE)
    second = first.model_copy(update={"name": "slot1", "policy": observes})
    stage.node.reconfigure(stage.config.model_copy(update={"slots": (first, second)}))
    opened = stage.last("slot_opened")
    assert (opened.slot, opened.who, opened.reason) == ("slot1", "agent", "mode observe")
    changed = second.model_copy(update={"pulses": ("pulse.prod.0",), "policy": first.policy})
    stage.node.reconfigure(stage.config.model_copy(update={"slots": (first, changed)}))
    stage.node.reconfigure(stage.config.model_copy(update={"slots": (first,)}))
    found = [each for each in stage.events if each.event in ("slot_opened", "slot_closed")]
    assert [(each.event, each.slot, each.reason) for each in found[1:]] == [
        ("slot_closed", "slot1", "to be opened again"),
        ("slot_opened", "slot1", "mode harvest"),
        ("slot_closed", "slot1", "not in the configuration any more"),
    ]


def test_a_refused_reload_says_why(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> LoadedConfig:
        raise ConfigError("agent.yaml line 3: epsilon")

    monkeypatch.setattr(agent_process, "notify", lambda _: None)
    loaded = LoadedConfig(config=stage.config)
    agent_process.AgentProcess(loaded, reload=load, version="1")._reconfigure(stage.node)
    assert stage.last("config_refused").reason == "agent.yaml line 3: epsilon"


def test_a_text_that_is_no_unicode_is_recorded_without_an_error(stage: Stage) -> None:
    stage.node.audit.note(AuditKind.QUARANTINED, who="\ud800", reason="no \ud800 text")
    assert stage.last("quarantined").reason == "no ? text"


def test_a_guest_s_arguments_stay_out_of_the_audit() -> None:
    guest = {"model": "m", "weights": "w", "context_tokens": 1, "kv_cache_bytes": 1}
    config = AgentConfig.model_validate({"slots": [{"name": "s", "guest": guest}]})
    changed = AgentConfig.model_validate(
        {"slots": [{"name": "s", "guest": {**guest, "arguments": ["--api-key", "hush"]}}]}
    )
    from harvester.agent.reload import reload

    assert reload(config, changed).changes == ("slots.s.guest.arguments",)


class FullDisk:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def fill(self) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self._patch.setattr(AuditFile, "append", full)

    def clear(self) -> None:
        self._patch.undo()


def test_a_full_disk_stops_no_grant_is_logged_once_and_stated_at_recovery(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    stage.production()
    stage.guest()
    stage.beats(3)
    disk.fill()
    assert isinstance(stage.ask(), LeaseGranted)
    stage.beats(2)
    assert isinstance(stage.ask("r2", job="other"), LeaseRefused)
    grant = stage.pages.grant_reader().read().record
    assert grant is not None
    assert grant.mode == "open"
    missing = stage.missing()
    assert missing == 3  # the grant, the open state and the refusal
    said = [record for record in caplog.records if "cannot be written" in record.message]
    assert len(said) == 1
    disk.clear()
    stage.clock.now_s += 2.0
    stage.beats()
    resumed = stage.last("audit_resumed")
    assert (resumed.omitted, resumed.reason) == (3, "No space left on device")
    stage.node.release(LeaseId("x"), who=CALLER)
    stage.beats(12)
    assert len(stage.of("audit_resumed")) == 1
    assert stage.missing() == 3


def test_the_log_has_the_same_events(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="harvester.audit")
    stage.harvest()
    lines = [r.message for r in caplog.records if r.name == "harvester.audit"]
    in_file = stage.config.audit_file.read_text().splitlines()[1:]
    assert lines == in_file
    assert json.loads(lines[-1])["schema"] == 1


@pytest.mark.parametrize("how", ["moved", "removed", "cut"])
def test_an_audit_that_another_program_took_away_is_counted_and_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    stage.harvest()
    stage.beats(20)
    file = stage.config.audit_file
    if how == "moved":
        file.rename(file.with_suffix(".1"))
    elif how == "removed":
        file.unlink()
    else:
        os.truncate(file, 0)
    stage.beats(20)
    first, *more = stage.events
    assert (first.event, first.omitted) == ("audit_resumed", 1)
    assert first.reason == "moved, removed or cut by another program"
    assert more == []
    assert stage.missing() == 1
    assert "the audit was moved" in caplog.text
    stage.switch.write_text("drain")
    stage.beats(20)
    assert stage.of("kill_switch")
    assert stage.missing() == 1


def test_an_event_that_comes_first_hides_no_audit_that_was_taken_away(stage: Stage) -> None:
    stage.harvest()
    stage.config.audit_file.unlink()
    stage.ask("r2", job="other")
    assert [event.event for event in stage.events] == ["audit_resumed", "lease_refused"]
