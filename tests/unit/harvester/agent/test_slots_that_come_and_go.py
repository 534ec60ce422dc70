"""Slots that come and go while the agent runs: by SIGHUP or by the slots file."""

import asyncio
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harvester.agent import agent_process
from harvester.agent.agent_process import AgentProcess, SlotsWatch
from harvester.agent.interlock_watch import InterlockWatch
from harvester.agent.node import NodeAgent
from harvester.agent.slot_loop import Slot
from harvester.config import AgentConfig, SlotConfig
from harvester.config_file import DISCOVERED, load_agent_config, read_agent_config
from harvester.contracts.clock import MonotonicClock, monotonic_ns, wall_seconds
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.page import GrantMode, PageDirectory, PageFault
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotState,
)
from harvester.platform import whole_file
from tests.virtual_clock import VirtualClock


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return AgentConfig(
        page_root=tmp_path / "pages",
        state_dir=tmp_path / "state",
        slots=(SlotConfig(name="slot0"), SlotConfig(name="slot1")),
    )


@pytest.fixture
def node(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    """Takes as long as a slow disk does to close and open what a reload asks for."""
    monkeypatch.setattr("harvester.agent.open_slots._OPENING_S", 60.0)
    node = NodeAgent(config, clock=MonotonicClock(), version="1")
    node.beat()
    yield node
    node.close()


def with_slots(config: AgentConfig, *names: str, **fields: Any) -> AgentConfig:
    slots = tuple(SlotConfig(name=name, **fields) for name in names)
    return config.model_copy(update={"slots": slots})


def names(node: NodeAgent) -> list[str]:
    return [slot.name for slot in node.slots]


def series_of(node: NodeAgent, slot: str) -> set[str]:
    return {
        sample.name
        for family in node.metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("slot") == slot
    }


def lease(node: NodeAgent, slot: str) -> LeaseGranted:
    node.leases.offer(SlotId(slot), SlotState.OFFERED)
    request = LeaseRequest(
        request_id=f"r-{slot}",
        slot=SlotId(slot),
        tenant=TenantId("t"),
        job=JobId("j"),
        duration_s=5.0,
    )
    granted = node.leases.take(request, secret="s", now=node.clock.now())
    assert isinstance(granted, LeaseGranted)
    return granted


def test_a_new_slot_is_opened_and_decides_beside_the_others(
    node: NodeAgent, config: AgentConfig
) -> None:
    done = node.reconfigure(with_slots(config, "slot0", "slot1", "slot2", model="m"))
    assert "slots.slot2: added" in done.in_force
    assert done.restart_needed == ()
    assert names(node) == ["slot0", "slot1", "slot2"]
    node.beat()
    assert PageDirectory(config.page_root / "slot2").grant_reader().read_left().record is not None
    assert [slot.offer().model for slot in node.slots] == ["m"] * 3
    assert series_of(node, "slot2") == series_of(node, "slot0")


def test_a_slot_that_is_gone_ends_its_lease_and_its_grant_and_leaves_no_series(
    node: NodeAgent, config: AgentConfig, tmp_path: Path
) -> None:
    granted = lease(node, "slot1")
    done = node.reconfigure(with_slots(config, "slot0"))
    assert "slots.slot1: removed" in done.in_force
    assert names(node) == ["slot0"]
    page = PageDirectory(config.page_root / "slot1").grant_reader()
    left = page.read_left().record
    assert left is not None
    assert left.mode is GrantMode.CLOSED
    assert left.epoch > granted.epoch
    assert page.read(now_ns=monotonic_ns()).fault is PageFault.EXPIRED
    ended = node.renew(granted.lease, LeaseRenewal(epoch=granted.epoch, duration_s=5.0))
    assert isinstance(ended, LeaseEnded)
    assert ended.reason is EndReason.DRAIN
    refused = node.take(
        LeaseRequest(
            request_id="r2",
            slot=SlotId("slot1"),
            tenant=TenantId("t"),
            job=JobId("j"),
            duration_s=1.0,
        )
    )
    assert isinstance(refused, LeaseRefused)
    assert refused.reason == "no such slot on this node"
    node.beat()
    node.refresh_metrics()
    assert series_of(node, "slot1") == set()
    audit = (tmp_path / "state" / "audit.jsonl").read_text()
    assert '"lease_ended"' in audit
    assert "slots.slot1: removed" in audit


def test_a_slot_comes_back_with_an_epoch_above_its_last_one(
    node: NodeAgent, config: AgentConfig
) -> None:
    granted = lease(node, "slot1")
    node.reconfigure(with_slots(config, "slot0"))
    node.reconfigure(config)
    assert names(node) == ["slot0", "slot1"]
    assert node.leases.entry(SlotId("slot1"))[2] > granted.epoch
    node.beat()
    node.refresh_metrics()
    assert series_of(node, "slot1") == series_of(node, "slot0")


def test_a_slot_of_which_a_fixed_field_changed_is_opened_anew(
    node: NodeAgent, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine a beat is due meanwhile, and these slots have no production to be leased.
    monkeypatch.setattr(node.slots, "_beat_if_due", lambda: None)
    granted, other = lease(node, "slot0"), lease(node, "slot1")
    slots = (config.slots[0].model_copy(update={"service": "chat"}), config.slots[1])
    done = node.reconfigure(config.model_copy(update={"slots": slots}))
    assert done.in_force == ("slots.slot0: opened again", "slots.slot0.service")
    assert done.restart_needed == ()
    assert names(node) == ["slot0", "slot1"]
    assert [slot.config.service for slot in node.slots] == ["chat", ""]
    ended = node.renew(granted.lease, LeaseRenewal(epoch=granted.epoch, duration_s=5.0))
    assert isinstance(ended, LeaseEnded)
    renewed = node.renew(other.lease, LeaseRenewal(epoch=other.epoch, duration_s=5.0))
    assert isinstance(renewed, LeaseGranted)


def test_an_epoch_does_not_fall_where_the_pages_of_an_absent_slot_are_lost(
    node: NodeAgent, config: AgentConfig
) -> None:
    granted = lease(node, "slot1")
    node.reconfigure(with_slots(config, "slot0"))
    shutil.rmtree(config.page_root / "slot1")
    node.reconfigure(config)
    assert node.leases.entry(SlotId("slot1"))[2] > granted.epoch


def test_a_slot_is_not_closed_before_its_quarantine_is_on_disk(
    node: NodeAgent, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = node.slots[1]
    slot.policy.quarantine("a test")
    replace = whole_file.replace

    def full(path: Path, *given: Any, **named: Any) -> None:
        if path.suffix == ".state":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, *given, **named)

    monkeypatch.setattr(whole_file, "replace", full)
    node.reconfigure(with_slots(config, "slot0"))
    assert names(node) == ["slot1", "slot0"]
    assert "not closed before its state is on disk" in node.slots.unopened["slot1"]
    node.beat()
    monkeypatch.setattr(whole_file, "replace", replace)
    node.slots.open_more()
    assert names(node) == ["slot0"]
    node.reconfigure(config)
    assert node.slots[1].policy.slot_state() is SlotState.QUARANTINED


def test_removing_a_slot_does_not_wait_for_the_end_of_its_guest(
    node: NodeAgent, config: AgentConfig
) -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    node.slots[1]._guest._ending = thread
    before = MonotonicClock().now()
    node.reconfigure(with_slots(config, "slot0"))
    assert MonotonicClock().now() - before < 5.0
    assert thread.is_alive()
    ends.set()


def test_an_interlock_that_fired_goes_on_when_its_slot_comes_back(
    tmp_path: Path,
) -> None:
    config = AgentConfig.model_validate(
        {
            "page_root": tmp_path / "pages",
            "state_dir": tmp_path / "state",
            "interlocks": {
                "accelerators": {
                    "source": "dcgm-exporter",
                    "url": "http://127.0.0.1:9",
                    "temperature_celsius_max": 80,
                    "quiet_s": 300,
                }
            },
            "slots": [{"name": "slot0"}, {"name": "slot1"}],
        }
    )
    watch = InterlockWatch(config, clock=VirtualClock())
    lock = watch._locks["slot1"][0]
    watch.configure(with_slots(config, "slot0"))
    assert [*watch._locks] == ["slot0"]
    watch.configure(config)
    assert watch._locks["slot1"][0] is lock


def test_an_interlock_looks_at_the_gpus_that_discovery_finds_later(config: AgentConfig) -> None:
    guest = {"model": "/m", "weights": "/w", "context_tokens": 1, "kv_cache_bytes": 1}

    def on(*gpus: str) -> AgentConfig:
        slot = SlotConfig.model_validate({"name": "slot0", "guest": {**guest, "gpus": gpus}})
        return config.model_copy(update={"slots": (slot,)})

    watch = InterlockWatch(on(), clock=VirtualClock())
    lock, _ = watch._locks["slot0"]
    watch.configure(on("GPU-1"))
    assert watch._locks["slot0"] == (lock, ("GPU-1",))
    watch.configure(on("GPU-2"))
    assert watch._locks["slot0"] == (lock, ("GPU-1",)), "its guest may still be there"


def test_a_renamed_slot_has_the_pages_of_the_one_that_is_gone(
    node: NodeAgent, config: AgentConfig, tmp_path: Path
) -> None:
    node.reconfigure(with_slots(config, "slot2", pages=tmp_path / "pages" / "slot1"))
    assert names(node) == ["slot2"]
    assert node.slots.unopened == {}


def test_a_slot_that_cannot_be_opened_harms_no_other_and_is_opened_later(
    node: NodeAgent, config: AgentConfig, tmp_path: Path
) -> None:
    another = NodeAgent(
        with_slots(config, "slot2").model_copy(update={"state_dir": tmp_path / "another"}),
        clock=MonotonicClock(),
        version="1",
    )
    wanted = with_slots(config, "slot0", "slot2", "slot3")
    done = node.reconfigure(wanted)
    assert names(node) == ["slot0", "slot3"]
    assert "another agent runs on pages" in node.slots.unopened["slot2"]
    assert "slots.slot2: added" not in done.in_force
    assert series_of(node, "slot2") == set()
    node.beat()
    another.close()
    done = node.reconfigure(wanted)
    assert done.in_force == ("slots.slot2: added",)
    assert names(node) == ["slot0", "slot2", "slot3"]
    assert node.slots.unopened == {}


def test_a_slot_that_fails_half_way_leaves_nothing_that_hinders_the_next_try(
    node: NodeAgent, config: AgentConfig, tmp_path: Path
) -> None:
    journal = tmp_path / "state" / "slot2.journal"
    journal.mkdir()
    wanted = with_slots(config, "slot0", "slot1", "slot2")
    node.reconfigure(wanted)
    assert "slot2" in node.slots.unopened
    node.beat()
    journal.rmdir()
    node.reconfigure(wanted)
    assert node.slots.unopened == {}
    assert names(node) == ["slot0", "slot1", "slot2"]


def test_grants_of_the_others_do_not_expire_while_many_slots_come_and_go(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot takes 0.2 s to open and to close; a grant lasts half a second."""

    clock = VirtualClock(1000.0)
    node = NodeAgent(config, clock=clock, version="1")
    beats: list[float] = []

    def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any, **named: Any) -> Any:
            clock.now_s += 0.2
            return work(*given, **named)

        return slow

    def noted(slot: Slot, *given: Any, **named: Any) -> None:
        if slot.name == "slot0":
            beats.append(clock.now_s)

    node.beat()
    monkeypatch.setattr(Slot, "__init__", slowly(Slot.__init__))
    monkeypatch.setattr(Slot, "close", slowly(Slot.close))
    monkeypatch.setattr(Slot, "beat", noted)
    beats.append(clock.now_s)
    for wanted in (["slot0", *(f"more{number}" for number in range(10))], ["slot0"]):
        node.reconfigure(with_slots(config, *wanted))
        while node.slots.waiting:
            assert clock.now_s - beats[-1] < 0.45
            clock.now_s += 0.05
            node.slots.open_more()
            node.beat()
        assert names(node) == wanted
    assert clock.now_s > 1004.0
    gaps = [later - sooner for sooner, later in itertools.pairwise([*beats, clock.now_s])]
    assert max(gaps) < 0.45
    node.close()


def test_an_agent_without_a_slot_waits_for_one(config: AgentConfig, tmp_path: Path) -> None:
    empty = with_slots(config).model_copy(update={"slots_file": tmp_path / "slots.yaml"})
    node = NodeAgent(empty, clock=MonotonicClock(), version="1")
    node.beat()
    assert node.beat_s > 0
    assert node.silent_slots() == []
    node.reconfigure(with_slots(empty, "slot0"))
    node.beat()
    assert names(node) == ["slot0"]
    node.close()


# The slots file


def write(path: Path, *names: str, **fields: Any) -> None:
    new = path.with_name("new")
    new.write_text(yaml.safe_dump({"slots": [{"name": name, **fields} for name in names]}))
    new.chmod(0o644)
    new.replace(path)


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    path = tmp_path / "agent.yaml"
    own = {
        "page_root": str(tmp_path / "pages"),
        "state_dir": str(tmp_path / "state"),
        "slots_file": str(tmp_path / "slots.yaml"),
        "slots": [{"name": "own"}],
    }
    path.write_text(yaml.safe_dump(own))
    return path


def test_every_command_sees_the_slots_of_the_slots_file(agent_file: Path, tmp_path: Path) -> None:
    assert [slot.name for slot in load_agent_config(agent_file, environment={}).slots] == ["own"]
    write(tmp_path / "slots.yaml", "more", model="m")
    found = load_agent_config(agent_file, environment={}).slots
    assert [(slot.name, slot.model) for slot in found] == [("own", ""), ("more", "m")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slots: [{name: a}, {name: a}]", "slots: every name may appear once"),
        ("", "slots: Field required"),
        ("slots: [{name: more, model: !!bool maybe}]", "not YAML"),
        ("slots: [{name: more, model: !!int ''}]", "not YAML"),
        ("slots: [{name: more, model: !!timestamp x}]", "not YAML"),
        ("slots: [{name: more, models: m}]", "slots.yaml line 1: slots.0.models"),
        ("slots: [{name: ../more}]", "slots.yaml line 1: slots.0.name"),
        ("slots: [{name: kill}]", "its pages are the agent's own"),
        ("mode: harvest", "slots.yaml line 1: mode"),
        ("- name: more", "expected `field: value` lines"),
        ("slots: [", "not YAML"),
        ("slots: [{name: more, policy: {grant_ttl_s: 60}}]", "slots.yaml line 1: slots.0.policy"),
    ],
)
def test_a_mistake_in_a_slots_file_is_named(
    agent_file: Path, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "slots.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"slots\.yaml") as caught:
        load_agent_config(agent_file, environment={})
    assert says in str(caught.value)


def test_a_broken_slots_file_hinders_no_command_for_another_slot(
    agent_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "slots.yaml").write_text("slots: [")
    assert load_agent_config(agent_file, environment={}, slot="own").slots[0].name == "own"
    for slot in ("more", None):
        with pytest.raises(ConfigError, match="not YAML"):
            load_agent_config(agent_file, environment={}, slot=slot)


def test_a_slots_file_that_others_may_write_is_not_believed(
    agent_file: Path, tmp_path: Path
) -> None:
    write(tmp_path / "slots.yaml", "more")
    (tmp_path / "slots.yaml").chmod(0o664)
    with pytest.raises(ConfigError, match="others than its owner may write it"):
        load_agent_config(agent_file, environment={})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_slots_file_of_another_user_is_not_believed(agent_file: Path, tmp_path: Path) -> None:
    write(tmp_path / "slots.yaml", "more")
    os.chown(tmp_path / "slots.yaml", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        load_agent_config(agent_file, environment={})
    with agent_file.open("a") as file:
        file.write("owners: {agent: [12345]}\npage_group: 0\n")
    assert len(load_agent_config(agent_file, environment={}).slots) == 2


class Running:
    """An agent's process without its loop: what it does before each beat."""

    def __init__(self, agent_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written = read_agent_config(agent_file, environment={})
        monkeypatch.setattr(agent_process, "notify", lambda _: None)
        self.process = AgentProcess(
            written, reload=lambda: read_agent_config(agent_file, environment={}), version="1"
        )
        self.node = NodeAgent(written.config, clock=MonotonicClock(), version="1")

    def beat(self) -> list[str]:
        self.process._slots_file._retry_at_s = self.process._retry_at_s = 0.0
        asyncio.run(self.process._look_for_slots(self.node))
        self.node.beat()
        return names(self.node)

    @property
    def in_force(self) -> float | None:
        return self.node.metrics.registry.get_sample_value("harvester_slots_file_in_force")


@pytest.fixture
def running(agent_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    running = Running(agent_file, monkeypatch)
    yield running
    running.node.close()


def test_the_slots_file_is_followed(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "slots.yaml"
    assert running.beat() == ["own"]
    assert running.node.slots_file_absent == str(path)
    write(path, "a", "b")
    assert running.beat() == ["own", "a", "b"]
    assert running.node.slots_file_absent == ""
    write(path, "b")
    assert running.beat() == ["own", "b"]
    assert running.in_force == 1
    path.unlink()
    assert running.beat() == ["own", "b"]
    assert running.in_force == 0
    assert running.node.slots_file_absent == "", "its last slots are in force"
    running.process._reconfigure(running.node)
    assert running.beat() == ["own"]
    assert running.in_force == 1
    assert running.node.slots_file_absent == str(path)


def test_an_agent_knows_how_long_its_discovery_has_been_silent(
    running: Running, tmp_path: Path
) -> None:
    path = tmp_path / "slots.yaml"

    def age_s() -> float | None:
        os.utime(path, (wall_seconds() - 400.0,) * 2)
        running.beat()
        found = running.node.metrics.registry.get_sample_value("harvester_slots_file_age_seconds")
        assert found == running.node.slots_file_age_s
        return found

    write(path, "a")
    assert age_s() == 0.0, "a file of another tool has nothing to say of its age"
    path.write_text(f"{DISCOVERED}: leave it\n{path.read_text()}")
    assert age_s() == pytest.approx(400.0, abs=30.0)
    path.write_text(path.read_text().replace("name: a", "name: a, modell: b"))
    assert age_s() == pytest.approx(400.0, abs=30.0)


def test_a_slots_file_that_is_configured_and_absent_is_a_silent_discovery(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "slots.yaml", VirtualClock(now_s=1000.0)
    monkeypatch.setattr(running.process, "_clock", clock)

    def age_s() -> float:
        clock.now_s += 400.0
        running.beat()
        return running.node.slots_file_age_s

    assert age_s() == 0.0
    assert [age_s(), age_s()] == [400.0, 800.0]
    write(path, "a")
    assert age_s() == 0.0
    path.write_text(f"{DISCOVERED}: leave it\n{path.read_text()}")
    assert age_s() == pytest.approx(0.0, abs=30.0)
    path.unlink()
    assert [age_s(), age_s()] == [0.0, 400.0]


def test_a_slots_file_that_cannot_be_used_leaves_the_slots_as_they_were(
    running: Running, tmp_path: Path
) -> None:
    path = tmp_path / "slots.yaml"
    write(path, "a")
    running.beat()
    path.write_text("slots: [{name: a}, {nam")
    assert running.beat() == ["own", "a"]
    assert running.beat() == ["own", "a"]
    assert running.in_force == 0
    audit = (tmp_path / "state" / "audit.jsonl").read_text()
    assert audit.count("config_refused") == 1
    write(path, "a", "c")
    assert running.beat() == ["own", "a", "c"]
    assert running.in_force == 1


def test_a_reload_is_in_force_beside_a_broken_slots_file(
    running: Running, agent_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "slots.yaml"
    write(path, "a")
    assert running.beat() == ["own", "a"]
    path.write_text("slots: [")
    with agent_file.open("a") as file:
        file.write('mode: "off"\n')
    running.process._reconfigure(running.node)
    assert {slot.policy.settings.mode for slot in running.node.slots} == {"off"}
    assert names(running.node) == ["own", "a"]
    assert running.beat() == ["own", "a"]
    assert running.in_force == 0
    write(path, "b")
    assert running.beat() == ["own", "b"]
    assert {slot.policy.settings.mode for slot in running.node.slots} == {"off"}
    assert running.in_force == 1


def test_the_agent_s_own_file_counts_where_both_have_a_slot(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "slots.yaml", "own", "a", model="m")
    assert running.beat() == ["own", "a"]
    assert [slot.config.model for slot in running.node.slots] == ["", "m"]
    assert "slot own of the slots file is the agent's own file's" in caplog.text


def test_a_slot_on_pages_of_the_agent_s_own_leaves_the_others_theirs(
    running: Running, agent_file: Path, tmp_path: Path
) -> None:
    pages = tmp_path / "pages" / "chat"
    agent_file.write_text(
        agent_file.read_text().replace("- name: own", f"- name: own\n  pages: {pages}")
    )
    running.process._reconfigure(running.node)
    write(tmp_path / "slots.yaml", "chat", "b")
    assert running.beat() == ["own", "b"]
    assert running.in_force == 1


def test_a_reload_while_the_slots_file_is_read_is_not_undone_by_it(
    running: Running, agent_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slots.yaml"
    write(path, "a")
    read = agent_process.read_slots_file

    def overtaken(*given: Any, **named: Any) -> Any:
        found = read(*given, **named)
        monkeypatch.setattr(agent_process, "read_slots_file", read)
        with agent_file.open("a") as file:
            file.write('mode: "off"\n')
        path.write_text("slots: [")
        running.process._reconfigure(running.node)
        write(path, "b")
        return found

    monkeypatch.setattr(agent_process, "read_slots_file", overtaken)
    assert running.beat() == ["own"]
    assert running.in_force == 0
    assert running.beat() == ["own", "b"]
    assert running.in_force == 1
    assert {slot.policy.settings.mode for slot in running.node.slots} == {"off"}


def test_a_mistake_of_ours_beside_a_slots_file_is_a_fault_that_passes(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "slots.yaml", "a")
    with monkeypatch.context() as broken:
        broken.setattr(NodeAgent, "reconfigure", lambda *_, **__: {}["mistake"])
        assert running.beat() == ["own"]
        assert running.in_force == 0
    assert running.beat() == ["own", "a"]
    assert running.in_force == 1


def test_a_slots_file_that_is_no_file_is_not_waited_for(running: Running, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slots.yaml")
    assert running.beat() == ["own"]
    assert running.in_force == 0
    (tmp_path / "slots.yaml").unlink()
    (tmp_path / "slots.yaml").mkdir()
    assert running.beat() == ["own"]
    assert running.in_force == 0


def test_a_slots_file_that_cannot_be_looked_at_is_a_fault(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def refused(path: Path, **named: Any) -> os.stat_result:
        if path.name == "slots.yaml":
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **named)

    monkeypatch.setattr(Path, "stat", refused)
    assert running.beat() == ["own"]
    assert running.in_force == 0


def test_a_slot_that_waits_is_noted_once(running: Running, tmp_path: Path) -> None:
    another = NodeAgent(
        with_slots(running.node.slots.config, "a").model_copy(update={"state_dir": tmp_path / "b"}),
        clock=MonotonicClock(),
        version="1",
    )
    write(tmp_path / "slots.yaml", "a", "b")
    for _ in range(5):
        assert running.beat() == ["own", "b"]
    assert running.in_force == 0
    audit = (tmp_path / "state" / "audit.jsonl").read_text()
    assert audit.count("config_reloaded") == 1
    another.close()
    assert running.beat() == ["own", "a", "b"]
    assert running.in_force == 1


def test_a_slot_of_a_reload_that_cannot_be_opened_is_tried_again(
    running: Running, agent_file: Path, tmp_path: Path
) -> None:
    another = NodeAgent(
        with_slots(running.node.slots.config, "late").model_copy(
            update={"state_dir": tmp_path / "b"}
        ),
        clock=MonotonicClock(),
        version="1",
    )
    agent_file.write_text(
        agent_file.read_text().replace("- name: own", "- name: own\n- name: late")
    )
    running.process._reconfigure(running.node)
    assert running.beat() == ["own"]
    assert running.in_force == 0
    another.close()
    assert running.beat() == ["own", "late"]
    assert running.in_force == 1


def test_an_edited_agent_file_is_not_in_force_because_the_slots_file_changed(
    running: Running, agent_file: Path, tmp_path: Path
) -> None:
    with agent_file.open("a") as file:
        file.write("mode: harvest\n")
    write(tmp_path / "slots.yaml", "a")
    assert running.beat() == ["own", "a"]
    assert {slot.policy.settings.mode for slot in running.node.slots} == {"observe"}
    running.process._reconfigure(running.node)
    assert names(running.node) == ["own", "a"]
    assert {slot.policy.settings.mode for slot in running.node.slots} == {"harvest"}


def test_a_slots_file_hides_no_reload_that_was_refused(
    running: Running, agent_file: Path, tmp_path: Path
) -> None:
    def successful() -> float | None:
        registry = running.node.metrics.registry
        return registry.get_sample_value("harvester_config_last_reload_successful")

    good = agent_file.read_text()
    agent_file.write_text("mode: sometimes\n")
    running.process._reconfigure(running.node)
    write(tmp_path / "slots.yaml", "a")
    assert running.beat() == ["own", "a"]
    assert successful() == 0
    (refused,) = running.node.refused.values()
    assert "line 1: mode: Input should be" in refused
    agent_file.write_text(good)
    running.process._reconfigure(running.node)
    assert successful() == 1
    assert running.node.refused == {}


def test_a_refused_slots_file_is_named_until_it_is_good_again(
    running: Running, tmp_path: Path
) -> None:
    path = tmp_path / "slots.yaml"
    for by_signal in (False, True):
        path.write_text("slots: [{name: a}, {nam")
        running.beat()
        # A good reload of the agent's own file hides no slots file that is refused.
        running.process._reconfigure(running.node)
        assert running.node.refused.keys() == {f"slots file {path}"}
        write(path, "a")
        if by_signal:
            running.process._reconfigure(running.node)
        else:
            running.beat()
        assert running.node.refused == {}


def test_probes_run_for_the_slots_that_are_there(running: Running, tmp_path: Path) -> None:
    async def probed() -> None:
        write(tmp_path / "slots.yaml", "a", metrics_url="http://127.0.0.1:9/metrics")
        await running.process._look_for_slots(running.node)
        process, (own, more) = running.process, running.node.slots
        process._probe(running.node.slots)
        assert {slot: len(tasks) for slot, tasks in process._probes.items()} == {own: 1, more: 2}
        gone = process._probes[more]
        write(tmp_path / "slots.yaml", "b")
        await running.process._look_for_slots(running.node)
        process._probe(running.node.slots)
        await asyncio.gather(*gone, return_exceptions=True)
        assert [task.cancelled() for task in gone] == [True, True]
        assert {slot.name for slot in process._probes} == {"own", "b"}
        process._probe(())
        await asyncio.sleep(0)

    asyncio.run(probed())


def test_a_slots_file_is_read_on_a_change_and_again_while_it_cannot_be_used(
    tmp_path: Path,
) -> None:
    path = tmp_path / "slots.yaml"
    watch = SlotsWatch(path)
    assert watch.due(now=0.0)  # It may be there and not be readable.
    watch.taken()
    assert not watch.due(now=0.5)
    path.write_text("slots: []")
    assert watch.due(now=1.5)
    watch.taken()
    assert not watch.due(now=100.0)
    path.write_text("slots: [a]")
    assert watch.due(now=102.0)
    assert watch.failed("no")
    assert not watch.due(now=104.0)
    assert watch.due(now=112.0)
    assert not watch.failed("no")
    assert not watch.in_force
    assert watch.due(now=125.0)
    watch.taken()
    assert not watch.due(now=150.0)
    path.unlink()
    assert watch.due(now=151.0)
