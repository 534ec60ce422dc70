"""A slot's durable state on disk: whole, this slot's, or not believed."""

from pathlib import Path

import msgspec
import pytest

from harvester.agent import state_file
from harvester.agent.state_file import StateFile
from harvester.contracts.errors import ConfigError, Corrupt
from harvester.platform import whole_file
from harvester.policy.durable import DurableState

STRIDE = 13
"""Every 13th byte of a file is struck, which meets each of its parts; all would take a minute."""
STATE = DurableState(quarantine="guest lost", breached_at_s=90.0, guest_losses_s=[70.0, 80.0])


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path / "slot0.state", node="node-0", slot="slot0")


def test_gives_back_what_was_saved_last(file: StateFile) -> None:
    file.save(DurableState(), now=50.0)
    file.save(STATE, now=100.0)
    assert file.load(now=500.0) == STATE


def test_a_slot_that_never_was_has_no_history(file: StateFile) -> None:
    assert file.load(now=1.0) is None


@pytest.mark.parametrize("now", [7.0, 1e6])
def test_after_another_boot_every_age_is_what_it_was(
    file: StateFile, monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    file.save(STATE, now=100.0)
    monkeypatch.setattr(state_file, "monotonic_origin", lambda: "another boot")
    later = StateFile(file.path, node="node-0", slot="slot0").load(now=now)
    assert later is not None
    assert later.breached_at_s == pytest.approx(now - 10.0)
    assert later.guest_losses_s == pytest.approx([now - 30.0, now - 20.0])


def test_without_a_name_for_the_boot_no_time_is_believed_to_have_passed(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "monotonic_origin", lambda: "")
    unnamed = StateFile(file.path, node="node-0", slot="slot0")
    unnamed.save(STATE, now=100.0)
    later = unnamed.load(now=9000.0)
    assert later is not None
    assert later.breached_at_s == pytest.approx(8990.0)


def test_a_clock_that_went_back_makes_nothing_older(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    later = file.load(now=40.0)
    assert later is not None
    assert later.breached_at_s == pytest.approx(30.0)


def test_a_file_cut_at_any_byte_is_not_believed(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    whole = file.path.read_bytes()
    for size in range(0, len(whole), STRIDE):
        file.path.write_bytes(whole[:size])
        with pytest.raises(Corrupt, match=r"slot0\.state"):
            file.load(now=100.0)


def test_a_bit_that_turned_is_not_believed(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    whole = file.path.read_bytes()
    begin = whole.index(b"\n") + 1
    for at in range(begin, len(whole), STRIDE):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(Corrupt):
            file.load(now=100.0)


def test_a_kill_at_any_byte_of_a_save_leaves_the_one_before(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    before = file.path.read_bytes()
    for size in range(0, len(before), STRIDE):
        file.path.with_name(".tmp-slot0.state").write_bytes(before[:size])
        assert file.load(now=100.0) == STATE
    file.save(DurableState(), now=110.0)
    assert file.load(now=110.0) == DurableState()
    assert [path.name for path in file.path.parent.iterdir()] == ["slot0.state"]


def test_a_save_that_fails_leaves_the_one_before(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    file.save(STATE, now=100.0)
    monkeypatch.setattr(whole_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        file.save(DurableState(), now=110.0)
    assert file.load(now=110.0) == STATE
    assert [path.name for path in file.path.parent.iterdir()] == ["slot0.state"]


def test_another_configured_slot_s_state_is_the_user_s_mistake(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    swapped = StateFile(file.path, node="node-0", slot="slot1", configured=["slot0", "slot1"])
    with pytest.raises(ConfigError, match="is of slot slot0, which is configured too"):
        swapped.load(now=100.0)


def test_a_renamed_slot_has_the_history_that_was_moved_with_it(
    file: StateFile, caplog: pytest.LogCaptureFixture
) -> None:
    file.save(STATE, now=100.0)
    renamed = StateFile(file.path, node="node-0", slot="chat0", configured=["chat0"])
    assert renamed.load(now=100.0) == STATE
    assert caplog.messages == ["slot chat0 goes on with the history of slot0"]
    renamed.save(STATE, now=110.0)
    caplog.clear()
    assert renamed.load(now=110.0) == STATE
    assert caplog.messages == []


def test_a_new_slot_names_the_histories_that_no_slot_goes_on_with(
    file: StateFile, caplog: pytest.LogCaptureFixture
) -> None:
    folder = file.path.parent
    for name in ("slot0", "slot1", "slot2", "a", "b", "c"):
        StateFile(folder / f"{name}.state", node="node-0", slot=name).save(STATE, now=1.0)
    (folder / "slot0.state.refused").touch()
    (folder / ".tmp-slot9.state").touch()
    slots = ["slot0", "slot1", "chat0"]
    new = StateFile(folder / "chat0.state", node="node-0", slot="chat0", configured=slots)
    assert new.load(now=2.0) is None
    (said,) = caplog.messages
    assert "not configured: a, b, c, slot2. If one of them was renamed, move its" in said
    for name in ("a", "b", "c", "slot2"):
        (folder / f"{name}.state").unlink()
    caplog.clear()
    assert new.load(now=2.0) is None
    assert caplog.messages == []


def test_another_node_s_state_is_the_user_s_mistake(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    with pytest.raises(ConfigError, match="belongs to node node-0, this is node node-1"):
        StateFile(file.path, node="node-1", slot="slot0").load(now=100.0)


def test_a_state_that_cannot_be_read_is_not_taken_for_a_damaged_one(file: StateFile) -> None:
    file.path.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        file.load(now=100.0)


def test_a_refused_state_takes_no_earlier_one_s_place(file: StateFile) -> None:
    for text in ("first", "second", "third"):
        file.path.write_text(text)
        file.put_aside()
    kept = {path.name: path.read_text() for path in file.path.parent.iterdir()}
    assert kept == {
        "slot0.state.refused": "first",
        "slot0.state.refused.2": "second",
        "slot0.state.refused.3": "third",
    }


def test_a_schema_of_a_later_agent_is_not_guessed_at(file: StateFile) -> None:
    file.save(STATE, now=100.0)
    first, _, body = file.path.read_bytes().partition(b"\n")
    head = {**msgspec.json.decode(first), "schema": 2}
    file.path.write_bytes(msgspec.json.encode(head) + b"\n" + body)
    with pytest.raises(Corrupt, match="schema 2"):
        file.load(now=100.0)


def test_fields_that_are_missing_or_unknown_are_an_older_or_newer_agent_s(
    file: StateFile,
) -> None:
    file.save(STATE, now=100.0)
    first, body, _ = file.path.read_bytes().split(b"\n")
    fields = msgspec.json.decode(body)
    del fields["proof"], fields["kv_level"]
    changed = msgspec.json.encode({**fields, "later": 1})
    digest = state_file.xxhash.xxh3_64_hexdigest(changed)
    head = msgspec.json.encode({**msgspec.json.decode(first), "digest": digest, "later": True})
    file.path.write_bytes(head + b"\n" + changed + b"\n")
    assert file.load(now=100.0) == STATE


def test_after_a_refusal_nothing_is_believed_until_a_state_is_saved_again(file: StateFile) -> None:
    file.path.write_bytes(b"torn")
    for _ in range(3):
        # As agents leave it that are killed before their first save.
        with pytest.raises(Corrupt):
            file.load(now=1.0)
        file.put_aside()
    file.save(STATE, now=2.0)
    assert file.load(now=2.0) == STATE
