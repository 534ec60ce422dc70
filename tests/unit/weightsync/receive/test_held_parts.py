"""The byte ranges of a held part, for any slices of the tensor and any held box."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import TensorSpec, bytes_of
from weightsync.encoding.codec import encode
from weightsync.encoding.delta import DenseDelta, XorDelta, checked_apply
from weightsync.layout.slices import SliceRecord, Slicing
from weightsync.reading.memory_budget import MIN_STAGING_BYTES, MemoryBudget
from weightsync.reading.spool import MemoryStaging, Spool
from weightsync.receive import held_parts as subject
from weightsync.receive.full_state import FullState, StoredEntry, advance
from weightsync.receive.held_parts import (
    Names,
    TensorParallel,
    bounds,
    held_parts,
    placed,
    runs,
    whole_box,
)
from weightsync.receive.stored_delta import StoredDelta
from weightsync.transport.ranges import ByteSpan

Cuts = list[list[int]]


class Boxes:
    """Holds boxes of every tensor."""

    def __init__(self, *spans: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.spans = spans

    def boxes(self, name: str, spec: TensorSpec) -> list[SliceRecord]:
        return [SliceRecord(name, spec.shape, offsets, lengths) for offsets, lengths in self.spans]


@st.composite
def grids(draw: st.DrawFn, most_boxes: int = 3) -> tuple[tuple[int, ...], Cuts, Boxes]:
    """A shape, a trainer's cuts of it, and boxes of it that a holder has."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]

    def span() -> tuple[tuple[int, ...], tuple[int, ...]]:
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        return offsets, tuple(
            draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)
        )

    spans = {span() for _ in range(draw(st.integers(1, most_boxes)))}
    return shape, cuts, Boxes(*sorted(spans))


def sliced(shape: tuple[int, ...], cuts: Cuts) -> Slicing:
    records = {}
    for spans in product(*(list(pairwise(places)) for places in cuts)):
        record = SliceRecord("w", shape, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        records[record.entry] = record
    return Slicing({} if len(records) == 1 else records)


@given(grid=grids())
def test_held_parts_are_assembled_from_any_slices(
    grid: tuple[tuple[int, ...], Cuts, Boxes],
) -> None:
    shape, cuts, boxes = grid
    whole = np.arange(np.prod(shape), dtype=np.uint16)
    slicing, layout = sliced(shape, cuts), {"w": TensorSpec("BF16", shape)}
    parts = held_parts(layout, slicing, boxes)
    spool = Spool(MemoryBudget(MIN_STAGING_BYTES))
    entries = {}
    for entry, held in parts.parts.items():
        record = slicing.records.get(entry) or whole_box("w", layout["w"])
        data = bytes_of(record.read(whole))
        place = spool.stage(data.size + 3)
        # Only the requested bytes are present.
        for span in (span for part in held for span in runs(part.within, 2)):
            place.write(span.start + 3, data[span.start : span.stop])
        entries[entry] = StoredEntry(place, 3, parts.entries[entry])
    state = FullState(parts.layout(), parts.by_tensor(), entries)
    assert len(parts.boxes) == len(boxes.spans)
    for name, box in parts.boxes.items():
        assert np.array_equal(state[name], box.read(whole))


@given(grid=grids(), seed=st.integers(0, 9))
def test_a_delta_changes_a_part_as_it_changes_the_whole(
    grid: tuple[tuple[int, ...], Cuts, Boxes], seed: int
) -> None:
    shape, cuts, boxes = grid
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, np.prod(shape), dtype=np.uint16)
    slicing, layout = sliced(shape, cuts), {"w": TensorSpec("BF16", shape)}
    parts = held_parts(layout, slicing, boxes)
    held = {name: box.read(old).copy() for name, box in parts.boxes.items()}
    new = old.copy()
    for entry, spec in parts.entries.items():
        stored = slicing.records.get(entry) or whole_box("w", layout["w"])
        changed = random.integers(0, 1 << 16, spec.elements, dtype=np.uint16)
        delta = XorDelta(changed) if seed % 2 else DenseDelta(changed)
        here = parts.parts.get(entry, ())
        for part, change in zip(here, placed(here, delta, spec), strict=True):
            checked_apply(change, held[part.of.tensor])
        piece = stored.read(new).copy()
        checked_apply(delta, piece)
        stored.box(new)[...] = piece.reshape(stored.lengths)
    for name, box in parts.boxes.items():
        assert np.array_equal(held[name], box.read(new))


@given(grid=grids(), seed=st.integers(0, 9), on_disk=st.booleans())
def test_a_stored_delta_changes_the_boxes_of_a_full_checkpoint_once(
    grid: tuple[tuple[int, ...], Cuts, Boxes], seed: int, on_disk: bool
) -> None:
    """Boxes may overlap, and lie between the columns of each other."""
    shape, cuts, boxes = grid
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, np.prod(shape), dtype=np.uint16)
    new = old + random.integers(0, 2, old.size, dtype=np.uint16)
    slicing, layout = sliced(shape, cuts), {"w": TensorSpec("BF16", shape)}
    parts = held_parts(layout, slicing, boxes)
    budget = MemoryBudget(MIN_STAGING_BYTES)
    if on_disk:
        budget.keep(budget.lent_bytes)
    entries, deltas = {}, {}
    for entry in parts.parts:
        record = slicing.records.get(entry) or whole_box("w", layout["w"])
        spec = parts.entries[entry]
        before, after = record.read(old).copy(), record.read(new).copy()
        entries[entry] = StoredEntry(Spool(budget).stage(spec.size_bytes), 0, spec)
        entries[entry].file.write(0, bytes_of(before))
        if (encoded := encode(before, after)) is not None:
            payload = np.frombuffer(encoded.payload, np.uint8)
            file, span = MemoryStaging(payload.size), ByteSpan(0, payload.size)
            file.write(0, payload)
            deltas[entry] = [
                StoredDelta(file=file, span=span, encoding=encoded.encoding, spec=spec, what=entry)
            ]
    with ThreadPoolExecutor(1) as pool:
        advance(entries, deltas, parts.parts, pool, budget)
    state = FullState(parts.layout(), parts.by_tensor(), entries)
    for name, box in parts.boxes.items():
        assert np.array_equal(state[name], box.read(new))


@given(grid=grids(most_boxes=1), small=st.integers(1, 200))
def test_runs_hold_every_byte_of_a_box_and_little_else(
    grid: tuple[tuple[int, ...], Cuts, Boxes], small: int
) -> None:
    shape, _, boxes = grid
    (record,) = boxes.boxes("w", TensorSpec("BF16", shape))
    wanted = {int(at) for at in record.read(np.arange(np.prod(shape), dtype=np.uint64))}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subject, "MIN_RUN_BYTES", small)
        spans = list(runs(record, 2))
    read = {at // 2 for span in spans for at in range(span.start, span.stop)}
    around = bounds(record, 2)
    assert wanted <= read <= set(range(around.start // 2, around.stop // 2))
    if small == 1:
        assert read == wanted


def test_ranks_share_a_tensor_out() -> None:
    spec = TensorSpec("BF16", (10, 6))
    rows = [
        TensorParallel(rank=rank, ranks=4, dim_of=lambda _: 0).boxes("w", spec)[0]
        for rank in range(4)
    ]
    assert [(box.offsets[0], box.lengths[0]) for box in rows] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    both = TensorParallel(
        rank=1,
        ranks=2,
        dim_of=lambda name: 1 if name == "w" else None,
        within=Names("wv".__contains__),
    )
    assert both.boxes("w", spec) == (SliceRecord("w", (10, 6), (0, 3), (10, 3)),)
    assert both.boxes("v", spec) == (whole_box("v", spec),)
    assert not both.boxes("u", spec)
    one = TensorParallel(rank=3, ranks=4, dim_of=lambda _: 0)
    assert not one.boxes("w", TensorSpec("BF16", (3,)))


def test_a_part_that_is_none_is_refused() -> None:
    layout = {"w": TensorSpec("BF16", (4, 4))}
    for offsets, lengths in [((0, 1), (4, 4)), ((-1, 0), (1, 1)), ((0, 0), (0, 4)), ((0,), (4,))]:
        with pytest.raises(ConfigError, match="has no part"):
            held_parts(layout, Slicing(), Boxes((offsets, lengths)))
    with pytest.raises(ConfigError, match="nothing"):
        held_parts(layout, Slicing(), Names(lambda _: False))
    with pytest.raises(ConfigError, match="no dimension 2"):
        held_parts(layout, Slicing(), TensorParallel(rank=0, ranks=2, dim_of=lambda _: 2))
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        TensorParallel(rank=2, ranks=2, dim_of=lambda _: 0)
    with pytest.raises(ConfigError, match="two parts"):
        held_parts(layout, Slicing(), Boxes(((0, 0), (1, 4)), ((0, 0), (1, 4))))
    with pytest.raises(ConfigError, match=r"two parts .* named w\[0:1, :\]"):
        held_parts(
            layout | {"w[0:1, :]": layout["w"]},
            Slicing(),
            Boxes(((0, 0), (1, 4)), ((1, 0), (1, 4))),
        )
