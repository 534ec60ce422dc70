"""Plain payloads are those that the streams lead to, and are read only where they are right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import UNSIGNED_NUMPY, Bits, Bytes, TensorSpec
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.codec import Encoded, Encoding, decode, encode, encode_streams
from weightsync.encoding.plain import PLAIN_BYTES, PlainDelta, plain_deltas

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


def _pair(width: int, elements: int, small: int, far: int, seed: int) -> tuple[Bits, Bits]:
    """A tensor and its successor: `small` steps of one unit, and `far` of any size."""
    random = np.random.default_rng(seed)
    kind = UNSIGNED_NUMPY[width]
    old: Bits = random.integers(0, np.iinfo(kind).max, elements, dtype=kind, endpoint=True)
    new = old.copy()
    places = random.permutation(elements)[: small + far]
    new[places[:small]] += random.choice(np.array([1, np.iinfo(kind).max], dtype=kind), small)
    new[places[small:]] = random.integers(0, np.iinfo(kind).max, far, dtype=kind)
    return old, new


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    elements = draw(st.integers(0, 1100))
    small = draw(st.integers(0, min(elements, 40)))
    far = draw(st.integers(0, min(elements - small, 30)))
    width = draw(st.sampled_from(sorted(DTYPES)))
    return _pair(width, elements, small, far, draw(st.integers(0, 1 << 30)))


def _spec(bits: Bits) -> TensorSpec:
    return TensorSpec(DTYPES[bits.itemsize], (bits.size,))


def _bytes(encoded: Encoded) -> Bytes:
    return np.frombuffer(encoded.payload, dtype=np.uint8)


def _plain_delta(payload: Bytes, spec: TensorSpec) -> PlainDelta | None:
    return plain_deltas(payload, {"w": (0, payload.size)}, {"w": spec}).get("w")


@given(pairs())
def test_a_small_tensor_is_encoded_as_its_streams_would_be(pair: tuple[Bits, Bits]) -> None:
    assert encode(*pair) == encode_streams(*pair)


def test_a_tensor_of_any_size_is_encoded_alike_around_the_bound() -> None:
    for elements in (PLAIN_BYTES // 2 - 1, PLAIN_BYTES // 2, PLAIN_BYTES // 2 + 1):
        pair = _pair(2, elements, 5, 1, seed=elements)
        assert encode(*pair) == encode_streams(*pair)


@given(st.lists(pairs(), max_size=5))
def test_payloads_in_one_file_are_read_together_and_lead_where_each_alone_does(
    given_pairs: list[tuple[Bits, Bits]],
) -> None:
    found = [(old, new, encode(old, new)) for old, new in given_pairs]
    ours = [(o, n, e) for o, n, e in found if e is not None and e.encoding is Encoding.ROSEMUX]
    file = np.concatenate([np.zeros(3, dtype=np.uint8), *(_bytes(e) for _, _, e in ours)])
    ends = (3 + np.cumsum([len(e.payload) for _, _, e in ours], dtype=np.int64)).tolist()
    places = list(zip([3, *ends[:-1]], ends, strict=False))
    specs = {str(number): _spec(old) for number, (old, _, _) in enumerate(ours)}
    deltas = plain_deltas(file, dict(zip(specs, places, strict=True)), specs)
    for name, delta in deltas.items():
        old, new, _ = ours[int(name)]
        there, opened = old.copy(), old.copy()
        assert delta.elements == old.size
        assert delta.apply(there, hashed=True) == digest_of(new)
        delta.opened(old.itemsize).apply(opened)
        assert there.tobytes() == opened.tobytes() == new.tobytes()


def test_an_rl_step_of_a_small_tensor_is_encoded_plain() -> None:
    old, new = _pair(2, 512, 5, 1, seed=3)
    encoded = encode(old, new)
    assert encoded is not None
    assert encoded.encoding is Encoding.ROSEMUX
    assert _plain_delta(_bytes(encoded), _spec(old)) is not None


def test_compressed_streams_are_left_to_the_codec() -> None:
    old = np.zeros(4096, dtype=np.uint16)
    encoded = encode_streams(old, np.ones(4096, dtype=np.uint16) * (np.arange(4096) % 8 == 0))
    assert encoded is not None
    payload = _bytes(encoded)
    assert _plain_delta(payload, _spec(old)) is None


@given(
    pairs(), st.integers(0, 1 << 30), st.integers(0, 255), st.sampled_from(["bend", "cut", "grow"])
)
def test_nothing_is_plain_that_the_codec_refuses(
    pair: tuple[Bits, Bits], where: int, value: int, damage: str
) -> None:
    old, _ = pair
    encoded = encode(*pair)
    if encoded is None or encoded.encoding is not Encoding.ROSEMUX:
        return
    payload = bytearray(encoded.payload)
    if damage == "bend":
        payload[where % len(payload)] = value
    elif damage == "cut":
        del payload[where % len(payload) :]
    else:
        payload.append(value)
    data = np.frombuffer(bytes(payload), dtype=np.uint8)
    delta = _plain_delta(data, _spec(old))
    if delta is None:
        return
    there, expected = old.copy(), old.copy()
    delta.apply(there)
    decode(Encoding.ROSEMUX, memoryview(bytes(payload)), _spec(old)).apply(expected)
    assert there.tobytes() == expected.tobytes()


def test_a_payload_of_another_tensor_is_not_plain() -> None:
    old, new = _pair(2, 512, 5, 1, seed=4)
    encoded = encode(old, new)
    assert encoded is not None
    payload = _bytes(encoded)
    for spec in (TensorSpec("BF16", (511,)), TensorSpec("F32", (512,))):
        assert _plain_delta(payload, spec) is None
        with pytest.raises(Corrupt):
            decode(encoded.encoding, payload.data, spec)
