"""The record of a checkpoint directory, and the rule that repairs an interrupted apply."""

import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.layout.apply_journal import (
    Applying,
    Held,
    decoded_record,
    encoded_record,
    read_record,
    write_record,
)

HELD = Held(
    version=WeightVersion(7),
    state_hash="aa" * 16,
    contents_hash="ee" * 16,
    sequence=12,
    digests={"w": "bb" * 16, "b": "0"},
)
APPLYING = Applying(
    version=WeightVersion(8),
    state_hash="cc" * 16,
    contents_hash="ff" * 16,
    base_version=WeightVersion(7),
    base_state_hash="aa" * 16,
    sequence=13,
    before={"w": "bb" * 16},
    after={"w": "dd" * 16},
)
SEALS = {
    "held": "7d75816a9dea86aeea7f10e44a9e4adb",
    "applying": "b4488e4652724fd6151b7782575ed73d",
}
RECORDS = {"held": HELD, "applying": APPLYING}
GOLDEN = {
    "held": f'{{"state":"held","version":7,"state_hash":"{"aa" * 16}",'
    f'"contents_hash":"{"ee" * 16}","sequence":12,'
    f'"digests":{{"w":"{"bb" * 16}","b":"0"}},"format":1,',
    "applying": f'{{"state":"applying","version":8,"state_hash":"{"cc" * 16}",'
    f'"contents_hash":"{"ff" * 16}","base_version":7,'
    f'"base_state_hash":"{"aa" * 16}","sequence":13,"before":{{"w":"{"bb" * 16}"}},'
    f'"after":{{"w":"{"dd" * 16}"}},"format":1,',
}


def digest(value: int) -> str:
    return hashlib.sha256(value.to_bytes(8, "little")).hexdigest()


@given(st.dictionaries(st.text(min_size=1), st.tuples(*[st.integers(0, 255)] * 2), min_size=1))
def test_a_difference_is_applied_exactly_once_through_any_number_of_kills(
    tensors: dict[str, tuple[int, int]],
) -> None:
    """Every tensor takes its difference by XOR; after each one the process is killed."""
    before = {name: old for name, (old, _) in tensors.items()}
    after = {name: old ^ difference for name, (old, difference) in tensors.items()}
    record = Applying(
        version=WeightVersion(2),
        state_hash="",
        contents_hash="",
        base_version=WeightVersion(1),
        base_state_hash="",
        sequence=1,
        before={name: digest(value) for name, value in before.items()},
        after={name: digest(value) for name, value in after.items()},
    )
    held = dict(before)
    for _ in range(len(tensors) + 1):
        behind = record.behind({name: digest(value) for name, value in held.items()})
        assert behind is not None
        if not behind:
            break
        held[behind[0]] ^= tensors[behind[0]][1]
    assert held == after


@given(
    before=st.none() | st.integers(0, 3), now=st.none() | st.integers(0, 3), after=st.integers(0, 3)
)
def test_only_the_old_bits_take_a_delta_and_only_the_new_ones_stay(
    before: int | None, now: int | None, after: int
) -> None:
    record = msgspec.structs.replace(
        APPLYING,
        before={} if before is None else {"w": digest(before)},
        after={"w": digest(after)},
    )
    behind = record.behind({} if now is None else {"w": digest(now)})
    assert (behind == []) == (now == after)
    assert (behind == ["w"]) == (now is not None and now == before and now != after)


def test_files_with_another_tensor_are_written_anew() -> None:
    assert APPLYING.behind({}) is None
    assert APPLYING.behind({"w": APPLYING.after["w"]}) == []
    assert APPLYING.behind({"w": APPLYING.after["w"], "x": digest(0)}) is None


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_on_disk_is_read_as_it_was_meant(kind: str) -> None:
    record = RECORDS[kind]
    raw = encoded_record(record)
    assert raw.decode() == f'{GOLDEN[kind]}"seal":"{SEALS[kind]}"}}'
    read = decoded_record(raw)
    assert encoded_record(read) == raw
    assert (read.version, read.sequence) == (record.version, record.sequence)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_no_byte_of_a_record_can_change_unseen(record: Held | Applying) -> None:
    raw = encoded_record(record)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 0x02
        with pytest.raises(Corrupt):
            decoded_record(bytes(changed))
        with pytest.raises(Corrupt):
            decoded_record(raw[:at])


def test_a_record_is_replaced_whole(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, HELD)
    write_record(tmp_path, APPLYING)
    read = read_record(tmp_path)
    assert isinstance(read, Applying)
    assert read.after == APPLYING.after
    assert [path.name for path in tmp_path.iterdir()] == ["rosemux.json"]


def test_an_invalid_record_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "rosemux.json").mkdir()
    with pytest.raises(Corrupt):
        read_record(tmp_path)
