"""All assignments of a few jobs to the nodes of one pool, and the sharing that each one implies.

An assignment gives every member a mask of the group's nodes. Nodes have no names yet: two
assignments that differ only in the numbering are one. The numbering gives lower numbers to members
earlier in the list. Two members share all nodes of the narrower one or none: with a partial overlap
both wait and fewer nodes are saved. Durations do not matter here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from scheduler.rollmux.forecast.compiled import Records, compiled

Masks = tuple[int, ...]
"""Masks of the members' nodes."""
Widths = tuple[int, ...]
"""Numbers of the members' nodes."""


@cache
def assignments(widths: Widths) -> tuple[Masks, ...]:
    """Every assignment, fewest nodes first."""

    def grow(prefix: Masks) -> Iterator[Masks]:
        if len(prefix) == len(widths):
            yield prefix
            return
        for mask in _choices(_residents(prefix), widths[len(prefix)]):
            if all(_whole(mask, other) for other in prefix):
                yield from grow((*prefix, mask))

    return tuple(sorted(grow(()), key=lambda masks: (node_count(masks), masks)))


# Asked for every part of every search. The masks are of a few jobs or of a hosting's few nodes.
@lru_cache(maxsize=4096)
def numbers(mask: int) -> tuple[int, ...]:
    """The jobs or nodes of a mask."""
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)


def node_count(masks: Masks) -> int:
    return max(masks, default=0).bit_length()


@cache
def without(masks: Masks, at: int) -> Masks:
    """The assignment without one member, renumbered."""
    rest = masks[:at] + masks[at + 1 :]
    # The member that comes first is the highest digit, so that its nodes get the lowest numbers.
    kept = sorted(
        (residents for residents in _residents(rest) if residents),
        key=lambda residents: [-(residents >> member & 1) for member in range(len(rest))],
    )
    return tuple(
        sum(1 << node for node, residents in enumerate(kept) if residents >> member & 1)
        for member in range(len(rest))
    )


def sharing(masks: Sequence[int]) -> int:
    """Pairs of members that share nodes, as a mask in the order of `combinations`."""
    found = 0
    for at, (a, b) in enumerate(combinations(masks, 2)):
        if a & b:
            found |= 1 << at
    return found


def _whole(mask: int, other: int) -> bool:
    return (mask & other).bit_count() in (0, min(mask.bit_count(), other.bit_count()))


def _residents(masks: Masks) -> list[int]:
    """Masks of the nodes' members."""
    return [
        sum(1 << member for member, mask in enumerate(masks) if mask >> node & 1)
        for node in range(node_count(masks))
    ]


def _choices(residents: list[int], width: int) -> Iterator[int]:
    """Nodes that one more member may take: of nodes with the same residents, the lowest ones."""
    alike: dict[int, list[int]] = {}
    for node, inside in enumerate(residents):
        alike.setdefault(inside, []).append(node)
    classes = list(alike.values())

    def take(at: int, left: int) -> Iterator[int]:
        if at == len(classes):
            yield sum(1 << len(residents) + new for new in range(left))
            return
        for count in range(min(left, len(classes[at])) + 1):
            taken = sum(1 << node for node in classes[at][:count])
            for rest in take(at + 1, left - count):
                yield taken | rest

    yield from take(0, width)


@dataclass(frozen=True, slots=True, eq=False)
class AssignmentTable:
    """All assignments of members of given widths, as arrays."""

    choices: tuple[Masks, ...]
    nodes: npt.NDArray[np.int64]
    """`[choice]`: how many."""
    residents: npt.NDArray[np.int64]
    """`[choice, node]`: the node's members as a mask; 0 for a missing node."""
    sharing: npt.NDArray[np.int64]
    """`[choice]`: pairs of members that share nodes, as a mask in the order of `combinations`."""
    widths: Widths


@cache
def table(widths: Widths) -> AssignmentTable:
    choices = assignments(widths)
    most = max(node_count(masks) for masks in choices)
    residents = np.zeros((len(choices), most), dtype=np.int64)
    for at, masks in enumerate(choices):
        inside = _residents(masks)
        residents[at, : len(inside)] = inside
    return AssignmentTable(
        choices=choices,
        nodes=np.array([node_count(masks) for masks in choices], dtype=np.int64),
        residents=residents,
        sharing=np.array([sharing(masks) for masks in choices], dtype=np.int64),
        widths=widths,
    )


@cache
def connected(rollout: Widths, training: Widths) -> npt.NDArray[np.bool_]:
    """`[rollout choice, training choice]`: whether sharing nodes makes one group of all members."""
    count = len(rollout)
    left, right = table(rollout).sharing, table(training).sharing
    reached = np.ones((len(left), len(right)), dtype=np.int64)
    for _ in range(count - 1):
        for pair, (i, j) in enumerate(combinations(range(count), 2)):
            both = 1 << i | 1 << j
            shares = (left[:, None] | right) >> pair & 1 != 0
            touched = shares & (reached & both != 0)
            reached = np.where(touched, reached | both, reached)
    return np.asarray(reached == (1 << count) - 1)


Side = tuple[Records, Records, Records, Records]
"""One pool: `nodes`, `residents` and `sharing` of a table, and which candidates fit one node."""


@compiled
def affordable(
    left: Side,
    right: Side,
    linked: Records,
    inside: Records,
    refused: tuple[int, int, int],
    present: tuple[int, int, int],
    per_node: tuple[float, float],
    between: tuple[float, float],
) -> tuple[Records, Records, Records, Records]:
    """Prices, indices in both tables, and pairs that share as now, of fitting assignments to one
    group that are not refused.

    `inside` maps a mask of members to a mask of candidates. `refused`: pairs that may not share
    nodes of both pools, of the first only, and of the second only. `present`: pairs in one group
    now, and those that share nodes of either pool.
    """
    rows, columns = _fitting(left, inside), _fitting(right, inside)
    prices = np.empty(rows.size * columns.size)
    at = np.empty((3, prices.size), dtype=np.int64)
    count = 0
    for row in rows:
        rollout = left[2][row]
        for column in columns:
            training = right[2][column]
            price = left[0][row] * per_node[0] + right[0][column] * per_node[1]
            if not between[0] <= price < between[1] or not linked[row, column]:
                continue
            if rollout & training & refused[0] or rollout & ~training & refused[1]:
                continue
            if ~rollout & training & refused[2]:
                continue
            prices[count], at[0, count], at[1, count] = price, row, column
            at[2, count] = present[0] & ~(rollout ^ present[1]) & ~(training ^ present[2])
            count += 1
    return prices[:count], at[0, :count], at[1, :count], at[2, :count]


@compiled
def _fitting(side: Side, inside: Records) -> Records:
    """Rows of the assignments in which every node has room for its members."""
    residents, fits = side[1], side[3]
    found = np.empty(len(residents), dtype=np.int64)
    count = 0
    for row in range(len(residents)):
        room = True
        for node in range(residents.shape[1]):
            room = room and fits[inside[residents[row, node]]]
        if room:
            found[count] = row
            count += 1
    return found[:count]
