"""KV that production and guest share page by page: its use, and the reclaim that follows."""

import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.agent.shared_memory import SegmentPair
from harvester.config_file import load_agent_config
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest
from harvester.contracts.process import ProcessId
from harvester.platform.kv_segment import KvSegment
from harvester.policy.effects import KillGuest, LiftGuest, SettleGuest
from harvester.policy.sample import KvReading, MemoryReading

GIB = 1 << 30
KV_TOKENS = 8192


def write(folder: Path, name: str, *sizes: int) -> None:
    (folder / name).write_bytes(struct.pack("=qqq", *sizes))


@pytest.fixture
def shared(tmp_path: Path) -> SegmentPair:
    write(tmp_path, "prod", 40 * GIB, 20 * GIB, GIB)
    write(tmp_path, "guest", 8 * GIB, 4 * GIB, GIB)
    owners = frozenset({os.getuid()})
    return SegmentPair(
        (KvSegment("prod", owners=owners, directory=tmp_path),),
        KvSegment("guest", owners=owners, directory=tmp_path),
        total_bytes=40 * GIB,
    )


def test_both_engines_pages_count_against_what_they_share(shared: SegmentPair) -> None:
    assert shared.read() == MemoryReading(used_bytes=26 * GIB, limit_bytes=40 * GIB)
    assert shared.read_guest() == KvReading(mapped_bytes=5 * GIB, limit_bytes=8 * GIB)


def test_a_production_that_says_nothing_is_full_and_a_guest_that_is_not_there_uses_none(
    shared: SegmentPair, tmp_path: Path
) -> None:
    (tmp_path / "guest").unlink()
    assert shared.read().used_bytes == 21 * GIB
    assert shared.read_guest() == KvReading(fault="no segment")
    (tmp_path / "prod").write_bytes(b"of another version")
    assert shared.read().used_ratio == 1.0
    (tmp_path / "guest").write_bytes(b"of another version")
    assert "not a segment" in shared.read_guest().fault
    assert shared.read_guest().over_bytes == 0


@pytest.fixture
def scene(make_scene: Any) -> Any:
    scene = make_scene()
    scene.guest = Guest(kv_tokens_total=KV_TOKENS, processes=(ProcessId(pid=41, start_ticks=7),))
    scene.guest_kv = KvReading(mapped_bytes=8 * GIB, limit_bytes=8 * GIB)
    scene.memory = MemoryReading(used_bytes=10, limit_bytes=100)
    scene.beats_for(0.5)
    return scene


def kinds(effects: Any) -> set[type]:
    return {type(effect) for effect in effects}


def full(scene: Any) -> Any:
    scene.memory = MemoryReading(used_bytes=95, limit_bytes=100)
    effects = scene.beat()
    scene.memory = MemoryReading(used_bytes=10, limit_bytes=100)
    return effects


def test_a_budget_that_only_the_guest_s_books_obey_has_freed_nothing(scene: Any) -> None:
    assert LiftGuest in kinds(full(scene))
    scene.guest = msgspec.structs.replace(scene.guest, kv_tokens_withheld=KV_TOKENS // 2)
    scene.guest_kv = KvReading(mapped_bytes=8 * GIB, limit_bytes=4 * GIB)
    killed = [one for _ in range(25) for one in scene.beat() if isinstance(one, KillGuest)]
    (end,) = killed
    assert f"{4 * GIB} bytes mapped above its limit" in end.reason
    assert scene.policy.reclaim.state.missed == 1


def test_a_guest_whose_pages_are_back_in_time_is_settled(scene: Any) -> None:
    full(scene)
    scene.guest = msgspec.structs.replace(scene.guest, kv_tokens_withheld=KV_TOKENS // 2)
    scene.guest_kv = KvReading(mapped_bytes=6 * GIB, limit_bytes=4 * GIB)
    assert SettleGuest not in kinds(scene.beat())
    scene.guest_kv = KvReading(mapped_bytes=4 * GIB, limit_bytes=4 * GIB)
    assert SettleGuest in kinds(scene.beat())
    assert (scene.policy.reclaim.state.in_time, scene.policy.reclaim.state.missed) == (1, 0)


CONFIG = "slots:\n  - name: slot0\n    kvcached: {}\n"
GOOD = "{production: [prod_kv], guest: guest_kv, total_bytes: 1000}"


@pytest.mark.parametrize(
    ("kvcached", "complaint"),
    [
        ("{}", "production"),
        (GOOD.replace("[prod_kv]", "[]"), "production"),
        (GOOD.replace("1000", "0"), "total_bytes"),
        (GOOD.replace("guest_kv", "prod_kv"), "of its own"),
        (GOOD.replace("guest_kv", "../guest"), "letters, digits"),
        (GOOD.replace("guest_kv", "guest.kv"), "letters, digits"),
        (GOOD + "\n    memory_group: /sys/fs/cgroup/a", "give one"),
    ],
)
def test_consent_to_shared_memory_is_checked(tmp_path: Path, kvcached: str, complaint: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(CONFIG.replace("{}", GOOD))
    assert load_agent_config(path, environment={}).slots[0].kvcached is not None
    path.write_text(CONFIG.replace("{}", kvcached))
    with pytest.raises(ConfigError, match=complaint):
        load_agent_config(path, environment={})
