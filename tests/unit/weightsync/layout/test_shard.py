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
    with pytest.raises(Unsupported, match="F4"):
        shard_header(_file({"a": _entry(dtype="F4")}, b"\0\0\0\0"))


def test_a_huge_header_is_refused_by_its_length_alone() -> None:
    data = np.frombuffer((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), dtype=np.uint8)
    with pytest.raises(Corrupt, match="header of"):
        shard_header(data)


@given(st.binary(max_size=120))
def test_random_bytes_raise_nothing_unexpected(data: bytes) -> None:
    with pytest.raises(RoseMuxError):
        shard_header(np.frombuffer(b"\x05" + data, dtype=np.uint8))
