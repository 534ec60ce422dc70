"""A delta of a box changes the box as the whole delta changes the whole tensor, for every form."""

from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from weightsync.elements import box_positions
from weightsync.elements.bits import UNSIGNED_NUMPY, Bits, TensorSpec
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.codec import Encoding, decode, encode_as
from weightsync.encoding.delta import Delta, SparseDelta, apply_all, decode_rosemux
from weightsync.encoding.grouped import GROUPS, grouped_payload
from weightsync.encoding.plain import plain_deltas, plain_payload
from weightsync.encoding.planes import planes_payload
from weightsync.encoding.sparse import FORMAT, compared
from weightsync.encoding.varint import varint
from weightsync.layout.box_delta import box_delta, box_deltas, warm_up
from weightsync.layout.slices import SliceRecord

DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}
FORMS = ("dense", "xor", "overwrite", "sparse", "planes", "plain", "groups")

SHARES = {"plain": 0.003, "groups": 0.3}
"""Payloads in groups have few wide differences, those that are read as they are few changes."""


@st.composite
def boxes(draw: st.DrawFn) -> SliceRecord:
    """A box of a tensor of up to four dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 24), max_size=4)))
    if prod(shape) > 6000:
        shape = shape[:2]
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return SliceRecord("w", shape, offsets, lengths)


def _states(elements: int, width: int, share: float, seed: int) -> tuple[Bits, Bits]:
    """Changes by one unit, by a few, and by anything."""
    random = np.random.default_rng(seed)
    kind = UNSIGNED_NUMPY[width]
    old = random.integers(0, 1 << 8 * width, elements, dtype=kind)
    step = random.choice(
        [1, -1, 5, -60, 1 << (8 * width - 2)], elements, p=[0.4, 0.4, 0.1, 0.09, 0.01]
    )
    hit = random.random(elements) < share
    return old, np.where(hit, old + step.astype(np.int64).astype(kind), old)


def _delta(form: str, old: Bits, new: Bits, spec: TensorSpec) -> Delta | None:
    """The change in a form; None where there is none in it."""
    if form in {"dense", "xor", "overwrite"}:
        encoded = encode_as(Encoding(form), old, new)
        return encoded and decode(encoded.encoding, memoryview(encoded.payload), spec)
    if form == "plain":
        plain = np.frombuffer(plain_payload(old, new).payload, np.uint8)
        return plain_deltas(plain, {"w": (0, plain.size)}, {"w": spec}).get("w")
    if form == "planes":
        payload = planes_payload(old, new)
        return decode_rosemux(memoryview(payload), spec)
    streams = compared(old, new)
    if form == "groups":
        grouped = grouped_payload(old.size, streams)
        return decode_rosemux(memoryview(grouped), spec) if grouped else None
    return SparseDelta(
        old.size,
        streams.gaps.copy(),
        streams.signs.copy(),
        streams.far_gaps.copy(),
        streams.far_planes.copy(),
    )


@settings(deadline=None)  # the first one compiles
@pytest.mark.parametrize("form", FORMS)
@given(
    box=boxes(),
    width=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 1 << 16),
)
@example(box=SliceRecord("w", (40, 700), (3, 255), (30, 300)), width=2, share=0.05, seed=1)
@example(box=SliceRecord("w", (3, 4, 900), (1, 1, 0), (2, 2, 900)), width=2, share=0.2, seed=1)
def test_a_box_changes_as_the_whole_does(
    form: str, box: SliceRecord, width: int, share: float, seed: int
) -> None:
    spec = TensorSpec(DTYPES[width], box.shape)
    old, new = _states(spec.elements, width, share, seed)
    delta = _delta(form, old, new, spec)
    if delta is None:
        return
    cut = box_delta(delta, box, width)
    held = box.read(old).copy()
    wanted = box.read(new)
    digest = apply_all([cut], held, hashed=True)
    assert np.array_equal(held, wanted)
    assert digest == digest_of(wanted)


def test_every_form_is_one_that_the_codec_reads() -> None:
    """The forms above are the forms there are."""
    spec = TensorSpec("BF16", (40, 100))
    kinds = {
        type(_delta(form, *_states(spec.elements, 2, SHARES.get(form, 0.05), 3), spec)).__name__
        for form in FORMS
    }
    assert kinds == {
        "DenseDelta",
        "XorDelta",
        "OverwriteDelta",
        "SparseDelta",
        "PlanesDelta",
        "PlainDelta",
        "GroupedDelta",
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_delta_keeps_nothing_of_the_rest(form: str) -> None:
    """Rows that a rank holds of a large tensor keep neither its payload nor its other rows."""
    spec = TensorSpec("BF16", (64, 64))
    old, new = _states(spec.elements, 2, SHARES.get(form, 0.3), 3)
    delta = _delta(form, old, new, spec)
    assert delta is not None
    cut = box_delta(delta, SliceRecord("w", (64, 64), (16, 0), (8, 64)), 2)
    for name in cut.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(cut, name)
        if isinstance(value, np.ndarray):
            base = value if value.base is None else value.base
            assert base.nbytes <= spec.size_bytes / 4, name


def test_a_warm_process_compiles_nothing_for_a_version() -> None:
    """The loops take numbers of one width, whatever the tensor's."""
    warm_up()
    loops = [loop for loop in vars(box_positions).values() if hasattr(loop, "signatures")]
    before = [len(loop.signatures) for loop in loops]
    assert len(loops) >= 5
    for form in ("sparse", "groups", "plain", "overwrite"):
        for width in (1, 2, 4, 8):
            spec = TensorSpec(DTYPES[width], (64, 64))
            old, new = _states(spec.elements, width, SHARES.get(form, 0.3), 3)
            delta = _delta(form, old, new, spec)
            if delta is not None:
                decoded = box_delta(delta, SliceRecord("w", (64, 64), (16, 0), (8, 64)), width)
                assert decoded.elements == 8 * 64
    assert [len(loop.signatures) for loop in loops] == before


def unary(gap: int) -> bytes:
    """A number's high part in a group without low bits: `gap` zeros, then a one."""
    bits = np.zeros((gap // 64 + 1) * 64, np.uint8)
    bits[gap] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_a_difference_wider_than_an_element_is_refused_for_a_box() -> None:
    """It would be cut to the element before its sign is read, and behind it for a whole tensor."""
    positions, codes = unary(10), unary(506)
    sizes = (0, 0, 0, len(positions) // 8, 0, len(codes) // 8)
    head = bytes((FORMAT, GROUPS, 1)) + varint(64)
    body = b"".join(map(varint, (0, 1, 0, *sizes))) + bytes(1) + positions + codes
    delta = decode_rosemux(memoryview(head + body), TensorSpec("U8", (64,)))
    with pytest.raises(Corrupt, match="wider than an element"):
        box_delta(delta, SliceRecord("w", (64,), (0,), (32,)), 1)


@pytest.mark.parametrize("form", ["sparse", "groups"])
def test_the_boxes_of_many_experts_take_one_pass_over_the_changes(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, rows, columns = 32, 8, 64
    spec = TensorSpec("BF16", (experts, rows, columns))
    old, new = _states(spec.elements, 2, 0.3, seed=1)
    delta = _delta(form, old, new, spec)
    assert delta is not None
    looked_at = 0
    within_box = box_positions.within_box

    def counted(positions: Bits, *rest: Bits) -> int:
        nonlocal looked_at
        looked_at += positions.size
        return within_box(positions, *rest)

    monkeypatch.setattr(box_positions, "within_box", counted)
    boxes = [
        SliceRecord("w", spec.shape, (expert, at, 0), (1, rows // 2, columns))
        for expert in range(experts)
        for at in (0, rows // 2)
    ]
    for box, cut in zip(boxes, box_deltas(delta, boxes, 2), strict=True):
        held = box.read(old).copy()
        apply_all([cut], held)
        assert np.array_equal(held, box.read(new))
    assert looked_at == np.count_nonzero(old != new)
