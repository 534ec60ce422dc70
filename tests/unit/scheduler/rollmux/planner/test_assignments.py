"""Assignments of members to a pool's nodes: every way once, none twice under other numbers."""

from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.rollmux.planner.assignments import (
    Masks,
    assignments,
    connected,
    node_count,
    table,
    without,
)

widths = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)


def _up_to_numbering(masks: Masks) -> Masks:
    """The least of all renumberings: the same for two assignments that differ in numbers alone."""
    count = node_count(masks)
    return min(
        tuple(sum(1 << order[node] for node in range(count) if mask >> node & 1) for mask in masks)
        for order in permutations(range(count))
    )


def _naive(wanted: tuple[int, ...]) -> set[Masks]:
    """Every choice of nodes, whole sharing or none, numbers forgotten."""
    nodes = range(sum(wanted))
    found = set()
    for chosen in product(*(combinations(nodes, width) for width in wanted)):
        used = sorted({node for one in chosen for node in one})
        masks = tuple(sum(1 << used.index(node) for node in one) for one in chosen)
        whole = all(
            (a & b).bit_count() in (0, min(a.bit_count(), b.bit_count()))
            for a, b in combinations(masks, 2)
        )
        if whole:
            found.add(_up_to_numbering(masks))
    return found


@pytest.mark.parametrize("wanted", [(1,), (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2), (3, 1, 2)])
def test_every_assignment_is_there_once(wanted: tuple[int, ...]) -> None:
    found = [_up_to_numbering(masks) for masks in assignments(wanted)]
    assert len(found) == len(set(found))
    assert set(found) == _naive(wanted)


def test_single_nodes_are_the_partitions_of_the_members() -> None:
    assert [len(assignments((1,) * count)) for count in range(1, 6)] == [1, 2, 5, 15, 52]


@settings(max_examples=40, deadline=None)
@given(widths, st.data())
def test_an_assignment_without_a_member_is_one_of_the_others_assignments(
    wanted: tuple[int, ...], data: st.DataObject
) -> None:
    masks = data.draw(st.sampled_from(assignments(wanted)))
    at = data.draw(st.integers(0, len(wanted) - 1))
    rest = without(masks, at)
    assert rest in assignments(wanted[:at] + wanted[at + 1 :])
    kept = masks[:at] + masks[at + 1 :]
    for one, other in combinations(range(len(rest)), 2):
        shared, before = rest[one] & rest[other], kept[one] & kept[other]
        assert shared.bit_count() == before.bit_count()


@settings(max_examples=30, deadline=None)
@given(widths, widths)
def test_a_group_is_a_connected_set_of_jobs(
    rollout: tuple[int, ...], training: tuple[int, ...]
) -> None:
    count = min(len(rollout), len(training))
    rollout, training = rollout[:count], training[:count]
    found = connected(rollout, training)
    for row, left in enumerate(table(rollout).choices[:12]):
        for column, right in enumerate(table(training).choices[:12]):
            groups = [{member} for member in range(count)]
            for i, j in combinations(range(count), 2):
                if left[i] & left[j] or right[i] & right[j]:
                    first = next(group for group in groups if i in group)
                    second = next(group for group in groups if j in group)
                    if first is not second:
                        first |= second
                        groups.remove(second)
            assert found[row, column] == (len(groups) == 1)
