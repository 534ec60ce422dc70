"""Which files a slot's directory has, and how they are called."""

import stat
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
        "grant",
        "guest",
        "pulse.prod.0",
    ]


def test_makes_the_directory_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    directory = PageDirectory.create(tmp_path / "a" / "slot", mode=0o1777)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o1777
    assert PageDirectory.create(directory.path, mode=0o755) == directory
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o755


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
    most, second = 2**63, 1.2345678901234567
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
