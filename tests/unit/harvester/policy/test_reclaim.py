"""Memory that production needs back: first asked for, then helped along, then taken."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.agent.shared_memory import SharedMemory
from harvester.contracts.ids import Epoch
from harvester.contracts.page import Guest, PageFault
from harvester.contracts.process import ProcessId
from harvester.contracts.wire.leases import SlotState
from harvester.policy.effects import KillGuest, LiftGuest, Quarantine, SettleGuest
from harvester.policy.sample import ActionOutcome, GuestAction, LeaseView, MemoryReading
from harvester.policy.settings import Mode
from harvester.policy.slot import SlotPolicy

KV_TOKENS = 8192
PROCESSES = (ProcessId(pid=41, start_ticks=7), ProcessId(pid=42, start_ticks=8))
GUEST = Guest(kv_tokens_total=KV_TOKENS, processes=PROCESSES)
FULL = MemoryReading(used_bytes=95, limit_bytes=100)
ROOM = MemoryReading(used_bytes=50, limit_bytes=100)


@pytest.fixture
def scene(make_scene: Any) -> Any:
    scene = make_scene()
    scene.guest = GUEST
    scene.beats_for(0.5)
    return scene


def of(kind: Any, effects: Any) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def withhold(scene: Any, tokens: int) -> None:
    scene.guest = msgspec.structs.replace(scene.guest, kv_tokens_withheld=tokens)


def test_a_full_control_group_halves_the_budget_and_lifts_the_guest_in_the_same_beat(
    scene: Any, grant_in: Any
) -> None:
    assert grant_in(scene.beat()).kv_budget_tokens == 0, "all that its engine has"
    scene.memory = FULL
    effects = scene.beat()
    assert grant_in(effects).kv_budget_tokens == KV_TOKENS // 2
    assert [effect.processes for effect in of(LiftGuest, effects)] == [PROCESSES]


def test_a_lifted_guest_has_no_grant_and_keeps_its_lease(
    scene: Any, grant_in: Any, ended_in: Any
) -> None:
    """Outside its isolation its steps would run beside production's as equals."""
    assert grant_in(scene.beat()).mode == "open"
    scene.memory = ROOM
    scene.set_pulse(kv_usage_ratio=0.95)
    lifting = scene.beat()
    assert of(LiftGuest, lifting)
    scene.set_pulse(kv_usage_ratio=0.1)
    for effects in (lifting, *(scene.beat() for _ in range(10))):
        assert (grant_in(effects).mode, grant_in(effects).reason) == ("closed", "memory is due")
        assert ended_in(effects) == []
        assert scene.policy.slot_state() is SlotState.OFFERED
    withhold(scene, KV_TOKENS // 2)
    effects = scene.beat()
    assert of(SettleGuest, effects)
    assert grant_in(effects).mode == "closed"
    assert grant_in(scene.beat()).mode == "open"


def test_a_full_cache_of_productions_own_takes_nothing_from_the_guest(
    scene: Any, grant_in: Any
) -> None:
    scene.set_pulse(kv_usage_ratio=0.95)
    effects = scene.beat()
    assert (grant_in(effects).mode, grant_in(effects).kv_budget_tokens) == ("open", 0)
    assert not of(LiftGuest, effects)


def test_memory_that_cannot_be_read_is_full(scene: Any, grant_in: Any) -> None:
    scene.memory = MemoryReading()
    assert grant_in(scene.beat()).kv_budget_tokens == KV_TOKENS // 2


def test_a_guest_that_gives_back_in_time_is_settled_again(scene: Any) -> None:
    scene.memory = FULL
    scene.beat()
    scene.memory = ROOM
    withhold(scene, KV_TOKENS // 2)
    effects = scene.beat()
    assert of(SettleGuest, effects)
    assert scene.policy.reclaim.state.in_time == 1
    assert not of(SettleGuest, scene.beat()), "once"


def test_memory_kept_beyond_the_deadline_is_taken(scene: Any) -> None:
    scene.memory = FULL
    scene.beat()
    scene.memory = ROOM
    killed = [of(KillGuest, scene.beat()) for _ in range(25)]
    (effect,) = [effect for effects in killed for effect in effects]
    assert effect.processes == PROCESSES
    assert "8192 tokens of KV, 4096 allowed" in effect.reason
    assert scene.policy.reclaim.state.missed == 1


def test_a_guest_that_outlives_its_end_is_ended_again_and_counted_once(scene: Any) -> None:
    scene.memory = FULL
    scene.beat()
    scene.memory = ROOM
    beats = [bool(of(KillGuest, scene.beat())) for _ in range(70)]
    deadline = round(scene.settings.kv_deadline_s / scene.settings.beat_s)
    assert [beat + 1 for beat, killed in enumerate(beats) if killed] == [
        deadline,
        2 * deadline,
        3 * deadline,
    ]
    assert scene.policy.reclaim.state.missed == 1
    withhold(scene, KV_TOKENS // 2)
    assert of(SettleGuest, scene.beat())
    assert scene.policy.reclaim.state.in_time == 0


def test_a_starved_silent_guest_is_lifted_and_ended_by_its_last_page(scene: Any) -> None:
    scene.guest = None
    scene.memory = FULL
    assert of(LiftGuest, scene.beat())[0].processes == PROCESSES
    scene.memory = ROOM
    killed = [effect for _ in range(25) for effect in of(KillGuest, scene.beat())]
    assert [effect.processes for effect in killed] == [PROCESSES]


def test_a_guest_that_is_gone_owes_nothing(scene: Any) -> None:
    scene.memory = FULL
    scene.beat()
    scene.guest, scene.guest_fault = None, PageFault.MISSING
    assert of(SettleGuest, scene.beat())
    assert not any(of(KillGuest, scene.beat()) for _ in range(40))


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_only_a_harvesting_agent_acts_on_a_guest(make_scene: Any, mode: Mode) -> None:
    scene = make_scene(mode=mode)
    scene.guest, scene.memory = GUEST, FULL
    effects = [effect for _ in range(40) for effect in scene.beat()]
    assert not of(LiftGuest, effects)
    assert not of(KillGuest, effects)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_a_mode_that_stops_harvesting_forgives_no_debt(scene: Any, mode: Mode) -> None:
    scene.memory = FULL
    assert of(LiftGuest, scene.beat())
    scene.memory = ROOM
    policy = SlotPolicy(replace(scene.settings, mode=mode))
    policy.restore(scene.policy.snapshot())
    scene.policy = policy
    beats = [scene.beat() for _ in range(25)]
    assert not any(of(SettleGuest, effects) for effects in beats)
    (killed,) = [effect for effects in beats for effect in of(KillGuest, effects)]
    assert killed.processes == PROCESSES
    withhold(scene, KV_TOKENS // 2)
    assert of(SettleGuest, scene.beat())


@pytest.mark.parametrize(("most", "left"), [(0, 4096), (1000, 500), (10**9, 4096)])
def test_a_shrunk_budget_is_a_share_of_what_the_guest_may_and_can_hold(
    make_scene: Any, grant_in: Any, most: int, left: int
) -> None:
    scene = make_scene(kv_budget_tokens=most)
    scene.guest = GUEST
    scene.beat()
    scene.memory = FULL
    assert grant_in(scene.beat()).kv_budget_tokens == left


def test_an_unleased_guest_falls_asleep_and_wakes_with_its_lease(scene: Any, grant_in: Any) -> None:
    leased, scene.lease = scene.lease, LeaseView(epoch=Epoch(2))
    assert not grant_in(scene.beats_for(59.0)).asleep
    effects = scene.beats_for(2.0)
    assert (grant_in(effects).mode, grant_in(effects).asleep) == ("closed", True)
    assert not of(LiftGuest, effects), "nobody waits for what it gives up"
    scene.lease = leased
    grant = grant_in(scene.beat())
    assert (grant.mode, grant.asleep) == ("open", False)


def test_a_guest_is_never_put_to_sleep_where_the_setting_is_0(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene(sleep_after_s=0.0)
    scene.lease = LeaseView(epoch=Epoch(2))
    assert not grant_in(scene.beats_for(200.0)).asleep


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"memory.current": "700", "memory.max": "1000", "memory.stat": "inactive_file 200"},
            MemoryReading(used_bytes=500, limit_bytes=1000),
        ),
        (
            {
                "memory.usage_in_bytes": "700",
                "memory.limit_in_bytes": "1000",
                "memory.stat": "cache 5\ntotal_inactive_file 100",
            },
            MemoryReading(used_bytes=600, limit_bytes=1000),
        ),
        ({}, MemoryReading()),
        ({"memory.current": "many", "memory.max": "1", "memory.stat": ""}, MemoryReading()),
    ],
    ids=["unified", "legacy", "missing", "not_a_number"],
)
def test_a_control_group_is_read_in_both_hierarchies(
    tmp_path: Path, files: dict[str, str], expected: MemoryReading
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert SharedMemory(tmp_path).read() == expected


def test_a_group_without_a_limit_is_never_full(tmp_path: Path) -> None:
    for name, text in (("memory.current", "700"), ("memory.max", "max"), ("memory.stat", "")):
        (tmp_path / name).write_text(text)
    assert SharedMemory(tmp_path).read().used_ratio < 1e-6


def group(path: Path, *, used: int, cache: int = 0, **limits: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in {"current": str(used), "stat": f"inactive_file {cache}", **limits}.items():
        (path / f"memory.{name}").write_text(text + "\n")
    return path


def test_a_group_is_full_at_the_limit_at_which_the_kernel_slows_it(tmp_path: Path) -> None:
    slowed = group(tmp_path / "a.slice", used=56, max="64", high="56")
    assert SharedMemory(slowed).read() == MemoryReading(used_bytes=56, limit_bytes=56)
    unbound = group(tmp_path / "b.slice", used=60, max="max", high="64")
    assert SharedMemory(unbound).read().limit_bytes == 64
    assert SharedMemory(unbound).note == ""


def test_a_group_is_as_full_as_the_fullest_above_it(tmp_path: Path) -> None:
    above = group(tmp_path / "serving.slice", used=95, cache=1, max="100", high="max")
    below = group(above / "pair.slice", used=30, max="max", high="max")
    assert SharedMemory(below).read() == MemoryReading(used_bytes=94, limit_bytes=100)
    (above / "memory.max").write_text("max\n")
    assert SharedMemory(below).read().used_ratio < 1e-6
    assert "neither it nor a group above it has memory.max" in SharedMemory(below).note
    (above / "memory.high").write_text("half\n")
    assert SharedMemory(below).read() == MemoryReading(), "unknown is full"
    assert "cannot be read: it counts as full" in SharedMemory(below).note


def owes(scene: Any) -> None:
    """Until the guest was to be ended for it."""
    scene.memory = FULL
    scene.beat()
    scene.memory = ROOM
    assert any(of(KillGuest, scene.beat()) for _ in range(25))


def told(scene: Any, **outcome: Any) -> Any:
    scene.outcomes = (ActionOutcome(action=GuestAction.KILL, **outcome),)
    effects = scene.beat()
    scene.outcomes = ()
    return effects


def test_a_guest_that_has_ended_owes_nothing_whatever_its_page_still_says(scene: Any) -> None:
    owes(scene)
    assert of(SettleGuest, told(scene, processes=PROCESSES))
    assert not any(of((LiftGuest, KillGuest), scene.beat()) for _ in range(5))
    scene.guest, scene.guest_fault = None, PageFault.EXPIRED
    assert not any(of((LiftGuest, KillGuest), scene.beat()) for _ in range(100))


def test_the_guest_after_one_that_was_ended_owes_for_itself(scene: Any) -> None:
    owes(scene)
    told(scene, processes=PROCESSES)
    next_one = (ProcessId(pid=43, start_ticks=9),)
    scene.guest = msgspec.structs.replace(GUEST, processes=next_one)
    (lift,) = of(LiftGuest, scene.beat())
    assert lift.processes == next_one


def test_the_late_end_of_one_guest_is_not_the_end_of_the_next(scene: Any) -> None:
    owes(scene)
    next_one = (ProcessId(pid=43, start_ticks=9),)
    scene.guest = msgspec.structs.replace(GUEST, processes=next_one)
    scene.beat()
    scene.guest = None
    told(scene, processes=PROCESSES)
    kills = [effect for _ in range(25) for effect in of(KillGuest, scene.beat())]
    assert {effect.processes for effect in kills} == {next_one}


def test_a_guest_that_speaks_owes_and_cannot_be_ended_quarantines_its_slot_and_is_no_loss(
    scene: Any, grant_in: Any, ended_in: Any
) -> None:
    owes(scene)
    assert not of(Quarantine, told(scene, fault="process 41: not seen here"))
    (quarantine,) = [one for _ in range(40) for one in of(Quarantine, scene.beat())]
    assert "could not be ended: process 41: not seen here" in quarantine.reason
    effects = scene.beat()
    assert (grant_in(effects).mode, ended_in(effects)) == ("closed", ["drain"])
    assert not of(Quarantine, effects), "once"
    assert scene.policy.guest.state.losses_s == []


def test_a_guest_of_another_user_has_the_time_to_end_itself(scene: Any) -> None:
    owes(scene)
    told(scene, fault="process 41: Operation not permitted")
    assert not [one for _ in range(15) for one in of(Quarantine, scene.beat())]
    scene.guest, scene.guest_fault = None, PageFault.EXPIRED
    assert not [one for _ in range(60) for one in of(Quarantine, scene.beat())]


def test_a_guest_that_is_gone_and_could_not_be_ended_is_no_reason_to_quarantine(
    scene: Any,
) -> None:
    owes(scene)
    scene.guest = None
    assert not of(Quarantine, told(scene, fault="process 41: not seen here"))
    scene.beats_for(1)
    assert scene.policy.slot_state() is not SlotState.QUARANTINED


def test_a_guest_that_gave_back_before_its_end_was_found_undone_is_left_in_peace(
    scene: Any,
) -> None:
    owes(scene)
    withhold(scene, KV_TOKENS // 2)
    scene.beat()
    assert not of(Quarantine, told(scene, fault="process 41: not seen here"))
