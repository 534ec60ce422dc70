"""Which files a slot's directory has, and how they are called."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError, PeerProtocolError
from harvester.contracts.page import (
    PAGE_BYTES,
    EngineCore,
    Grant,
    GrantMode,
    Guest,
    PageDirectory,
    PageFault,
    PageOwners,
    ProductionModel,
    Pulse,
    PulseHead,
    pulse_page,
)

NOW_NS = 1_000_000_000_000


def test_each_record_goes_through_the_page_of_its_name(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path / "slot")
    grant = Grant(epoch=3, mode=GrantMode.OPEN, pulses=("pulse.prod.0",))
    guest, pulse = Guest(epoch=3), Pulse(in_flight=2)
    directory.grant_writer().write(grant, now_ns=NOW_NS, ttl_ns=1)
    directory.guest_writer().write(guest, now_ns=NOW_NS, ttl_ns=1)
    directory.pulse_writer("prod", 0).write(pulse, now_ns=NOW_NS, ttl_ns=1)
    assert directory.grant_reader().read(now_ns=NOW_NS).record == grant
    assert directory.guest_reader().read(now_ns=NOW_NS).record == guest
    assert directory.pulse_reader("pulse.prod.0").read(now_ns=NOW_NS).record == pulse
    assert sorted(file.name for file in tmp_path.glob("slot/*")) == [
        ".grant.lock",
        ".guest.lock",
        ".pulse.prod.0.lock",
        "grant",
        "guest",
        "pulse.prod.0",
    ]


def test_a_grant_of_a_day_is_believed_for_seconds_by_whoever_reads_it(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path / "slot")
    grant, day_ns = Grant(epoch=3, mode=GrantMode.OPEN), 86_400_000_000_000
    directory.grant_writer().write(grant, now_ns=NOW_NS, ttl_ns=day_ns)
    known = directory.grant_reader()
    assert known.read(now_ns=NOW_NS + Grant.AGE_MAX_NS - 1).record == grant
    for reader in (known, directory.grant_reader()):
        assert reader.read(now_ns=NOW_NS + Grant.AGE_MAX_NS).fault is PageFault.EXPIRED
    assert known.read_left().record == grant, "for a successor, however old"
    directory.pulse_writer("prod", 0).write(Pulse(), now_ns=NOW_NS, ttl_ns=day_ns)
    assert directory.pulse_reader("pulse.prod.0").read(now_ns=NOW_NS + day_ns - 1).record == Pulse()


def test_only_the_owner_may_put_pages_into_a_new_directory_whatever_the_umask(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        directory = PageDirectory.create(tmp_path / "a" / "slot")
    finally:
        os.umask(before)
    assert mode_of(directory.path) == 0o755
    assert mode_of(directory.path.parent) == 0o755


def test_a_group_may_put_its_own_pages_into_the_directory_and_others_cannot_enter(
    tmp_path: Path,
) -> None:
    directory = PageDirectory.create(tmp_path / "slot", group=os.getegid())
    assert mode_of(directory.path) == 0o1770


def test_a_world_writable_directory_of_an_older_agent_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    path.mkdir()
    path.chmod(0o1777)
    PageDirectory.create(path)
    assert mode_of(path) == 0o1755


def test_a_directory_of_a_stranger_is_refused_with_what_to_do(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path / "slot")
    owner = directory.path.stat().st_uid
    if owner == 0:  # Root's directories are always trusted: use another owner.
        owner = 4242
        os.chown(directory.path, owner, -1)
    others = PageDirectory(directory.path, PageOwners(agent=frozenset({owner + 1})))
    with pytest.raises(ConfigError, match=rf"belongs to user {owner}.* chown"):
        others.check()
    PageDirectory(directory.path, PageOwners(agent=frozenset({owner}))).check()


@pytest.mark.parametrize(("mode", "advice"), [(0o1777, "chmod o-w"), (0o775, r"chmod \+t")])
def test_a_directory_in_which_others_may_act_is_refused_with_what_to_do(
    tmp_path: Path, mode: int, advice: str
) -> None:
    directory = PageDirectory.create(tmp_path / "slot")
    directory.path.chmod(mode)
    with pytest.raises(ConfigError, match=advice):
        directory.check()


def test_a_directory_below_one_in_which_others_may_swap_it_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="may replace files"):
        PageDirectory.create(open_to_all / "slot")
    assert not (open_to_all / "slot").exists()


def test_a_link_in_the_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o700)
    (tmp_path / "slot").symlink_to(target)
    with pytest.raises(ConfigError, match="link"):
        PageDirectory.create(tmp_path / "slot")
    with pytest.raises(ConfigError, match="link"):
        PageDirectory(tmp_path / "slot").check()
    assert mode_of(target) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give pages to other users")
def test_each_user_is_believed_for_its_own_kind_of_page_alone(tmp_path: Path) -> None:
    users = {"agent": 4241, "production": 4242, "guest": 4243, "nobody": 4244}
    owners = PageOwners(**{kind: frozenset({users[kind]}) for kind in ("agent", "production")})
    directory = PageDirectory(tmp_path, replace(owners, guest=frozenset({users["guest"]})))
    directory.grant_writer().write(Grant(epoch=1, mode=GrantMode.OPEN), now_ns=NOW_NS, ttl_ns=1)
    directory.guest_writer().write(Guest(), now_ns=NOW_NS, ttl_ns=1)
    directory.pulse_writer("prod", 0).write(Pulse(), now_ns=NOW_NS, ttl_ns=1)
    believed = set()
    for user, uid in users.items():
        for file in ("grant", "guest", "pulse.prod.0"):
            os.chown(tmp_path / file, uid, uid)
        readings = {
            "grant": directory.grant_reader().read(now_ns=NOW_NS),
            "guest": directory.guest_reader().read(now_ns=NOW_NS),
            "pulse": directory.pulse_reader("pulse.prod.0").read(now_ns=NOW_NS),
            "head": directory.pulse_head_reader("pulse.prod.0").read(now_ns=NOW_NS),
        }
        believed |= {(user, page) for page, reading in readings.items() if reading.record}
        faults = {reading.fault for reading in readings.values() if reading.record is None}
        assert faults == {PageFault.FOREIGN}
    assert believed == {
        ("agent", "grant"),
        ("guest", "guest"),
        ("production", "pulse"),
        ("production", "head"),
    }


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_lists_pulses_in_order_and_nothing_that_no_engine_can_have_written(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path)
    for name in ("pulse.b.0", "pulse.a.1", "pulse.a.0", "grant", "guest", "pulse.a"):
        (tmp_path / name).touch()
    for name in ("pulse.a.b.0", "pulse.a b.0", "pulse.a.x", "pulse.a.0\n", f"pulse.{'a' * 70}.0"):
        (tmp_path / name).touch()
    assert directory.pulse_names() == ("pulse.a.0", "pulse.a.1", "pulse.b.0")


@pytest.mark.parametrize("engine", ["a.b", "", "a/b", "..", "a\n", "e" * 57])
def test_refuses_an_engine_name_whose_pulse_no_reader_would_take(engine: str) -> None:
    with pytest.raises(ConfigError, match="engine name"):
        pulse_page(engine, 0)


def test_every_pulse_name_that_a_writer_gets_is_one_that_a_reader_takes(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path)
    name = pulse_page("e" * 51, 999_999)
    assert directory.pulse_reader(name).path == tmp_path / name


@pytest.mark.parametrize("name", ["../grant", "/etc/passwd", "", "a\n"])
def test_a_pulse_name_from_a_grant_never_becomes_a_path_unchecked(
    tmp_path: Path, name: str
) -> None:
    directory = PageDirectory.create(tmp_path)
    for reader in (directory.pulse_reader, directory.pulse_head_reader):
        with pytest.raises(PeerProtocolError, match="pulse page"):
            reader(name)


def test_the_head_of_a_pulse_is_the_pulse_as_far_as_a_gate_asks(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path)
    pulse = Pulse(
        in_flight=2,
        waiting=1,
        decoding=1,
        ttft_s_recent=(0.5,) * 32,
        model=ProductionModel(prefill_base_s=0.25),
        cores=(EngineCore(rank=1),),
        shape="a",
    )
    directory.pulse_writer("prod", 0).write(pulse, now_ns=NOW_NS, ttl_ns=1)
    head = directory.pulse_head_reader("pulse.prod.0").read(now_ns=NOW_NS).record
    assert head is not None
    assert type(head) is PulseHead
    told = {name: getattr(pulse, name) for name in PulseHead.__struct_fields__}
    assert head == PulseHead(**told)
    assert not hasattr(head, "shape")


def test_the_fullest_pulse_fits_into_a_page(tmp_path: Path) -> None:
    most, second = 2**62 - 1, 1.2345678901234567
    pulse = Pulse(
        **dict.fromkeys(
            ("in_flight", "waiting", "running", "decoding", "oldest_waiting_arrival_ns"), most
        ),
        last_step_end_ns=most,
        steps_total=most,
        prompt_tokens_total=most,
        generation_tokens_total=most,
        requests_total=most,
        ttft_s_recent=(second,) * 32,
        itl_s_recent=(second,) * 32,
        model=ProductionModel(prefill_base_s=second, decode_s_per_request=second),
    )
    directory = PageDirectory.create(tmp_path)
    directory.pulse_writer("prod", 0).write(pulse, now_ns=NOW_NS, ttl_ns=1)
    assert directory.pulse_reader("pulse.prod.0").read(now_ns=NOW_NS).record == pulse
    assert (tmp_path / "pulse.prod.0").stat().st_size == PAGE_BYTES
