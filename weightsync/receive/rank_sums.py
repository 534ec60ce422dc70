"""Verifies what the ranks of one engine hold of a version, by sums that add up.

No rank can compare its box of a tensor with what the trainer published: digests are of whole
tensors. Each rank gives the sum of each of its boxes (box_sums.py); where the boxes of all ranks
divide a tensor, they must add up to the sum that the trainer published of it. A box that several
ranks have counts once and must be the same on each. A box that is all of a tensor has its sum by
itself. Pure: the caller carries the words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.layout.box_sums import added_up
from weightsync.layout.slices import SliceRecord, Slicing, tiles

Words: TypeAlias = npt.NDArray[np.uint64]
Indices: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
_MAX_KNOWN = 256
"""Lists of boxes that a judge remembers: each rank has one, and another after its loader ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums:
    """One rank's words on a version that it has prepared."""

    boxes_id: str = ""
    boxes: tuple[SliceRecord, ...] | None = ()
    """The boxes that are a part of a tensor, or one of several places of it; None where the
    judge knows them by their id."""
    sums: Words = field(default_factory=lambda: np.empty(0, np.uint64))
    """Sum of each box."""
    published: Words = field(default_factory=lambda: np.empty(0, np.uint64))
    """Published sum of the whole tensor of each box."""
    is_published: Flags = field(default_factory=lambda: np.empty(0, np.bool_))
    """Whether the store has a sum of each box's tensor; where not, both words are 0."""
    fault: str = ""
    """Why the rank cannot prepare the version; it then has no sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumVerdict:
    wrong: tuple[str, ...] = ()
    """Tensors that differ from the published ones."""
    verified: int = 0
    """Tensors in boxes that are the published ones."""
    unseen: int = 0
    """Tensors in boxes that nothing could be compared with: the store has no sum of them, or the
    boxes do not divide them."""
    fault: str = ""
    """Why a rank cannot take the version."""

    @property
    def refusal(self) -> str:
        """Why the version is not loaded; empty if it is."""
        if self.fault:
            return f"another rank refuses it: {self.fault}"
        if not self.wrong:
            return ""
        more = f" and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
        return f"{self.wrong[0]}{more} in this engine's ranks would not be the published state"


def rank_sums(
    boxes: Mapping[str, SliceRecord], sums: Mapping[str, int], published: Mapping[str, int]
) -> RankSums:
    """`boxes`: held in part, by the holder's names; `sums`: by these names; `published`: by tensor,
    as far as it is known."""
    names = sorted(boxes)
    found = tuple(boxes[name] for name in names)
    seen = [name in sums and boxes[name].tensor in published for name in names]
    return RankSums(
        boxes_id=str(xxhash.xxh3_128_hexdigest(repr(found).encode())),
        boxes=found,
        sums=np.array([sums[n] if s else 0 for n, s in zip(names, seen, strict=True)], np.uint64),
        published=np.array(
            [published[boxes[n].tensor] if s else 0 for n, s in zip(names, seen, strict=True)],
            np.uint64,
        ),
        is_published=np.array(seen, np.bool_),
    )


def published_sums(slicing: Slicing, sums: Mapping[str, int]) -> dict[str, int]:
    """The sum of each tensor of a version from those of its entries, as far as all are known."""
    cut = slicing.by_tensor()
    slices = {entry for records in cut.values() for entry, _ in records}
    whole = {name: known for name, known in sums.items() if name not in slices}
    for name, records in cut.items():
        if all(entry in sums for entry, _ in records):
            whole[name] = added_up(sums[entry] for entry, _ in records)
    return whole


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the boxes of all ranks, one rank's after another's, divide their tensors."""

    tensors: tuple[str, ...]
    of: Indices
    """The tensor of each box."""
    counted: Flags
    """Boxes that are added up: those that divide their tensor, each once."""
    same_as: Indices
    """The first box with the same place."""
    is_whole: Flags
    is_divided: Flags
    """Whether boxes divide each tensor, beside those that are all of it."""


class SumJudge:
    """Remembers which boxes the ranks have; carries no message."""

    def __init__(self) -> None:
        self._boxes: dict[str, tuple[SliceRecord, ...]] = {}
        self._plan: tuple[tuple[str, ...], _Plan] | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """Ids of the boxes that a rank need not give again."""
        return tuple(self._boxes)

    def judged(self, ranks: Sequence[RankSums]) -> SumVerdict:
        """The verdict on what all ranks of one engine have prepared."""
        if faults := [rank.fault for rank in ranks if rank.fault]:
            return SumVerdict(fault=faults[0])
        plan = self._plan_of(ranks)
        if not plan.tensors:
            return SumVerdict()
        sums = np.concatenate([rank.sums for rank in ranks])
        published = np.concatenate([rank.published for rank in ranks])
        known: Flags = np.concatenate([rank.is_published for rank in ranks])
        first = np.zeros(len(plan.tensors), np.int64)
        first[plan.of[::-1]] = np.arange(plan.of.size)[::-1]
        trainers = published[first]
        differs = published != trainers[plan.of]
        differs |= sums != sums[plan.same_as]
        differs |= plan.is_whole & (sums != published)
        totals = np.zeros(len(plan.tensors), np.uint64)
        np.add.at(totals, plan.of[plan.counted], sums[plan.counted])
        wrong = _marked(plan, differs) | (plan.is_divided & (totals != trainers))
        # Where a rank's way to the version has no sum, none of its boxes has one.
        unknown = _marked(plan, np.logical_not(known))
        seen = (plan.is_divided | ~_marked(plan, ~plan.is_whole)) & ~unknown
        return SumVerdict(
            wrong=tuple(plan.tensors[i] for i in np.flatnonzero(wrong & seen)),
            verified=int(np.count_nonzero(seen & ~wrong)),
            unseen=int(np.count_nonzero(~seen)),
        )

    def _plan_of(self, ranks: Sequence[RankSums]) -> _Plan:
        for rank in ranks:
            if rank.boxes is not None:
                self._boxes[rank.boxes_id] = rank.boxes
        ids = tuple(rank.boxes_id for rank in ranks)
        if self._plan is None or self._plan[0] != ids:
            self._plan = ids, _plan([box for id_ in ids for box in self._boxes[id_]])
        if len(self._boxes) > _MAX_KNOWN:
            # Not before the plan: a rank leaves out boxes that were known when it was asked.
            self._boxes = {id_: self._boxes[id_] for id_ in ids}
        return self._plan[1]


def _marked(plan: _Plan, boxes: Flags) -> Flags:
    """The tensors that one of these boxes is of."""
    marked = np.zeros(len(plan.tensors), np.bool_)
    marked[plan.of[boxes]] = True
    return marked


def _plan(boxes: Sequence[SliceRecord]) -> _Plan:
    tensors = tuple(sorted({box.tensor for box in boxes}))
    number = {name: index for index, name in enumerate(tensors)}
    first: dict[SliceRecord, int] = {}
    same_as = np.array([first.setdefault(box, i) for i, box in enumerate(boxes)], np.int64)
    is_whole = np.array([box.is_whole for box in boxes], np.bool_)
    parts: dict[str, list[SliceRecord]] = {name: [] for name in tensors}
    for box in first:
        if not box.is_whole:
            parts[box.tensor].append(box)
    is_divided = np.array([bool(found) and tiles(found) for found in parts.values()], np.bool_)
    of = np.array([number[box.tensor] for box in boxes], np.int64)
    is_first = same_as == np.arange(len(boxes))
    counted = is_first & ~is_whole & (is_divided[of] if boxes else is_first)
    return _Plan(tensors, of, counted, same_as, is_whole, is_divided)


def without_boxes(sums: RankSums, known: Sequence[str]) -> RankSums:
    """The same words for a judge that knows these boxes."""
    return replace(sums, boxes=None) if sums.boxes_id in known else sums
