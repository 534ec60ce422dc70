"""Metrics of a guest that shares an accelerator."""

import math
from typing import Any

import msgspec
import pytest

from harvester.agent import exposition
from harvester.agent.exposition import SlotExposition
from harvester.agent.metrics import AgentMetrics
from harvester.contracts.page import Guest, GuestMemory, PageFault
from harvester.contracts.process import ProcessId
from harvester.policy.sample import KvReading, MemoryReading, MpsReading, PulseReading

GUEST = Guest(processes=(ProcessId(pid=41, start_ticks=1),), isolation="mps")


@pytest.fixture
def scene(make_scene: Any) -> Any:
    scene = make_scene(blocking_ratio=0.3)
    scene.guest = GUEST
    return scene


@pytest.fixture
def value(scene: Any) -> Any:
    metrics = AgentMetrics(version="1")
    exposition = SlotExposition("slot0", metrics, tenants=())

    def value(name: str, **labels: str) -> float:
        effects = scene.beat()
        exposition.observe(scene.sample(), effects, scene.policy, None)
        exposition.refresh(scene.policy, {})
        labels["slot"] = "slot0"
        found = metrics.registry.get_sample_value(f"harvester_{name}", labels)
        assert found is not None
        return found

    return value


@pytest.mark.parametrize(
    ("mps", "state", "in_force"),
    [
        (None, "", 0.3),
        (MpsReading(clients=((7, 41),)), "together", 0.3),
        (MpsReading(clients=((7,), (41,))), "apart", 1.0),
        (MpsReading(fault="no MPS daemon answers"), "silent", 1.0),
        (MpsReading(clients=((7, 41),), server_fault=True), "fault", 0.3),
    ],
)
def test_the_daemon_s_reply_is_one_state_and_the_ratio_in_force_follows(
    mps: MpsReading | None, state: str, in_force: float, scene: Any, value: Any
) -> None:
    scene.mps = mps
    states = ("together", "apart", "fault", "silent")
    assert [one for one in states if value("mps_state", state=one)] == [state] * bool(state)
    assert value("blocking_ratio", kind="configured") == 0.3
    assert value("blocking_ratio", kind="in_force") == in_force


def test_isolation_is_what_the_guest_says(scene: Any, value: Any) -> None:
    assert value("guest_isolation", backend="mps") == 1
    assert value("guest_isolation", backend="time-slicing") == 0
    scene.guest = None
    assert value("guest_isolation", backend="mps") == 0
    assert math.isnan(value("guest_weights_away"))
    scene.guest = Guest(isolation="time-slicing", weights_away=True)
    assert value("guest_isolation", backend="time-slicing") == 1
    assert value("guest_weights_away") == 1


def test_a_sleeping_guest_s_bound_is_exported_where_it_is_known(scene: Any, value: Any) -> None:
    scene.guest = Guest(weights_away=True, memory=GuestMemory(other_bytes=2, whole=True))
    assert math.isnan(value("guest_asleep_bytes_max"))
    scene.guest = Guest(weights_away=True, memory=GuestMemory(other_bytes=2, asleep_bytes_max=3))
    assert value("guest_asleep_bytes_max") == 3


def test_memory_that_is_not_known_is_no_number(scene: Any, value: Any) -> None:
    assert math.isnan(value("guest_memory_bytes", part="weights"))
    assert math.isnan(value("shared_memory_bytes", part="used"))
    scene.guest = Guest(memory=GuestMemory(weights_bytes=3, other_bytes=2, kv_bytes=8))
    scene.memory = MemoryReading(used_bytes=20, limit_bytes=40)
    scene.guest_kv = KvReading(mapped_bytes=7, limit_bytes=8)
    assert value("guest_memory_bytes", part="context") == 2
    sizes = [value("shared_memory_bytes", part=part) for part in ("used", "limit", "guest")]
    assert [*sizes, value("shared_memory_bytes", part="guest_limit")] == [20, 40, 7, 8]
    scene.memory, scene.guest_kv = MemoryReading(), KvReading(fault="no segment")
    assert math.isnan(value("shared_memory_bytes", part="limit"))
    assert math.isnan(value("shared_memory_bytes", part="guest"))


@pytest.mark.parametrize(
    ("guest", "holds"),
    [
        (Guest(isolation="idle-group", blocking_ratio=0.02), 1.0),
        (Guest(isolation="idle", isolation_fault="production moved"), 0.0),
        (Guest(isolation="time-slicing"), math.nan),
        (None, math.nan),
    ],
)
def test_whether_an_isolation_holds_is_known_of_those_that_promise_anything(
    guest: Guest | None, holds: float, scene: Any, value: Any
) -> None:
    scene.guest = guest
    assert value("guest_isolation_holds") == pytest.approx(holds, nan_ok=True)


def test_the_guest_s_decision_is_not_a_configured_number(make_scene: Any) -> None:
    scene, metrics = make_scene(), AgentMetrics(version="1")
    SlotExposition("slot0", metrics, tenants=()).refresh(scene.policy, {})
    found = metrics.registry.get_sample_value(
        "harvester_blocking_ratio", {"slot": "slot0", "kind": "configured"}
    )
    assert found is not None
    assert math.isnan(found)


def test_headroom_is_as_old_as_production_s_last_latency(
    scene: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [10**12]
    monkeypatch.setattr(exposition, "monotonic_ns", lambda: now_ns[0])
    slow = {"ttft_s_recent": (9.0,) * 32, "samples_total": 32}
    scene.set_pulse(**slow)
    # A restarted agent finds latencies of unknown age.
    assert math.isnan(value("slo_headroom_ratio", slo="ttft"))
    assert math.isnan(value("headroom_age_seconds", slo="ttft"))
    scene.set_pulse(**slow | {"samples_total": 33})
    assert value("slo_headroom_ratio", slo="ttft") < 0
    now_ns[0] += 299 * 10**9
    assert value("slo_headroom_ratio", slo="ttft") < 0
    assert value("headroom_age_seconds", slo="ttft") == 299
    now_ns[0] += 2 * 10**9
    assert math.isnan(value("slo_headroom_ratio", slo="ttft"))
    assert value("headroom_age_seconds", slo="ttft") == 301


def test_counts_requests_that_ended_early_without_a_first_token(scene: Any, value: Any) -> None:
    assert value("unanswered_requests_total") == 0
    scene.set_pulse(unanswered_s_recent=(0.1, 0.9), unanswered_total=2)
    assert value("unanswered_requests_total") == 1, "the other one is a miss"
    assert value("requests_total") == 1


def test_a_count_that_fell_fails_once_and_not_for_ever(
    scene: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value("requests_total") == 0
    monkeypatch.setattr(type(scene.policy), "accounted", (5.0, -1e-9, 0.0))
    with pytest.raises(ValueError, match="non-negative"):
        value("requests_total")
    assert value("requests_total") == 5


def test_a_guest_s_page_with_a_thousand_counts_costs_no_more_than_one_with_five(
    scene: Any, value: Any
) -> None:
    scene.guest = msgspec.structs.replace(GUEST, steps_met=(0,) * 1000)
    value("requests_total")
    scene.guest = msgspec.structs.replace(GUEST, steps_met=(1,) * 1000)
    assert value("guest_steps_met_count") == 5


def test_a_source_that_is_neither_present_nor_was_ever_seen_is_no_series(
    scene: Any,
) -> None:
    metrics = AgentMetrics(version="1")
    exposition = SlotExposition("slot0", metrics, tenants=())
    sample = scene.sample()

    def ages(*names: str, seen: tuple[str, ...] = ()) -> set[str]:
        pulses = tuple(PulseReading(name=name, fault=PageFault.FOREIGN) for name in names)
        found = msgspec.structs.replace(sample, pulses=pulses)
        exposition.observe(found, scene.beat(), scene.policy, None)
        exposition.refresh(scene.policy, dict.fromkeys(seen, 1))
        name = "harvester_signal_age_seconds"
        (family,) = [one for one in metrics.registry.collect() if one.name == name]
        return {one.labels["source"] for one in family.samples}

    assert ages("pulse.a.0", "pulse.b.0") == {"pulse.a.0", "pulse.b.0"}
    assert ages("pulse.c.0", seen=("pulse.a.0",)) == {"pulse.a.0", "pulse.c.0"}
    assert ages("pulse.b.0", seen=("pulse.a.0",)) == {"pulse.a.0", "pulse.b.0"}
