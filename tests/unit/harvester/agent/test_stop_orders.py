"""The agent under orders to stop: file, call and configuration, over restarts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.agent import operator_files
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.config_file import load_agent_config
from harvester.contracts.audit import AuditEvent, read_audit
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.journal import read_journal
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import LeaseGranted, LeaseRefused, LeaseRenewal, LeaseRequest
from harvester.contracts.wire.stops import (
    Stop,
    StopOrder,
    StopReply,
    StopRequest,
    StopSource,
)
from tests.virtual_clock import VirtualClock

SLOTS = ("slot0", "slot1")


class Node:
    """Two slots that may be leased, and an agent in virtual time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = AgentConfig.model_validate(
            {
                "mode": "harvest",
                "page_root": root / "pages",
                "state_dir": root / "state",
                "slots": [
                    {"name": name, "policy": {"proof": {"share_ratio": 0.0}}} for name in SLOTS
                ],
            }
        )
        self.file = root / "pages" / "stop"
        self.clock = VirtualClock(now_s=100.0)
        self.pages = {name: PageDirectory.create(root / "pages" / name) for name in SLOTS}
        for pages in self.pages.values():
            pulse = Pulse(model_samples=1000)
            pages.pulse_writer("prod", 0).write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)
        self.guests = {name: pages.guest_page() for name, pages in self.pages.items()}
        self.guest(running=1)
        self.start()
        self.beats(5)

    def start(self, **changes: Any) -> None:
        config = self.config.model_copy(update=changes)
        self.agent = NodeAgent(config, clock=self.clock, version="1")

    def guest(self, **fields: Any) -> None:
        for page in self.guests.values():
            page.keep()
            page.write(Guest(**fields), now_ns=monotonic_ns(), ttl_ns=10**11)

    def beats(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance_to(self.clock.now_s + 0.1)
            self.agent.beat()

    def restart(self, **changes: Any) -> None:
        """Ends the agent as a signal does: nothing is drained."""
        self.kill()
        self.start(**changes)
        self.beats(5)

    def kill(self) -> None:
        self.agent.audit.close()
        self.agent._lock.close()
        for slot in self.agent.slots:
            slot._record.close()
            slot._grant_page.close()
            slot.sensor.close()

    def order(self, order: StopOrder, **more: Any) -> StopReply:
        reason = more.pop("reason", "driver update")
        request = StopRequest(order=order, by="alice", reason=reason, **more)
        return self.agent.order(request)

    def take(self, slot: str = "slot0", tenant: str = "t") -> LeaseGranted | LeaseRefused:
        self._requests = getattr(self, "_requests", 0) + 1
        return self.agent.take(
            LeaseRequest(
                request_id=f"r{self._requests}",
                slot=SlotId(slot),
                tenant=TenantId(tenant),
                job=JobId("j"),
                duration_s=10.0,
            )
        )

    def leased(self, slot: str = "slot0") -> bool:
        return self.agent.leases.live(SlotId(slot)) is not None

    def grant(self, slot: str = "slot0") -> Any:
        return self.pages[slot].grant_reader().read().record

    def metric(self, name: str, **labels: str) -> float | None:
        self.agent.refresh_metrics()
        return self.agent.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.agent.close()


def test_a_drain_of_the_node_ends_leases_before_it_answers(node: Node) -> None:
    assert isinstance(node.take("slot0"), LeaseGranted)
    assert isinstance(node.take("slot1"), LeaseGranted)
    reply = node.order(StopOrder.DRAIN)
    assert reply.recorded
    assert not node.leased("slot0")
    assert not node.leased("slot1")
    refused = node.take()
    assert isinstance(refused, LeaseRefused)
    assert "driver update" in refused.reason


def test_a_drain_of_one_slot_leaves_the_other(node: Node) -> None:
    node.take("slot0")
    node.take("slot1")
    node.order(StopOrder.DRAIN, slot="slot1")
    assert (node.leased("slot0"), node.leased("slot1")) == (True, False)


def test_a_drain_of_a_tenant_ends_its_leases_and_others_may_lease(node: Node) -> None:
    node.take("slot0", tenant="a")
    node.take("slot1", tenant="b")
    node.order(StopOrder.DRAIN, tenant="a")
    assert (node.leased("slot0"), node.leased("slot1")) == (False, True)
    node.beats(2)
    assert isinstance(node.take("slot0", tenant="a"), LeaseRefused)
    assert isinstance(node.take("slot0", tenant="c"), LeaseGranted)


def test_a_hold_waits_for_running_turns_and_admits_no_lease(node: Node) -> None:
    granted = node.take()
    assert isinstance(granted, LeaseGranted)
    node.order(StopOrder.HOLD)
    assert isinstance(node.take("slot1"), LeaseRefused)
    for _ in range(3):
        node.beats(50)
        renewal = LeaseRenewal(epoch=granted.epoch, duration_s=10.0)
        answer = node.agent.leases.renew(granted.lease, renewal, now=node.clock.now())
        assert isinstance(answer, LeaseGranted)
    assert (node.grant().mode, node.grant().held) == ("open", True)
    node.guest()
    node.beats(20)
    assert not node.leased()


@pytest.mark.parametrize("order", [StopOrder.NONE, StopOrder.HOLD])
def test_with_the_scheduler_dead_a_lease_ends_within_its_time(node: Node, order: StopOrder) -> None:
    granted = node.take()
    assert isinstance(granted, LeaseGranted)
    if order is not StopOrder.NONE:
        node.order(order)
    node.beats(99)
    assert node.leased()
    node.beats(2)
    assert not node.leased()
    assert node.grant().mode == "closed"
    assert node.grant().epoch > granted.epoch


@pytest.mark.parametrize(
    ("text", "order", "reason"),
    [
        ("hold new driver\n", "hold", "new driver"),
        ("HoldAndDrain\n", "drain", ""),
        ("Hold", "hold", ""),
        ("hold\nnew driver\n", "hold", "new driver"),
        ("hold\tnew driver", "hold", "new driver"),
        ("hold \x1b[2Jnew\nrack", "hold", "[2Jnew rack"),
        ("", "drain", "stop is empty: known are none, hold, drain, None, Hold, HoldAndDrain"),
        ("\x00\xff", "drain", "stop has 'ÿ': known are none, "),
        ("halt everything", "drain", "stop has 'halt everything': known are none, "),
    ],
)
def test_the_stop_file_is_obeyed_within_a_beat(
    node: Node, text: str, order: str, reason: str
) -> None:
    node.file.write_text(text)
    os.utime(node.file, (0, 0))
    node.beats(1)
    (stop,) = node.agent.stops.stops
    assert (stop.order, stop.source) == (order, "file")
    assert reason in stop.reason
    assert stop.by
    assert stop.at
    assert node.metric("harvester_slot_stopped", slot="slot0", order=order) == 1.0
    node.file.unlink()
    node.beats(1)
    assert node.agent.stops.stops == ()
    assert node.metric("harvester_slot_stopped", slot="slot0", order=order) == 0.0


def test_a_stop_file_that_is_not_yet_written_holds_and_drains_where_it_stays_empty(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    age_s = 0.05
    monkeypatch.setattr(operator_files, "wall_seconds", lambda: node.file.stat().st_mtime + age_s)
    node.take()
    node.file.write_text("")
    node.beats(1)
    assert [stop.order for stop in node.agent.stops.stops] == ["hold"]
    assert node.leased()
    age_s = 0.15
    node.beats(1)
    assert [stop.order for stop in node.agent.stops.stops] == ["drain"]
    assert not node.leased()


def test_a_stop_file_that_lifts_is_no_order(node: Node) -> None:
    node.order(StopOrder.HOLD)
    node.file.write_text("none")
    node.beats(1)
    assert [stop.source for stop in node.agent.stops.stops] == ["operator"]


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_a_path_that_is_no_file_drains_and_never_hangs_the_beat(node: Node, kind: str) -> None:
    if kind == "directory":
        node.file.mkdir()
    elif kind == "link":
        elsewhere = node.root / "elsewhere"
        elsewhere.write_text("none")
        node.file.symlink_to(elsewhere)
    else:
        os.mkfifo(node.file)
    node.beats(1)
    assert [stop.order for stop in node.agent.stops.stops] == ["drain"]


@pytest.mark.parametrize("seconds", [10**14, -(10**14)])
def test_a_stop_file_of_any_time_is_obeyed(
    node: Node, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    # The file system of the tests may know no such time.
    node.file.write_text("hold new driver")
    found = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: timed(found(file), seconds))
    node.beats(1)
    assert [(stop.order, stop.at) for stop in node.agent.stops.stops] == [("hold", "")]


def timed(status: Any, seconds: int) -> Any:
    return type(status)((*tuple(status)[:8], seconds, seconds), {"st_mtime": seconds})


def audited(node: Node) -> list[tuple[str, str]]:
    path = node.root / "state" / "audit.jsonl"
    events = [each for each in read_audit(path) if isinstance(each, AuditEvent)]
    return [(one.event, one.reason) for one in events if one.event.startswith("stop_")]


def test_the_audit_s_last_line_of_a_scope_is_the_order_in_force(node: Node) -> None:
    for number, order in enumerate((StopOrder.HOLD, StopOrder.DRAIN, StopOrder.DRAIN)):
        node.order(order, cluster=True, number=number)
    assert audited(node) == [
        ("stop_placed", "hold (cluster): driver update"),
        ("stop_lifted", "hold (cluster): driver update"),
        ("stop_placed", "drain (cluster): driver update"),
    ]


@pytest.mark.parametrize("source", [StopSource.INTERLOCK, StopSource.CLUSTER])
def test_many_orders_of_one_source_hide_none_of_another_from_the_audit(
    node: Node, source: StopSource
) -> None:
    node.order(StopOrder.DRAIN)
    audit = node.agent._stop_audit
    for number in range(200):
        flaps = Stop(order=StopOrder.HOLD, source=source, reason=str(number))
        audit.observe((*node.agent.stops.stops, flaps), caller="", now=node.clock.now_s)
    node.order(StopOrder.NONE)
    assert audited(node)[-1] == ("stop_lifted", "drain (operator): driver update")


def test_a_drain_ends_leases_beside_a_kill_file_that_keeps_them(node: Node) -> None:
    assert isinstance(node.take("slot0"), LeaseGranted)
    (node.root / "pages" / "kill").write_text("hold")
    node.beats(1)
    assert node.leased()
    node.order(StopOrder.DRAIN)
    assert not node.leased()


def test_a_stop_survives_a_restart_with_its_author_and_reason(node: Node) -> None:
    node.order(StopOrder.HOLD, slot="slot1")
    node.order(StopOrder.DRAIN, tenant="t")
    before = node.agent.stops.stops
    node.restart()
    assert node.agent.stops.stops == before
    assert {stop.by for stop in before} == {"alice"}
    assert isinstance(node.take("slot1", tenant="other"), LeaseRefused)
    node.order(StopOrder.NONE, slot="slot1")
    node.restart()
    assert [stop.tenant for stop in node.agent.stops.stops] == ["t"]


def test_a_table_that_cannot_be_believed_drains_until_an_operator_resumes(node: Node) -> None:
    node.order(StopOrder.HOLD)
    path = node.root / "state" / "stops.json"
    path.write_bytes(path.read_bytes()[:20])
    node.restart()
    assert [stop.order for stop in node.agent.stops.stops] == ["drain"]
    node.order(StopOrder.NONE)
    node.restart()
    assert node.agent.stops.stops == ()


def test_a_stop_that_cannot_be_recorded_is_in_force_and_one_that_stays_recorded_too(
    node: Node,
) -> None:
    in_the_way = node.root / "state" / ".tmp-stops.json"
    in_the_way.mkdir()
    assert not node.order(StopOrder.DRAIN).recorded
    assert isinstance(node.take(), LeaseRefused)
    in_the_way.rmdir()
    node.beats(15)
    in_the_way.mkdir()
    with pytest.raises(Exhausted, match="stays"):
        node.order(StopOrder.NONE)
    node.beats(2)
    assert isinstance(node.take(), LeaseRefused)
    in_the_way.rmdir()
    node.restart()
    assert [stop.order for stop in node.agent.stops.stops] == ["drain"]


def test_the_strongest_of_file_call_and_configuration_binds_and_each_lifts_its_own(
    node: Node,
) -> None:
    node.restart(stop=StopOrder.HOLD)
    node.file.write_text("drain fire")
    node.order(StopOrder.HOLD)
    node.beats(1)
    (offer, _) = [slot.offer() for slot in node.agent.slots]
    assert (offer.stop.order, offer.stop.source) == ("drain", "file")
    node.order(StopOrder.NONE)
    assert {stop.source for stop in node.agent.stops.stops} == {"file", "config"}
    node.file.unlink()
    node.beats(1)
    assert [(s.order, s.source) for s in node.agent.stops.stops] == [("hold", "config")]
    node.agent.reconfigure(node.config)
    node.beats(20)  # The quiet time after the restart.
    assert isinstance(node.take(), LeaseGranted)


def test_a_reload_stops_one_slot(node: Node) -> None:
    slots = (
        node.config.slots[0].model_copy(update={"stop": StopOrder.DRAIN}),
        node.config.slots[1],
    )
    done = node.agent.reconfigure(node.config.model_copy(update={"slots": slots}))
    assert done.restart_needed == ()
    node.beats(1)
    assert isinstance(node.take("slot0"), LeaseRefused)
    assert isinstance(node.take("slot1"), LeaseGranted)


def test_the_journal_has_the_order_its_author_and_the_end_of_the_lease(node: Node) -> None:
    node.take()
    node.order(StopOrder.DRAIN)
    lines = read_journal(node.root / "state" / "slot0.journal")
    told = next(line for line in map(msgspec.to_builtins, lines) if "end_lease" in str(line))
    stop = told["sample"]["stop"]
    assert (stop["order"], stop["by"], stop["reason"]) == ("drain", "alice", "driver update")


def test_metrics_say_who_when_and_why(node: Node) -> None:
    stop = node.order(StopOrder.HOLD, tenant="a").in_force
    assert stop is not None
    labels = {"slot": "", "tenant": "a", "order": "hold", "source": "operator", "by": "alice"}
    said = node.metric("harvester_stop_info", reason="driver update", at=stop.at, **labels)
    assert said == 1.0
    node.order(StopOrder.NONE, tenant="a")
    assert node.metric("harvester_stop_info", reason="driver update", at=stop.at, **labels) is None


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"slot": "slot9"}, "no slot slot9"),
        ({"slot": "../../etc"}, "slot"),
        ({"tenant": "a b"}, "tenant"),
        ({"slot": "slot0", "tenant": "a"}, "neither"),
        ({"reason": " "}, "reason"),
        ({"reason": "a\nb"}, "printable"),
        ({"reason": "\x1b[2J"}, "printable"),
    ],
)
def test_an_order_that_no_one_can_obey_is_refused(
    node: Node, fields: dict[str, Any], fault: str
) -> None:
    with pytest.raises(PeerProtocolError, match=fault):
        node.order(StopOrder.HOLD, **fields)
    assert node.agent.stops.stops == ()


def test_the_configuration_names_a_wrong_order_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("slots: [{name: s}]\nstop: halt\n")
    with pytest.raises(ConfigError, match=r"line 2.*halt.*HoldAndDrain"):
        load_agent_config(path)
    path.write_text("stop: HoldAndDrain\nslots: [{name: s, stop: Hold}, {name: t, stop: None}]\n")
    config = load_agent_config(path)
    assert (config.stop, *(slot.stop for slot in config.slots)) == ("drain", "hold", "none")
