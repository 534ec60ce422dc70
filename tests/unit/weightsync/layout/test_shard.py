"""safetensors files from outside: whatever does not add up is refused."""

import json

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from harvester.contracts.errors import Corrupt, RoseMuxError, Unsupported
from weightsync.elements.bits import Bytes, TensorSpec
from weightsync.layout.shard import (
    MAX_HEADER_BYTES,
    shard_chunks,
    shard_data,
    shard_header,
)
from weightsync.layout.tables import packed_table


def _file(header: object, data: bytes = b"") -> Bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = len(raw).to_bytes(8, "little") + raw + data
    return np.frombuffer(whole, dtype=np.uint8)


def _entry(**changes: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


def test_tensors_and_metadata_come_back() -> None:
    layout = {
        "a": TensorSpec("BF16", (2, 1)),
        "empty": TensorSpec("F32", (0,)),
        "scalar": TensorSpec("F64", ()),
    }
    held = {"a": b"\1\2\3\4", "empty": b"", "scalar": bytes(8)}
    chunks = shard_chunks(layout, held.__getitem__, {"a": "0f"})
    whole = b"".join(bytes(chunk) for chunk in chunks)
    data = np.frombuffer(whole, dtype=np.uint8)
    header = shard_header(data)
    assert header.metadata == {"a": "0f"}
    assert header.layout == layout
    for name, content in held.items():
        assert shard_data(data, header, name).tobytes() == content


@pytest.mark.parametrize("count", [3, 300])
def test_sums_come_back_from_plain_and_packed_headers(count: int) -> None:
    """A reader that does not know them finds the checksums of the tensors all the same."""
    names = [f"t{number}" for number in reversed(range(count))]
    layout = {name: TensorSpec("U8", (2,)) for name in names}
    sums = {name: (1 << 64) - 1 - number for number, name in enumerate(names)}
    digests = {name: f"{number:x}" for number, name in enumerate(names)}
    chunks = shard_chunks(layout, lambda _: b"ab", digests, sums=sums, may_pack=True)
    header = shard_header(np.frombuffer(b"".join(bytes(c) for c in chunks), np.uint8))
    assert (header.sums, header.metadata) == (sums, digests)


@pytest.mark.parametrize("summed", ["", "!", "AAAA", "A" * 24])
def test_sums_that_are_not_of_the_tensors_are_corrupt(summed: str) -> None:
    with pytest.raises(Corrupt, match="sums"):
        shard_header(_file({"__metadata__": {"rosemux.sums": summed}, "a": _entry()}, bytes(4)))


@pytest.mark.parametrize(
    "header",
    [
        {"a": _entry(data_offsets=[0, 5])},
        {"a": _entry(data_offsets=[1, 5])},
        {"a": _entry(data_offsets=[4, 0])},
        {"a": _entry(data_offsets=[-4, 0])},
        {"a": _entry(shape=[-4])},
        {"a": _entry(shape=[1 << 50])},
        {"a": _entry(shape=[1] * 9)},
        {"": _entry()},
        {"x" * 513: _entry()},
        {"a": _entry(more=1)},
        {"__metadata__": {"a": 1}, "a": _entry()},
        [],
        b"{",
        b"\xff\xfe",
    ],
)
def test_headers_that_do_not_add_up_are_corrupt(header: object) -> None:
    with pytest.raises(Corrupt):
        shard_header(_file(header, b"\0\0\0\0"))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ('"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}', "'a' is named twice"),
        ('"b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}', "overlap at byte"),
        ('"b": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}', "gap .* at byte"),
    ],
)
def test_a_tensor_that_is_named_twice_or_leaves_a_gap_is_refused(second: str, words: str) -> None:
    """As safetensors' own reader does: JSON lets the last of two names win."""
    first = '"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}'
    data = _file(f"{{{first}, {second}}}".encode(), b"\0\0\0\0")
    with pytest.raises(Corrupt, match=words):
        shard_header(data)
    with pytest.raises(SafetensorError):
        safetensors.deserialize(data.tobytes())


def test_an_unknown_dtype_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="F6_E2M3"):
        shard_header(_file({"a": _entry(dtype="F6_E2M3")}, b"\0\0\0\0"))


def test_a_huge_header_is_refused_by_its_length_alone() -> None:
    data = np.frombuffer((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), dtype=np.uint8)
    with pytest.raises(Corrupt, match="header of"):
        shard_header(data)


@given(st.binary(max_size=120))
def test_random_bytes_raise_nothing_unexpected(data: bytes) -> None:
    with pytest.raises(RoseMuxError):
        shard_header(np.frombuffer(b"\x05" + data, dtype=np.uint8))


def _packed(table: object, payloads: bytes = b"\1\2\3") -> Bytes:
    raw = table if isinstance(table, bytes) else packed_table(json.dumps(table).encode())
    inner = len(raw).to_bytes(8, "little") + raw + payloads
    entry = {"dtype": "U8", "shape": [len(inner)], "data_offsets": [0, len(inner)]}
    return _file({"rosemux.packed": entry}, inner)


_TABLE = {"names": ["a", "b"], "sizes": [1, 2], "checksums": ["0a", "0b"]}


def test_the_header_of_many_payloads_is_small_and_comes_back() -> None:
    sizes = {f"model.layers.{number}.mlp.experts.weight": 1 + number % 5 for number in range(5000)}
    layout = {name: TensorSpec("U8", (size,)) for name, size in sizes.items()}
    checksums = {name: f"{hash(name) & (1 << 64) - 1:032x}" for name in layout}
    files = [
        b"".join(
            bytes(chunk)
            for chunk in shard_chunks(
                layout, lambda name: bytes([sizes[name]]) * sizes[name], checksums, may_pack=packs
            )
        )
        for packs in (False, True)
    ]
    assert len(files[1]) < len(files[0]) / 5
    headers = [shard_header(np.frombuffer(file, dtype=np.uint8)) for file in files]
    assert headers[0].layout == headers[1].layout
    assert headers[0].metadata == headers[1].metadata
    data = np.frombuffer(files[1], dtype=np.uint8)
    for name, size in sizes.items():
        assert shard_data(data, headers[1], name).tobytes() == bytes([size]) * size
    assert safetensors.deserialize(files[1])[0][0] == "rosemux.packed"


def test_the_header_of_few_payloads_stays_as_any_reader_knows_it() -> None:
    layout = {"a": TensorSpec("U8", (3,))}
    file = b"".join(shard_chunks(layout, lambda _: b"abc", {"a": "0f"}, may_pack=True))
    assert [name for name, _ in safetensors.deserialize(file)] == ["a"]


def test_a_packed_header_is_read() -> None:
    data = _packed(_TABLE)
    header = shard_header(data)
    assert header.metadata == {"a": "0a", "b": "0b"}
    assert shard_data(data, header, "b").tobytes() == b"\2\3"


@pytest.mark.parametrize(
    "table",
    [
        _TABLE | {"names": ["a", "a"]},
        _TABLE | {"names": ["a", ""]},
        _TABLE | {"names": ["a", "x" * 513]},
        _TABLE | {"sizes": [1]},
        _TABLE | {"sizes": [1, 1]},
        _TABLE | {"sizes": [1, 3]},
        _TABLE | {"sizes": [-1, 4]},
        _TABLE | {"sizes": [1.5, 1.5]},
        _TABLE | {"checksums": ["0a"]},
        _TABLE | {"more": 1},
        [],
        b"",
        packed_table(b"{}")[:-1],
    ],
)
def test_a_packed_header_that_does_not_add_up_is_corrupt(table: object) -> None:
    with pytest.raises(Corrupt):
        shard_header(_packed(table))


def test_a_packed_header_of_more_than_the_limit_is_refused_unread() -> None:
    table = json.dumps(_TABLE).encode()
    shard_header(_packed(packed_table(table + b" " * (MAX_HEADER_BYTES - len(table)))))
    with pytest.raises(Corrupt, match="the limit is"):
        shard_header(_packed(packed_table(table + b" " * MAX_HEADER_BYTES)))


@pytest.mark.parametrize("length", [1 << 62, MAX_HEADER_BYTES, 1000])
def test_the_length_of_a_packed_header_is_within_the_file(length: int) -> None:
    data = _packed(_TABLE).copy()
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    data[begin : begin + 8] = np.frombuffer(length.to_bytes(8, "little"), dtype=np.uint8)
    with pytest.raises(Corrupt):
        shard_header(data)
