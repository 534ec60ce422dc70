"""The verdict on the words of all ranks, for any division of tensors."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.elements.bits import Bits
from weightsync.layout.box_sums import box_sum
from weightsync.layout.slices import SliceRecord, Slicing
from weightsync.receive.rank_sums import (
    RankSums,
    SumJudge,
    SumVerdict,
    published_sums,
    rank_sums,
    without_boxes,
)

Held = dict[str, tuple[SliceRecord, Bits]]
"""A rank's boxes by its names for them, and their bits."""


def words(held: Held, published: Mapping[str, int]) -> RankSums:
    sums = {name: box_sum(bits, box) for name, (box, bits) in held.items()}
    return rank_sums({name: box for name, (box, _) in held.items()}, sums, published)


@st.composite
def engines(draw: st.DrawFn) -> tuple[dict[str, Bits], list[Held]]:
    """Tensors, and ranks that divide each into a grid; some boxes are on several ranks."""
    ranks = draw(st.integers(2, 5))
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    tensors: dict[str, Bits] = {}
    held: list[Held] = [{} for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        name = f"layers.{number}"
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        bits = random.integers(0, 1 << 16, prod(shape), dtype=np.uint16)
        tensors[name] = bits
        cuts = [
            sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
        ]
        spans = [[*pairwise(cut)] for cut in cuts]
        for place, box in enumerate(product(*spans)):
            record = SliceRecord(
                name, shape, tuple(a for a, _ in box), tuple(b - a for a, b in box)
            )
            owner = draw(st.integers(0, ranks - 1))
            copies = {owner, draw(st.integers(0, ranks - 1))} if place % 2 else {owner}
            for rank in copies:
                held[rank][record.entry] = (record, record.read(bits).copy())
    return tensors, held


@given(engines(), st.data())
def test_exactly_the_tensors_of_changed_boxes_are_wrong(
    engine: tuple[dict[str, Bits], list[Held]], data: st.DataObject
) -> None:
    tensors, held = engine
    whole = {
        name: SliceRecord(name, (bits.size,), (0,), (bits.size,)) for name, bits in tensors.items()
    }
    published = {name: box_sum(bits, whole[name]) for name, bits in tensors.items()}
    judge = SumJudge()
    verdict = judge.judged([words(rank, published) for rank in held])
    assert verdict == SumVerdict(verified=len(tensors))
    struck = set()
    boxes = [part for rank in held for part in rank.values()]
    for box, bits in data.draw(st.lists(st.sampled_from(boxes), min_size=1, max_size=3)):
        bits[data.draw(st.integers(0, bits.size - 1))] = data.draw(st.integers(0, 0xFFFF))
        if (box.read(tensors[box.tensor]) != bits).any():
            struck.add(box.tensor)
    told = [without_boxes(words(rank, published), judge.known) for rank in held]
    assert all(rank.boxes is None for rank in told)
    verdict = judge.judged(told)
    # A box drawn twice may be whole again.
    differing = {box.tensor for box, bits in boxes if (box.read(tensors[box.tensor]) != bits).any()}
    assert set(verdict.wrong) == differing <= struck
    assert verdict.verified == len(tensors) - len(differing)


def _halves(bits: Bits) -> list[Held]:
    boxes = [SliceRecord("t", (8,), (4 * rank,), (4,)) for rank in range(2)]
    return [{"t": (box, box.read(bits))} for box in boxes]


def _judged(ranks: Sequence[RankSums]) -> SumVerdict:
    return SumJudge().judged(ranks)


def test_boxes_that_leave_a_gap_are_unseen() -> None:
    """A rank of another engine has the rest: nothing is known, nothing is refused."""
    bits = np.arange(8, dtype=np.uint16)
    first, second = _halves(bits)
    assert _judged([words(first, {"t": 5}), words({}, {})]) == SumVerdict(unseen=1)
    assert _judged([words(first, {}), words(second, {})]) == SumVerdict(unseen=1)
    assert _judged([words(first, {"t": 5}), words(second, {})]) == SumVerdict(unseen=1)
    assert _judged([words({}, {}), words({}, {})]) == SumVerdict()


def test_ranks_that_read_different_versions_are_wrong() -> None:
    bits = np.arange(8, dtype=np.uint16)
    right = box_sum(bits, SliceRecord("t", (8,), (0,), (8,)))
    first, second = _halves(bits)
    assert _judged([words(first, {"t": right}), words(second, {"t": right})]).verified == 1
    assert _judged([words(first, {"t": right}), words(second, {"t": 5})]).wrong == ("t",)


def test_a_place_that_is_all_of_a_tensor_is_judged_beside_parts_of_it() -> None:
    """A tied head: one rank has all of the embedding, and each its rows of it."""
    bits = np.arange(8, dtype=np.uint16)
    whole = SliceRecord("t", (8,), (0,), (8,))
    published = {"t": box_sum(bits, whole)}
    first, second = _halves(bits)
    ranks = [first | {"t[:]": (whole, bits)}, second]
    assert _judged([words(rank, published) for rank in ranks]) == SumVerdict(verified=1)
    other = bits.copy()
    other[7] ^= 1
    ranks[0]["t[:]"] = (whole, other)
    assert _judged([words(rank, published) for rank in ranks]).wrong == ("t",)
    ranks = [{"t[:]": (whole, bits)}, {"t[:]": (whole, bits)}]
    assert _judged([words(rank, published) for rank in ranks]) == SumVerdict(verified=1)


def test_a_fault_of_one_rank_is_the_verdict() -> None:
    verdict = _judged([RankSums(), RankSums(fault="Stale: gone")])
    assert verdict.refusal == "another rank refuses it: Stale: gone"


def test_slices_of_a_trainer_s_ranks_add_up_to_a_tensor_if_all_are_known() -> None:
    bits = np.arange(12, dtype=np.uint16)
    slices = {f"t[{r}]": SliceRecord("t", (3, 4), (r, 0), (1, 4)) for r in range(3)}
    sums = {entry: box_sum(box.read(bits), box) for entry, box in slices.items()}
    whole = box_sum(bits, SliceRecord("t", (3, 4), (0, 0), (3, 4)))
    assert published_sums(Slicing(slices), sums | {"norm": 7}) == {"t": whole, "norm": 7}
    del sums["t[1]"]
    assert published_sums(Slicing(slices), sums) == {}


def test_a_judge_of_many_lists_of_boxes_keeps_those_that_a_rank_left_out() -> None:
    judge, bits = SumJudge(), np.arange(4, dtype=np.uint16)

    def half(name: str, first: int) -> RankSums:
        box, whole = SliceRecord(name, (4,), (first,), (2,)), SliceRecord(name, (4,), (0,), (4,))
        return words({name: (box, bits[first : first + 2])}, {name: box_sum(bits, whole)})

    steady = half("first", 0)
    judge.judged([steady, half("first", 2)])
    for number in range(300):
        other = half(f"t{number}", 2)
        found = judge.judged([without_boxes(steady, judge.known), other])
        assert found.unseen == 2, "neither half has its other"
