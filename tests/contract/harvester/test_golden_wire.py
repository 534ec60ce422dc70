"""The bytes that agent, scheduler and old journals agree on: fields are added, never renamed."""

from typing import Any

import msgspec
import pytest

from harvester.contracts.ids import Epoch, JobId, LeaseId, NodeId, SlotId, TenantId
from harvester.contracts.page import Guest, PageFault
from harvester.contracts.process import ProcessId
from harvester.contracts.served import Served
from harvester.contracts.wire.engines import EngineDescription, EngineReport
from harvester.contracts.wire.error_budget import Allotment, BudgetReport
from harvester.contracts.wire.leases import (
    EndReason,
    IdleForecast,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotOffer,
    SlotOffers,
    SlotState,
)
from harvester.contracts.wire.stops import Stop, StopOrder, StopReply, StopRequest, StopSource
from harvester.policy.effects import EndLease, KillGuest, LiftGuest, Quarantine, SettleGuest
from harvester.policy.sample import GuestReading, KillSwitch, LeaseView, PulseReading, SlotSample

GOLDEN: list[tuple[msgspec.Struct, bytes]] = [
    (
        LeaseRequest(
            request_id="r",
            slot=SlotId("s"),
            tenant=TenantId("t"),
            job=JobId("j"),
            duration_s=10.0,
        ),
        b'{"request_id":"r","slot":"s","tenant":"t","job":"j","duration_s":10.0}',
    ),
    (LeaseRenewal(epoch=Epoch(2), duration_s=10.0), b'{"epoch":2,"duration_s":10.0}'),
    (
        LeaseRenewal(
            epoch=Epoch(2),
            duration_s=10.0,
            allotment=Allotment(number=3, misses=1.5, budget=10.0, spent=0.5),
        ),
        (
            b'{"epoch":2,"duration_s":10.0,"allotment":{"number":3,"misses":1.5,"budget":10.0,'
            b'"spent":0.5,"known_s":0.0}}'
        ),
    ),
    (
        BudgetReport(
            service="m",
            life="l",
            run=1,
            served=Served(requests=2.0),
            charged=0.5,
            allowed_ratio=0.001,
            minimum_misses=10.0,
        ),
        (
            b'{"service":"m","life":"l","run":1,"served":{"requests":2.0,"misses":0.0,"granted":0.0,'
            b'"granted_misses":0.0,"granted_beats":0.0,"granted_late_beats":0.0,"withheld":0.0,'
            b'"withheld_misses":0.0,"withheld_beats":0.0,"withheld_late_beats":0.0},"charged":0.5,'
            b'"number":0,"limit":null,"allowed_ratio":0.001,"minimum_misses":10.0,"allotment":null}'
        ),
    ),
    (
        LeaseGranted(lease=LeaseId("l"), slot=SlotId("s"), epoch=Epoch(2), duration_s=9.5),
        b'{"type":"granted","lease":"l","slot":"s","epoch":2,"duration_s":9.5}',
    ),
    (
        LeaseGranted(
            lease=LeaseId("l"),
            slot=SlotId("s"),
            epoch=Epoch(2),
            duration_s=9.5,
            forecasts=(
                IdleForecast(horizon_s=10.0, low_ratio=0.25, median_ratio=0.5, high_ratio=1.0),
            ),
        ),
        (
            b'{"type":"granted","lease":"l","slot":"s","epoch":2,"duration_s":9.5,"forecasts":'
            b'[{"horizon_s":10.0,"low_ratio":0.25,"median_ratio":0.5,"high_ratio":1.0}]}'
        ),
    ),
    (
        LeaseRefused(slot=SlotId("s"), reason="why", retry_after_s=1.0),
        b'{"type":"refused","slot":"s","reason":"why","retry_after_s":1.0}',
    ),
    (
        LeaseEnded(lease=LeaseId("l"), reason=EndReason.KILL_SWITCH, deadline_s=3.0),
        b'{"type":"ended","lease":"l","reason":"kill_switch","deadline_s":3.0}',
    ),
    (
        SlotOffers(
            node=NodeId("n"),
            slots=(
                SlotOffer(
                    slot=SlotId("s"),
                    node=NodeId("n"),
                    state=SlotState.OFFERED,
                    engine_url="u",
                    model="m",
                    epoch=Epoch(1),
                    concurrency=16,
                    kv_tokens=4096,
                    idle_ratio=None,
                ),
            ),
        ),
        (
            b'{"node":"n","slots":[{"slot":"s","node":"n","state":"offered","engine_url":"u",'
            b'"model":"m","epoch":1,"concurrency":16,"kv_tokens":4096,"idle_ratio":null,"reason":"",'
            b'"isolation":"","floor_bytes":0,"tenant":"","job":"","engine":{"model":"","architecture":"",'
            b'"context_tokens":0,"vocabulary":0,"dtype":"","logprobs_mode":"","features":[]},"guards":[],'
            b'"lending":{"tokens":0,"share_ratio":0.0,"reason":""},"headroom_ratio":null,"headroom_age_s":null,"budget":null,'
            b'"mode":"","slot_state":"","ttft_s":null,"itl_s":null,"guest_tokens_total":0,"stop":null,'
            b'"forecasts":[],"unready":"","withheld_ratio":0.0,"proving_left_s":0.0}],'
            b'"restart_needed":[],"stops":[],"unopened":{},"config_refused":"","slots_file_age_s":0.0,'
            b'"audit_fault":"","kill_file_fault":"","slots_file_absent":""}'
        ),
    ),
    (
        EngineReport(
            identity="a.1",
            description=EngineDescription(
                model="m",
                architecture="A",
                context_tokens=4096,
                vocabulary=512,
                dtype="bfloat16",
                logprobs_mode="processed_logprobs",
                features=("lora",),
            ),
            slot="s",
        ),
        (
            b'{"identity":"a.1","description":{"model":"m","architecture":"A",'
            b'"context_tokens":4096,"vocabulary":512,"dtype":"bfloat16",'
            b'"logprobs_mode":"processed_logprobs","features":["lora"]},"slot":"s"}'
        ),
    ),
    (
        EndLease(lease="l", reason=EndReason.BUDGET),
        b'{"type":"end_lease","lease":"l","reason":"budget","deadline_s":0.0}',
    ),
    (
        StopRequest(order=StopOrder.HOLD, slot="s", by="a", reason="r"),
        b'{"order":"hold","slot":"s","by":"a","reason":"r"}',
    ),
    (
        StopReply(
            in_force=Stop(
                order=StopOrder.DRAIN, source=StopSource.CLUSTER, tenant="t", at="2026", number=2
            )
        ),
        (
            b'{"in_force":{"order":"drain","source":"cluster","slot":"","tenant":"t","by":"",'
            b'"reason":"","at":"2026","number":2},"recorded":true,'
            b'"lifted":true,"reached":null,"tenants":null,"left":null}'
        ),
    ),
    (Quarantine(reason="why"), b'{"type":"quarantine","reason":"why"}'),
    (
        SlotSample(
            pulses=(PulseReading(name="pulse.p.0", fault=PageFault.EXPIRED),),
            guest=GuestReading(fault=PageFault.MISSING),
            lease=LeaseView(epoch=Epoch(3), lease="l"),
            kill_switch=KillSwitch.HOLD,
        ),
        (
            b'{"type":"slot","pulses":[{"name":"pulse.p.0","record":null,"fault":"expired"}],'
            b'"guest":{"record":null,"fault":"missing","lives_below":false,"lives":false},'
            b'"lease":{"epoch":3,"lease":"l","ending":false,"tenant":"","job":"","allotment":null},'
            b'"kill_switch":"hold","stop":null,"memory":null,'
            b'"mps":null,"guest_kv":null,"outcomes":[],"record_fault":"","release":""}'
        ),
    ),
    (
        LiftGuest(processes=(ProcessId(pid=4, start_ticks=9),), reason="why"),
        b'{"type":"lift_guest","processes":[{"pid":4,"start_ticks":9}],"reason":"why"}',
    ),
    (SettleGuest(reason="why"), b'{"type":"settle_guest","reason":"why"}'),
    (
        KillGuest(processes=(), reason="why"),
        b'{"type":"kill_guest","processes":[],"reason":"why"}',
    ),
]


@pytest.mark.parametrize(("value", "wire"), GOLDEN, ids=[type(v).__name__ for v, _ in GOLDEN])
def test_writes_and_reads_the_agreed_bytes(value: Any, wire: bytes) -> None:
    assert msgspec.json.encode(value) == wire
    assert msgspec.json.decode(wire, type=type(value)) == value


def test_an_offer_from_an_older_agent_is_of_an_unknown_engine() -> None:
    (_, wire), *_ = [each for each in GOLDEN if isinstance(each[0], SlotOffers)]
    older = wire[: wire.index(b',"engine"')] + b"}]}"
    (offer,) = msgspec.json.decode(older, type=SlotOffers).slots
    assert offer.engine == EngineDescription()


def test_a_reply_from_a_newer_agent_with_another_field_is_read() -> None:
    wire = b'{"type":"granted","lease":"l","slot":"s","epoch":2,"duration_s":9.5,"later":1}'
    assert msgspec.json.decode(wire, type=LeaseGranted).epoch == 2


def test_a_sample_of_an_older_journal_is_read_with_todays_defaults() -> None:
    record = msgspec.json.decode(b'{"epoch":1}', type=Guest)
    assert (record.epoch, record.gate) == (1, "closed")
    wire = (
        b'{"type":"slot","pulses":[],"guest":{"record":null,"fault":"missing"},'
        b'"lease":{"epoch":3,"lease":"l","ending":false},"kill_switch":"hold"}'
    )
    assert msgspec.json.decode(wire, type=SlotSample).memory is None
