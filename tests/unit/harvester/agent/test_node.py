"""The agent without its sockets: pages, kill switch, journal and metrics."""

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.agent.node import NodeAgent
from harvester.cli.agent_tables import agent_sentences
from harvester.config import AgentConfig, OwnersConfig
from harvester.contracts.audit import AuditEvent, AuditKind, read_audit
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import Epoch, JobId, SlotId, TenantId
from harvester.contracts.journal import Decided, Opened, read_journal
from harvester.contracts.page import (
    Calibration,
    Grant,
    GrantMode,
    Guest,
    Lending,
    PageDirectory,
    PageFault,
    Pulse,
)
from harvester.contracts.page.owners import user_name
from harvester.contracts.process import process_ids
from harvester.contracts.wire.leases import (
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotOffers,
)
from harvester.contracts.wire.stops import Stop, StopOrder, StopRequest
from harvester.policy.effects import Effect, KillGuest
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition
from tests.virtual_clock import VirtualClock

SLOT = SlotId("slot0")


class Stage:
    def __init__(self, root: Path, **changes: Any) -> None:
        self.config = AgentConfig.model_validate(
            {
                "mode": "harvest",
                "page_root": root / "pages",
                "state_dir": root / "state",
                "slots": [{"name": SLOT, "policy": {"proof": {"share_ratio": 0.0}}}],
                **changes,
            }
        )
        self.pages = PageDirectory.create(root / "pages" / SLOT)
        self.journal = root / "state" / f"{SLOT}.journal"
        self.switch = root / "pages" / "kill"
        self.start()

    def start(self, **policy: Any) -> None:
        """`policy`: settings of the slot besides the stage's."""
        fields = self.config.model_dump()
        fields["slots"][0]["policy"] |= policy
        config = AgentConfig.model_validate(fields) if policy else self.config
        self.node = NodeAgent(config, clock=MonotonicClock(), version="1")

    def production(self, **fields: Any) -> None:
        pulse = Pulse(model_samples=1000, **fields)
        self.pages.pulse_writer("prod", 0).write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)

    def guest(self, **fields: Any) -> None:
        guest = Guest(**fields)
        self.pages.guest_writer().write(guest, now_ns=monotonic_ns(), ttl_ns=10**11)

    def ask(
        self, request_id: str, *, slot: SlotId = SLOT, job: str = "j"
    ) -> LeaseGranted | LeaseRefused:
        request = LeaseRequest(
            request_id=request_id,
            slot=slot,
            tenant=TenantId("t"),
            job=JobId(job),
            duration_s=10.0,
        )
        return self.node.take(request)

    def take(self, request_id: str = "r1", *, slot: SlotId = SLOT, job: str = "j") -> LeaseGranted:
        answer = self.ask(request_id, slot=slot, job=job)
        assert isinstance(answer, LeaseGranted)
        return answer

    def grant(self) -> Grant:
        record = self.pages.grant_reader().read().record
        assert record is not None
        return record

    def beats(self, count: int = 1) -> None:
        for _ in range(count):
            self.node.beat()

    def harvest(self) -> LeaseGranted:
        self.production()
        self.guest()
        self.beats(3)
        lease = self.take()
        self.beats(2)
        return lease

    def metric(self, name: str, **labels: str) -> float | None:
        self.node.refresh_metrics()
        return self.node.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.node.close()


def test_grants_under_the_epoch_of_the_lease(stage: Stage) -> None:
    lease = stage.harvest()
    grant = stage.grant()
    assert (grant.mode, grant.epoch) == ("open", lease.epoch)
    assert stage.metric("harvester_slot_state", slot=SLOT, state="open") == 1.0
    assert stage.metric("harvester_leases_active", slot=SLOT, tenant="other") == 1.0


def test_a_grant_is_as_old_as_its_sample_however_long_the_agent_was_stopped_since(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, or a disk that takes seconds for the journal's line, between sample and grant."""
    stage.harvest()
    (slot,) = stage.node.slots
    observe, stopped_ns = slot.policy.observe, 3 * 10**9

    def stopped_behind(*given: Any, **named: Any) -> tuple[Effect, ...]:
        effects = observe(*given, **named)
        monkeypatch.setattr("time.monotonic_ns", lambda: now_ns + stopped_ns)
        return effects

    now_ns = monotonic_ns()
    monkeypatch.setattr(slot.policy, "observe", stopped_behind)
    stage.beats()
    assert stage.pages.grant_reader().read().fault is PageFault.EXPIRED
    left = stage.pages.grant_reader().read_left().record
    assert left is not None
    assert left.mode == "open"


@pytest.mark.parametrize("text", ["hold\n", "drain\n", "", "stop everything", "\x00"])
def test_the_kill_switch_closes_whatever_it_says(stage: Stage, text: str) -> None:
    stage.harvest()
    stage.switch.write_text(text)
    os.utime(stage.switch, (0, 0))
    stage.beats()
    assert stage.grant().mode == "closed"
    assert stage.metric("harvester_kill_switch_engaged", level="node") == 1.0
    assert (stage.node.leases.live(SLOT) is not None) == (text == "hold\n")


@pytest.mark.parametrize("order", ["kill", "stop"])
def test_an_order_that_comes_while_a_beat_stands_still_opens_no_gate(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """SIGSTOP, or another slot's disk, between the read of the order's file and the grant."""
    stage.harvest()
    assert stage.grant().mode is GrantMode.OPEN
    refresh = stage.node.stops.refresh

    def stopped(*, now: float) -> tuple[Stop, ...]:
        found = refresh(now=now)
        (stage.config.page_root / order).write_text("drain")
        monkeypatch.setattr(stage.node.stops, "refresh", refresh)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(stage.node.stops, "refresh", stopped)
    stage.beats()
    assert stage.grant().mode is GrantMode.CLOSED


def test_a_held_slot_names_the_order_while_it_is_leased(stage: Stage) -> None:
    stage.harvest()
    (stage.switch.parent / "stop").write_text("hold new driver")
    stage.beats()
    offer = stage.node.slots[0].offer()
    assert offer.state == "leased"
    assert "new driver" in offer.reason


def test_a_slow_directory_of_users_holds_no_order_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.harvest()
    asked: list[tuple[int, str]] = []

    def slow(uid: int) -> Any:
        asked.append((uid, stage.grant().mode))
        raise KeyError(uid)

    user_name.cache_clear()
    monkeypatch.setattr("pwd.getpwuid", slow)
    stage.switch.write_text("hold")
    stage.beats()
    assert asked == [(os.geteuid(), "closed")], "only once the grants are closed"
    (stage.switch.parent / "stop").write_text("hold")
    stage.beats(5)
    assert len(asked) == 1, "nor again in each beat"
    user_name.cache_clear()


def test_a_pulse_that_is_a_link_to_elsewhere_is_not_believed(stage: Stage) -> None:
    stage.production()
    page = stage.pages.path / "pulse.prod.0"
    page.rename(stage.pages.path / "elsewhere")
    page.symlink_to(stage.pages.path / "elsewhere")
    stage.beats()
    assert stage.grant().reason == "pulse.prod.0 foreign"


def test_too_many_pulse_files_close_the_gate_and_do_not_stop_the_agent(stage: Stage) -> None:
    stage.harvest()
    for number in range(40):
        (stage.pages.path / f"pulse.e{number}.0").touch()
    stage.beats(6)
    assert stage.grant().reason == "pulse.foreign.0 foreign"


@pytest.mark.parametrize("name", ["pulse.a b.0", "pulse." + "x" * 200 + ".0", "pulse..0"])
def test_a_file_that_is_no_engines_pulse_changes_nothing(stage: Stage, name: str) -> None:
    stage.harvest()
    (stage.pages.path / name).touch()
    stage.beats(6)
    assert (stage.grant().mode, stage.grant().pulses) == ("open", ("pulse.prod.0",))


def test_beside_an_unfit_production_nothing_is_offered_and_the_log_says_why(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.production(unfit="a replica over 2 nodes; harvest replicas of one node")
    stage.guest()
    stage.beats(3)
    (offer,) = [slot.offer() for slot in stage.node.slots]
    assert offer.state == "off"
    assert "over 2 nodes; harvest" in offer.reason
    assert len([line for line in caplog.messages if "lends nothing: pulse.prod.0" in line]) == 1
    assert stage.grant().mode == "closed"


def test_the_log_says_once_what_is_lent_and_warns_of_nothing(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stage.production()
    stage.guest(lending=Lending(tokens=64, share_ratio=0.25))
    stage.beats(3)
    said = [(line.levelname, line.message) for line in caplog.records if " lends " in line.message]
    assert said == [
        ("INFO", "slot slot0 lends steps of at most 64 tokens, 25% of production's idle time")
    ]
    assert stage.metric("harvester_lent_step_tokens", slot=SLOT) == 64
    assert stage.metric("harvester_lent_share_ratio", slot=SLOT) == 0.25
    caplog.clear()
    stage.guest(lending=Lending(reason="too slow: isolate the guest"))
    stage.beats(3)
    (offer,) = [slot.offer() for slot in stage.node.slots]
    assert offer.lending.reason == "too slow: isolate the guest"
    said = [(line.levelname, line.message) for line in caplog.records if " lends " in line.message]
    assert said == [("WARNING", "slot slot0 lends nothing: too slow: isolate the guest")]
    assert stage.metric("harvester_lent_step_tokens", slot=SLOT) == 0


def test_an_ungated_slot_states_no_loan_of_a_law_that_it_does_not_follow(tmp_path: Path) -> None:
    stage = Stage(tmp_path, unsafe_experiments=True)
    stage.node.close()
    stage.start(ungated=True)
    stage.production()
    stage.guest(lending=Lending(reason="too slow"))
    stage.beats(3)
    (offer,) = [slot.offer() for slot in stage.node.slots]
    stage.node.close()
    assert offer.lending == Lending()


def test_a_second_agent_on_the_same_pages_is_refused(stage: Stage) -> None:
    stage.harvest()
    apart = stage.config.model_copy(update={"state_dir": stage.config.state_dir / "other"})
    with pytest.raises(ConfigError, match=r"another agent runs on pages .*; stop it first"):
        NodeAgent(apart, clock=MonotonicClock(), version="1")
    stage.beats()
    assert stage.grant().mode == "open"


def test_a_grant_page_that_was_lost_is_made_again(stage: Stage) -> None:
    stage.harvest()
    (stage.pages.path / "grant").unlink()
    (stage.pages.path / ".grant.lock").unlink()
    stage.beats()
    assert stage.grant().mode == "open"


def test_owners_take_a_restart(stage: Stage) -> None:
    named = OwnersConfig(guest=(4242,))
    changed = stage.config.model_copy(update={"owners": named, "page_group": 5})
    assert stage.node.reconfigure(changed).restart_needed == ("owners.guest", "page_group")


def test_several_users_have_a_directory_for_their_turns_on_a_gpu(tmp_path: Path) -> None:
    stage = Stage(tmp_path, page_group=os.getegid())
    launch = tmp_path / "pages" / "launch"
    assert launch.stat().st_mode & 0o7777 == 0o1770
    stage.node.close()


def test_leaves_a_closed_and_expired_page_and_ends_its_leases(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    lease = stage.harvest()
    stage.node.close()
    reader = stage.pages.grant_reader()
    assert reader.read().fault is PageFault.EXPIRED
    left = reader.read_left().record
    assert left is not None
    assert left.mode == "closed"
    assert left.epoch > lease.epoch
    assert stage.metric("harvester_leases_ended_total", slot=SLOT, reason="drain") == 1.0


def test_a_successor_goes_on_from_the_epoch_left_on_the_page(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path / "pages" / SLOT)
    left = pages.grant_writer()
    left.write(Grant(epoch=Epoch(7), mode=GrantMode.OPEN), now_ns=monotonic_ns(), ttl_ns=1)
    left.close()
    stage = Stage(tmp_path)
    stage.production()
    stage.guest(epoch=7)
    stage.beats(3)
    assert (stage.grant().mode, stage.grant().epoch) == ("closed", 7)
    assert stage.take().epoch == 8
    stage.node.close()


def many_slots(root: Path) -> tuple[Stage, list[LeaseGranted]]:
    """Three slots, each leased to a separate job, and all at epoch 1."""
    names = [SlotId(f"slot{number}") for number in range(3)]
    slots = [{"name": name, "policy": {"proof": {"share_ratio": 0.0}}} for name in names]
    stage = Stage(root, slots=slots)
    for name in names:
        pages, now_ns = PageDirectory.create(root / "pages" / name), monotonic_ns()
        pages.pulse_writer("prod", 0).write(Pulse(model_samples=1000), now_ns=now_ns, ttl_ns=10**11)
        pages.guest_writer().write(Guest(), now_ns=now_ns, ttl_ns=10**11)
    stage.beats(3)
    leases = [stage.take(f"r-{name}", slot=name, job=f"job-{name}") for name in names]
    assert [lease.epoch for lease in leases] == [1, 1, 1]
    return stage, leases


def test_a_lease_that_ends_while_the_agent_is_stopped_in_a_beat_is_over_for_its_later_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, leases = many_slots(tmp_path)
    (first, second, _), clock = stage.node.slots, VirtualClock(now_s=stage.node.clock.now())
    stage.node.clock, observe = clock, first.policy.observe
    grants = PageDirectory(tmp_path / "pages" / second.name).grant_reader()
    stage.beats(2)
    before = grants.read().record
    assert before is not None
    assert (before.mode, before.epoch) == ("open", leases[1].epoch)

    def stopped_in(*given: Any, **named: Any) -> tuple[Effect, ...]:
        effects = observe(*given, **named)
        clock.now_s += 20.0
        return effects

    monkeypatch.setattr(first.policy, "observe", stopped_in)
    stage.beats()
    after = grants.read().record
    assert after is not None
    assert (after.mode, after.epoch) == ("closed", leases[1].epoch + 1)
    stage.node.close()


def kill(stage: Stage) -> None:
    """End the agent as a signal does: nothing is drained, and its descriptors close."""
    stage.node.audit.close()
    stage.node._lock.close()
    for slot in stage.node.slots:
        slot._record.close()
        slot._grant_page.close()
        slot.sensor.close()


def holders(stage: Stage) -> dict[tuple[str, str], float]:
    """Series of the exported lease by tenant and job."""
    families = stage.node.metrics.registry.collect()
    samples = [one for family in families for one in family.samples]
    info = [one for one in samples if one.name == "harvester_lease_info"]
    return {(one.labels["tenant"], one.labels["rl_job"]): one.value for one in info}


def test_the_metrics_name_tenant_and_job_of_the_lease_in_force_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tenants=["t"])
    stage.production()
    stage.guest()
    stage.beats(3)
    assert holders(stage) == {("", ""): 0.0}
    for job in ("first", "second"):
        lease = stage.take(job, job=job)
        assert holders(stage) == {("t", job): 1.0}
        stage.node.release(lease.lease)
    assert holders(stage) == {("", ""): 0.0}
    stage.node.close()


def test_a_tenant_that_is_not_configured_brings_no_names_into_the_metrics(stage: Stage) -> None:
    stage.harvest()
    assert holders(stage) == {("other", "other"): 1.0}


def test_an_offer_has_mode_decision_latencies_and_the_guest_s_tokens(stage: Stage) -> None:
    stage.production(ttft_s_recent=(0.1,), samples_total=1)
    stage.guest()
    stage.beats(2)
    stage.production(ttft_s_recent=(0.1, 0.3), samples_total=2)
    stage.guest(tokens_total=77)
    stage.beats()
    offer = stage.node.slots[0].offer()
    assert (offer.mode, offer.slot_state, offer.guest_tokens_total) == ("harvest", "closed", 77)
    assert (offer.ttft_s, offer.itl_s) == (0.3, None)
    assert offer.headroom_age_s is not None


def test_a_lease_that_a_beat_has_ended_is_over_for_a_successor_of_the_same_moment(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    lease = stage.harvest()
    stage.switch.write_text("drain")
    stage.beats()
    kill(stage)
    stage.switch.unlink()
    stage.start(cooldown_s=0.0)
    assert stage.node.leases.live(SLOT) is None
    stage.beats(2)
    assert stage.take("r2").epoch > lease.epoch
    stage.node.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_slot_with_another_user_s_page_neither_stops_the_others_nor_costs_them_their_epochs(
    tmp_path: Path,
) -> None:
    stage, leases = many_slots(tmp_path)
    stage.node.close()
    page = tmp_path / "pages" / leases[1].slot / "grant"
    page.unlink()
    page.touch()
    os.chown(page, 12345, 12345)
    for _ in range(2):
        stage.start()
        assert [slot.name for slot in stage.node.slots] == [leases[0].slot, leases[2].slot]
        assert "belongs to another user" in stage.node.slots.unopened[leases[1].slot]
        kill(stage)  # Before the first beat.
    page.unlink()
    stage.start()
    assert not stage.node.slots.unopened
    assert stage.node.leases.view(leases[0].slot).epoch > leases[0].epoch
    stage.node.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_an_agent_none_of_whose_slots_can_be_opened_does_not_start(tmp_path: Path) -> None:
    page = tmp_path / "pages" / SLOT / "grant"
    page.parent.mkdir(parents=True)
    page.touch()
    os.chown(page, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Stage(tmp_path)


def test_a_removed_slot_that_waits_to_be_closed_lends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, leases = many_slots(tmp_path)
    monkeypatch.setattr("harvester.agent.open_slots._OPENING_S", -1.0)
    slots = stage.config.slots[:1]
    stage.node.reconfigure(stage.config.model_copy(update={"slots": slots}))
    assert stage.node.slots.unopened.keys() == {lease.slot for lease in leases[1:]}
    for lease in leases[1:]:
        assert stage.node.leases.live(lease.slot) is None
        assert isinstance(stage.ask("again", slot=lease.slot), LeaseRefused)
    assert stage.node.leases.live(leases[0].slot) is not None
    stage.node.close()


def test_a_successor_gives_every_lease_back_to_its_own_slot_and_job(tmp_path: Path) -> None:
    stage, leases = many_slots(tmp_path)
    kill(stage)
    stage.start()
    for lease in reversed(leases):
        renewal = LeaseRenewal(epoch=lease.epoch, duration_s=10.0)
        answer = stage.node.leases.renew(lease.lease, renewal, now=stage.node.clock.now())
        assert isinstance(answer, LeaseGranted)
        assert answer.slot == lease.slot
    offers = {slot.offer().slot: slot.offer() for slot in stage.node.slots}
    assert [(offers[one.slot].tenant, offers[one.slot].job) for one in leases] == [
        ("t", f"job-{one.slot}") for one in leases
    ]
    stage.node.leases.release(leases[0].lease, now=stage.node.clock.now())
    stage.beats()
    assert [stage.node.leases.live(one.slot) is not None for one in leases] == [False, True, True]
    stage.node.close()


def test_a_successor_knows_nothing_of_a_lease_that_had_ended(tmp_path: Path) -> None:
    stage, leases = many_slots(tmp_path)
    stage.node.leases.release(leases[1].lease, now=stage.node.clock.now())
    stage.beats()
    kill(stage)
    stage.start()
    assert [stage.node.leases.live(one.slot) is not None for one in leases] == [True, False, True]
    stage.node.close()
    stage.start()
    assert all(stage.node.leases.live(one.slot) is None for one in leases)
    stage.node.close()


def test_a_lease_that_cannot_be_recorded_is_refused(stage: Stage) -> None:
    stage.production()
    stage.guest()
    stage.beats(3)
    in_the_way = stage.journal.parent / f".tmp-{SLOT}.lease"
    in_the_way.mkdir()
    refused = stage.ask("r1")
    assert isinstance(refused, LeaseRefused)
    assert "record" in refused.reason
    assert stage.node.leases.live(SLOT) is None
    in_the_way.rmdir()
    assert stage.take("r1").epoch > 1


def test_the_journal_names_a_lease_s_holder_and_not_its_id(stage: Stage) -> None:
    lease = stage.harvest()
    stage.switch.write_text("drain")
    stage.beats()
    said = msgspec.json.encode(list(read_journal(stage.journal))).decode()
    assert '"tenant":"t","job":"j"' in said
    assert '"type":"end_lease"' in said
    assert lease.lease not in said
    assert lease.lease.rpartition(".")[2] not in said


def test_two_leases_of_one_slot_have_ids_that_share_no_secret(stage: Stage) -> None:
    first = stage.harvest()
    stage.node.leases.release(first.lease, now=stage.node.clock.now())
    second = stage.take("r2")
    secrets = [lease.lease.rpartition(".")[2] for lease in (first, second)]
    assert secrets[0] != secrets[1]
    assert all(len(secret) == 32 for secret in secrets)


def test_its_journal_replays_to_the_same_effects(stage: Stage) -> None:
    stage.harvest()
    stage.switch.write_text("drain")
    stage.beats(5)
    lines = list(read_journal(stage.journal))
    assert isinstance(lines[0], Opened)
    assert lines[0].policy == SlotPolicy.NAME
    policy = SlotPolicy.from_config(lines[0].config)
    decided = [line for line in lines if isinstance(line, Decided)]
    assert len(decided) == 11
    for line in decided:
        sample = msgspec.convert(line.sample, SlotPolicy.SAMPLE)
        effects = policy.observe(sample, now=line.t_s)
        assert effects == msgspec.convert(line.effects, tuple[Effect, ...])


def test_a_rotated_journal_opens_with_a_snapshot_and_stays_bounded(tmp_path: Path) -> None:
    stage = Stage(tmp_path, journal_max_bytes=1 << 16)
    stage.production()
    stage.beats(200)
    stage.node.close()
    files = sorted(stage.journal.parent.iterdir())
    # A snapshot opens each file, so a file may exceed its half of the bound by one.
    assert sum(path.stat().st_size for path in files) < 2 << 16
    first = next(read_journal(stage.journal))
    assert isinstance(first, Opened)
    assert first.snapshot is not None


def test_a_decision_without_a_journal_is_not_granted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.harvest()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harvester.contracts.journal.JournalWriter.decided", full)
    stage.beats()
    grant = stage.grant()
    assert (grant.mode, grant.reason) == ("closed", "journal: No space left on device")


def test_a_reload_changes_a_slots_policy_and_keeps_what_it_knows(stage: Stage) -> None:
    stage.harvest()
    slots = [{"name": SLOT, "policy": {"step_tokens_max": 99, "proof": {"share_ratio": 0.0}}}]
    changed = AgentConfig.model_validate({**stage.config.model_dump(), "slots": slots})
    stage.node.reconfigure(changed)
    stage.beats()
    assert (stage.grant().mode, stage.grant().step_tokens_cap) == ("open", 99)


def test_counts_what_the_guest_did_and_lost(stage: Stage) -> None:
    stage.harvest()
    stage.guest(tokens_total=500, aborted_total=2, steps_launched=5, steps_finished=5)
    stage.beats()
    assert stage.metric("harvester_guest_tokens_total", slot=SLOT) == 500
    assert stage.metric("harvester_evictions_total", slot=SLOT, reason="clear") == 2
    stage.switch.write_text("hold")
    stage.beats(2)
    assert stage.metric("harvester_reclaim_duration_seconds_count", slot=SLOT) == 1


def test_counts_the_requests_that_met_steps_of_the_guest(stage: Stage) -> None:
    stage.harvest()
    for met in ((10, 3, 0, 0, 0), (12, 5, 1, 0, 0), (1, 0, 0, 0, 0), (10**18, 0, 0, 0, 0)):
        stage.guest(steps_met=met)
        stage.beats()
    within = [
        stage.metric("harvester_guest_steps_met_bucket", slot=SLOT, le=edge)
        for edge in ("0.0", "1.0", "2.0", "+Inf")
    ]
    assert within == [202, 204, 205, 205], "a page that claims more is not believed"


def test_says_which_slots_are_silent(stage: Stage) -> None:
    stage.beats()
    assert [name for name, _ in stage.node.silent_slots()] == [SLOT]
    stage.production()
    stage.beats()
    assert stage.node.silent_slots() == []


def test_a_scrape_that_never_succeeded_is_missing_whatever_else_production_says(
    tmp_path: Path,
) -> None:
    scraped = {"name": SLOT, "metrics_url": "http://127.0.0.1:9/metrics"}
    stage = Stage(tmp_path, slots=[scraped])
    stage.production()
    stage.guest()
    stage.beats(3)
    refused = stage.ask("r1")
    assert isinstance(refused, LeaseRefused)
    assert "pulse.metrics.0 missing: `metrics_url` gives none" in refused.reason
    age_s = stage.metric("harvester_signal_age_seconds", slot=SLOT, source="pulse.metrics.0")
    assert age_s == math.inf
    ((_, why),) = stage.node.silent_slots()
    assert why.startswith("pulse.metrics.0 missing: ")
    stage.node.close()


def test_a_slot_that_is_off_is_still_not_ready_without_its_pulse(stage: Stage) -> None:
    stage.production()
    stage.switch.write_text("drain\n")
    stage.beats()
    assert stage.node.silent_slots() == []
    stage.pages.pulse_writer("prod", 0).write(Pulse(), now_ns=monotonic_ns(), ttl_ns=0)
    stage.beats()
    assert stage.node.silent_slots() == [(SLOT, "pulse.prod.0 expired")]
    assert [slot.offer().unready for slot in stage.node.slots] == ["pulse.prod.0 expired"]


@pytest.mark.parametrize("expired", [False, True])
def test_the_status_says_once_that_a_pulse_is_not_there(stage: Stage, expired: bool) -> None:
    if expired:
        stage.production()
        stage.beats(3)
        stage.pages.pulse_writer("prod", 0).write(Pulse(), now_ns=monotonic_ns(), ttl_ns=0)
    stage.beats(3)
    offers = SlotOffers(node="n", slots=[slot.offer() for slot in stage.node.slots])
    (sentence,) = agent_sentences(offers)
    assert sentence.startswith(f"Slot {SLOT} needs a look: ")
    assert sentence.endswith("pulse.prod.0 expired" if expired else "in these pages")


def test_one_slot_s_error_ends_neither_the_agent_nor_the_other_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage, _ = many_slots(tmp_path)
    first, second, _ = stage.node.slots
    grants = PageDirectory(tmp_path / "pages" / first.name).grant_reader()
    others = PageDirectory(tmp_path / "pages" / second.name).grant_reader()
    stage.beats(2)
    assert grants.read().record is not None
    other = others.read().stamp_ns

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(first.policy, "observe", broken)
        stage.beats(3)
        assert grants.read().fault is PageFault.EXPIRED, "nothing was decided"
        assert others.read().stamp_ns > other
        assert stage.node.silent_slots() == [(first.name, "agent fault: ZeroDivisionError")]
        assert stage.node.leases.entry(first.name)[1] == "agent fault: ZeroDivisionError"
        assert stage.node.alive()
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    stage.beats()
    assert stage.node.silent_slots() == []
    assert grants.read().record is not None
    stage.node.close()


def test_a_slot_whose_page_is_at_fault_too_keeps_no_other_slot_from_its_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = many_slots(tmp_path)
    first, second, _ = stage.node.slots
    others = PageDirectory(tmp_path / "pages" / second.name).grant_reader()
    stage.beats(2)
    other = others.read().stamp_ns

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(first._grant_page, "write", broken)
    stage.beats(3)
    assert others.read().stamp_ns > other
    assert stage.node.silent_slots() == [(first.name, "agent fault: ZeroDivisionError")]
    monkeypatch.undo()
    stage.node.close()


def test_a_beat_that_raises_behind_its_grant_leaves_none_open(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.harvest()
    (slot,), written = stage.node.slots, []

    def broken(*_: object, **__: object) -> None:
        written.append(stage.grant().mode)
        raise ValueError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(slot.exposition, "observe", broken)
        for _ in range(3):
            stage.beats()
            assert stage.pages.grant_reader().read().fault is PageFault.EXPIRED
            left = stage.pages.grant_reader().read_left().record
            assert left is not None
            assert (left.mode, left.reason) == ("closed", "agent fault: ValueError")
    assert written == ["open", "closed", "closed"]
    stage.beats(2)
    assert stage.grant().mode == "open"


def test_a_slot_whose_beats_raise_again_and_again_is_counted_off_and_loses_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    stage.harvest()
    (slot,), clock = stage.node.slots, VirtualClock(now_s=stage.node.clock.now())
    stage.node.clock = clock
    open_tokens = stage.metric("harvester_grant_step_tokens", slot=SLOT)
    with monkeypatch.context() as patch:
        patch.setattr(slot.policy, "observe", lambda *_, **__: 1 / 0)
        stage.beats()
        assert stage.metric("harvester_beats_failed_total", slot=SLOT) == 1
        assert stage.metric("harvester_grant_step_tokens", slot=SLOT) == 0
        assert stage.metric("harvester_slot_state", slot=SLOT, state="off") == 1
        offer = slot.offer()
        assert (offer.slot_state, offer.unready) == ("off", offer.reason)
        assert offer.reason == "agent fault: ZeroDivisionError"
        assert slot.live_lease is not None, "one fault costs no lease"
        clock.now_s += 5.0
        stage.beats()
        assert slot.live_lease is None
        assert stage.metric("harvester_leases_ended_total", slot=SLOT, reason="drain") == 1
        assert isinstance(stage.ask("r2"), LeaseRefused)
    events = (line for line in read_audit(stage.config.audit_file) if isinstance(line, AuditEvent))
    ended = [event.reason for event in events if event.event == AuditKind.LEASE_ENDED]
    assert ended == ["drain: agent fault: ZeroDivisionError"]
    stage.guest()
    stage.beats(3)
    stage.take("r3")
    assert stage.metric("harvester_grant_step_tokens", slot=SLOT) == open_tokens
    assert stage.metric("harvester_beats_failed_total", slot=SLOT) == 2
    stage.node.close()


@pytest.mark.parametrize("epoch", [-1, 10**15 + 1, 2**63, 2**64 - 1])
def test_a_guest_names_no_epoch_that_ours_would_overflow_from(tmp_path: Path, epoch: int) -> None:
    stage = Stage(tmp_path)
    stage.harvest()
    stage.node.close()
    left = stage.pages.grant_reader().read_left().record
    assert left is not None
    stage.guest(epoch=epoch)
    stage.start()
    stage.production()
    stage.beats()
    assert stage.grant().epoch == left.epoch
    stage.node.close()


def test_a_guest_that_names_production_does_not_end_it(tmp_path: Path) -> None:
    policy = {"proof": {"share_ratio": 0.0}, "kv_deadline_s": 0.2, "kv_budget_tokens": 100}
    stage = Stage(tmp_path, slots=[{"name": SLOT, "policy": policy}])
    engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (root,) = process_ids([engine.pid])
        pulse = Pulse(model_samples=1000, root=root)
        stage.pages.pulse_writer("prod", 0).write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)
        stage.guest(kv_tokens_total=1000, processes=(root,))
        stage.beats()
        kill = KillGuest(processes=(root,), reason="owes memory")
        stage.node.slots[0]._carry_out(kill, sampled_ns=0, now=0.0)
        stage.beats()
        assert stage.metric(
            "harvester_guest_actions_total", slot=SLOT, action="kill", outcome="failed"
        )
        assert engine.poll() is None
    finally:
        engine.communicate(b"\n")
        stage.node.close()


def test_a_page_directory_that_was_removed_silences_its_slot(stage: Stage) -> None:
    stage.harvest()
    shutil.rmtree(stage.pages.path)
    stage.beats(2)
    slot = stage.node.slots[0]
    assert slot.policy.condition is Condition.SILENT
    assert [name for name, _ in stage.node.silent_slots()] == [SLOT]


def test_a_directory_that_cannot_be_used_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match="state_dir"):
        Stage(tmp_path)


def test_exports_what_is_retained_and_what_became_of_it(stage: Stage) -> None:
    stage.production()
    had = {"kv_tokens_total": 1000, "kv_tokens": 300, "kv_tokens_withheld": 500}
    stage.guest(**had, kv_tokens_retained=128)
    stage.beats(1)
    stage.guest(**had, prefix_tokens_used_total=96, prefix_tokens_dropped_total=32)
    stage.beats(1)

    def kv(state: str) -> float | None:
        return stage.metric("harvester_guest_kv_tokens", slot=SLOT, state=state)

    def prefixes(outcome: str) -> float | None:
        return stage.metric("harvester_guest_prefix_tokens_total", slot=SLOT, outcome=outcome)

    assert (kv("held"), kv("retained"), kv("withheld"), kv("free")) == (300, 0, 500, 200)
    assert (prefixes("used"), prefixes("dropped")) == (96, 32)


def test_exports_how_production_s_steps_held_to_their_prediction(stage: Stage) -> None:
    worse = Calibration(steps=64, over_ratio=0.3, p50_ratio=1.0, p90_ratio=1.25, p99_ratio=2.0)
    better = Calibration(steps=512, over_ratio=0.1, p50_ratio=0.5, p90_ratio=1.0, p99_ratio=1.5)
    for process, found in enumerate((better, worse)):
        pulse = Pulse(model_samples=1000, prefill_calibration=found)
        writer = stage.pages.pulse_writer("prod", process)
        writer.write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)
    stage.beats(1)

    def ratio(kind: str, percentile: str) -> float | None:
        name = "harvester_production_step_percentile_ratio"
        return stage.metric(name, slot=SLOT, kind=kind, percentile=percentile)

    over = stage.metric("harvester_production_step_over_ratio", slot=SLOT, kind="prefill")
    assert (over, ratio("prefill", "90"), ratio("prefill", "99")) == (0.3, 1.25, 2.0)
    unknown = ratio("decode", "90")
    assert unknown is not None
    assert math.isnan(unknown)


def test_an_api_server_that_its_siblings_miss_closes_the_slot_until_it_shows_itself(
    stage: Stage,
) -> None:
    def beats_of(process: int) -> None:
        pulse = Pulse(model_samples=1000, processes=2)
        writer = stage.pages.pulse_writer("prod", process)
        writer.write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)

    stage.harvest()
    beats_of(0)
    stage.beats()
    assert (stage.grant().mode, stage.grant().reason) == ("closed", "pulse.prod.1 missing")
    assert stage.grant().pulses == ("pulse.prod.0", "pulse.prod.1")
    beats_of(1)
    stage.beats()
    assert "missing" not in stage.grant().reason


def test_an_offer_s_headroom_has_its_age(stage: Stage) -> None:
    stage.guest()
    stage.production()
    stage.node.beat()
    offer = stage.node.slots[0].offer()
    assert (offer.headroom_ratio, offer.headroom_age_s) == (None, None)
    stage.production(ttft_s_recent=(0.0,), samples_total=1)
    stage.node.beat()
    offer = stage.node.slots[0].offer()
    assert offer.headroom_ratio == 1.0
    assert offer.headroom_age_s is not None
    assert offer.headroom_age_s >= 0


def test_a_call_that_is_repeated_is_no_beat(stage: Stage) -> None:
    lease = stage.harvest()
    before = len(list(read_journal(stage.journal)))
    for _ in range(50):
        assert stage.take().lease == lease.lease
    assert len(list(read_journal(stage.journal))) == before
    stage.node.release(lease.lease)
    assert len(list(read_journal(stage.journal))) == before + 1
    for _ in range(50):
        stage.node.release(lease.lease)
    assert len(list(read_journal(stage.journal))) == before + 1


def test_a_flood_of_orders_is_in_force_and_fills_no_journal(stage: Stage) -> None:
    stage.harvest()
    before = len(list(read_journal(stage.journal)))
    flood = StopRequest(order=StopOrder.HOLD, tenant="other", reason="flood")
    for _ in range(100):
        assert stage.node.order(flood).in_force is not None
        stage.node.order(msgspec.structs.replace(flood, order=StopOrder.NONE))
    drained = stage.node.order(StopRequest(order=StopOrder.DRAIN, reason="mine"))
    assert drained.reached == ("slot0 (t/j)",)
    assert len(list(read_journal(stage.journal))) < before + 120
    stage.beats()
    assert stage.node.leases.live(SLOT) is None
