"""Slices of a tensor: any grid puts it together again, and nothing else is taken for one."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt
from weightsync.elements.bits import Bits, TensorSpec
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.codec import Encoding, decode, encode_as
from weightsync.layout.slices import SlicedDelta, SliceRecord, Slicing, tiles


@st.composite
def grids(draw: st.DrawFn) -> list[SliceRecord]:
    """A tensor of up to three dimensions, cut anywhere along any of them."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    spans = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(0, size))) | {0, size})
        spans.append([(a, b - a) for a, b in pairwise(cuts)])
    return [
        SliceRecord("w", shape, tuple(o for o, _ in box), tuple(n for _, n in box))
        for box in product(*spans)
    ]


def _slicing(records: list[SliceRecord]) -> Slicing:
    return Slicing({record.entry: record for record in records})


def _bits(shape: tuple[int, ...], seed: int = 0) -> Bits:
    return np.random.default_rng(seed).integers(0, 1 << 16, prod(shape), dtype=np.uint16)


@given(grids())
def test_a_tensor_cut_in_any_grid_is_put_together_again(records: list[SliceRecord]) -> None:
    whole, slicing = _bits(records[0].shape), _slicing(records)
    layout = {"w": TensorSpec("BF16", records[0].shape)}
    again = np.zeros_like(whole)
    for record in records:
        box = record.box(again)
        box[...] = record.read(whole).reshape(box.shape)
    assert (again == whole).all()
    assert slicing.whole(slicing.entries(layout)) == layout


@settings(deadline=None)  # the first one compiles
@given(grids())
def test_deltas_of_slices_change_the_whole_as_the_slices_change(records: list[SliceRecord]) -> None:
    old, new, slicing = _bits(records[0].shape), _bits(records[0].shape, 1), _slicing(records)
    deltas = {}
    for entry, record in slicing.records.items():
        encoded = encode_as(Encoding.ROSEMUX, record.read(old), record.read(new))
        if encoded is not None:
            spec = TensorSpec("BF16", record.lengths)
            deltas[entry] = decode(encoded.encoding, memoryview(encoded.payload), spec)
    for entry, change in deltas.items():
        delta = SlicedDelta(slicing.records[entry], change)
        assert delta.elements == old.size
        delta.apply(old)
    assert (old == new).all()


@given(grids())
def test_a_slice_is_hashed_as_the_rank_that_held_it_hashed_it(records: list[SliceRecord]) -> None:
    whole, slicing = _bits(records[0].shape), _slicing(records)
    with ThreadPoolExecutor(2) as pool:
        layout = {"w": TensorSpec("BF16", records[0].shape)}
        found = slicing.digests(layout, {"w": whole}.__getitem__, pool)
    assert found == {e: digest_of(record.read(whole)) for e, record in slicing.records.items()}


@given(grids(), st.data())
def test_a_lost_or_doubled_slice_is_no_grid(
    records: list[SliceRecord], data: st.DataObject
) -> None:
    which = data.draw(st.sampled_from(records))
    assert tiles(records)
    assert not tiles([*records, which])
    if len(records) > 1:
        assert not tiles([record for record in records if record is not which])


HALF = {"tensor": "w", "shape": (4, 2), "offsets": (0, 0), "lengths": (2, 2)}
REST = HALF | {"offsets": (2, 0)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offsets": (1, 0)}, "do not tile"),
        ({"offsets": (3, 0)}, "do not tile"),
        ({"offsets": (-2, 0)}, "do not tile"),
        ({"offsets": (2,)}, "do not tile"),
        ({"shape": (4, 3)}, "two ways"),
        ({"shape": (1 << 40, 1 << 40)}, "over the limit"),
        ({"lengths": (2, 1)}, "is stored as"),
        ({"tensor": "v"}, "do not tile"),
        ({"tensor": "other"}, "two ways"),
    ],
)
def test_slices_from_outside_that_are_no_grid_are_corrupt(
    change: dict[str, Any], reason: str
) -> None:
    entries = {name: TensorSpec("F32", (2, 2)) for name in ("a", "b", "other")}
    records = {"a": SliceRecord(**HALF), "b": SliceRecord(**(REST | change))}
    with pytest.raises(Corrupt, match=reason):
        Slicing(records).whole(entries)


def test_a_slice_that_is_not_stored_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="is stored as None"):
        Slicing({"a": SliceRecord(**HALF)}).whole({})
