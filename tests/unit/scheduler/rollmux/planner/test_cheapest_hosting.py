"""The cheapest hosting: as cheap as a search that leaves nothing out."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model import Pool
from scheduler.rollmux.planner.cheapest_hosting import CheapestHosting, SearchedJob
from scheduler.rollmux.planner.group_table import NodeType
from scheduler.rollmux.planner.price_floor import PriceFloor
from scheduler.rollmux.planner.verdicts import Hosting

TYPES = {
    Pool.ROLLOUT: NodeType(type="r", accelerators=8, price_per_hour=3.0, host_bytes=100),
    Pool.TRAINING: NodeType(type="t", accelerators=8, price_per_hour=8.0, host_bytes=100),
}
candidates = st.lists(
    st.builds(
        SearchedJob,
        version=st.just(0),
        host_bytes=st.integers(10, 60),
        shares=st.tuples(st.floats(0.1, 0.7), st.floats(0.1, 0.7)),
        nodes=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    ),
    min_size=1,
    max_size=3,
).map(lambda drawn: [one._replace(version=at) for at, one in enumerate(drawn)])


def _fewest(found: list[SearchedJob], pool: Pool) -> int:
    """Nodes of one pool that memory and time allow to suffice, by trying every choice."""
    side = int(pool is Pool.TRAINING)
    wanted = [one.nodes[side] for one in found]
    shares = [one.shares[side] for one in found]
    best = sum(wanted)
    for chosen in product(*(combinations(range(sum(wanted)), width) for width in wanted)):
        nodes = {node for one in chosen for node in one}
        inside = [[at for at, one in enumerate(chosen) if node in one] for node in nodes]
        shared = (set(a) & set(b) for a, b in combinations(chosen, 2))
        narrower = (min(len(a), len(b)) for a, b in combinations(chosen, 2))
        if (
            all(sum(found[at].host_bytes for at in one) <= 100 for one in inside)
            and all(sum(shares[at] for at in one) <= 1 for one in inside)
            and all(len(a) in (0, b) for a, b in zip(shared, narrower, strict=True))
        ):
            best = min(best, len(nodes))
    return best


@settings(max_examples=30, deadline=None)
@given(candidates)
def test_finds_the_price_of_the_search_over_everything(found: list[SearchedJob]) -> None:
    """Without SLOs the pools do not meet: the fewest nodes of each are the cheapest."""
    price, hostings = CheapestHosting(TYPES).search(found, lambda _: True)
    least = 3.0 * _fewest(found, Pool.ROLLOUT) + 8.0 * _fewest(found, Pool.TRAINING)
    assert np.isclose(price, least)
    everybody = sorted(one for hosting in hostings for one in hosting.members)
    assert everybody == list(range(len(found)))


def _sharing(hosting: Hosting) -> set[frozenset[int]]:
    """Pairs of members that have a node in common."""
    return {
        frozenset({hosting.members[i], hosting.members[j]})
        for i, j in combinations(range(len(hosting.members)), 2)
        if hosting.rollout[i] & hosting.rollout[j] or hosting.training[i] & hosting.training[j]
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_cached_search_results_change_no_answer(data: st.DataObject) -> None:
    """Searches of overlapping sets of jobs, one after another, against searches without a cache."""
    jobs = [
        SearchedJob(at, 20, (0.3, 0.25), data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2))))
        for at in range(6)
    ]
    pair = st.frozensets(st.integers(0, 5), min_size=2, max_size=2)
    refused = data.draw(st.frozensets(pair, max_size=6))
    most = data.draw(st.integers(1, 5))
    looks = data.draw(
        st.lists(st.lists(st.sampled_from(jobs), min_size=1, max_size=5, unique=True), max_size=4)
    )
    remembering = CheapestHosting(TYPES)
    floor = PriceFloor(remembering)
    for look in looks:

        def admits(hosting: Hosting, look: list[SearchedJob] = look) -> bool:
            pairs = ({look[one].version for one in pair} for pair in _sharing(hosting))
            return len(hosting.members) <= most and not any(
                frozenset(pair) in refused for pair in pairs
            )

        fresh, hostings = CheapestHosting(TYPES).search(look, admits)
        at_most = data.draw(st.sampled_from([fresh - 3.0, fresh - 0.1, fresh, fresh + 0.1]))
        found = floor.bounds(look, admits, at_most=at_most)
        least = None if found is None else found.price
        assert least == (None if fresh > at_most else pytest.approx(fresh))
        bounds = floor.bounds(look, admits)
        assert bounds is not None
        for known in (None, bounds):
            price, found = remembering.search(look, admits, known)
            assert np.isclose(price, fresh)
            assert found == hostings


def test_a_refused_pair_is_never_hosted_together() -> None:
    found = [SearchedJob(at, 10, (0.1, 0.1)) for at in range(4)]
    price, hostings = CheapestHosting(TYPES).search(
        found, lambda hosting: not {0, 1} <= set(hosting.members)
    )
    assert price == 22.0
    assert not any({0, 1} <= set(hosting.members) for hosting in hostings)


def _in_groups(*homes: int) -> list[SearchedJob]:
    """Jobs that share both nodes of their groups."""
    return [
        SearchedJob(at, 10, (0.1, 0.1), home=1 << home, masks=(1, 2))
        for at, home in enumerate(homes)
    ]


@pytest.mark.parametrize(
    ("homes", "together"),
    [
        # One job without company joins the other: the pair stays as it is.
        ((0, 1, 1, 2), {(0, 3), (1, 2)}),
        ((0, 1, 0, 2), {(0, 2), (1, 3)}),
    ],
)
def test_most_jobs_keep_their_nodes_among_equal_prices(
    homes: tuple[int, ...], together: set[tuple[int, ...]]
) -> None:
    found = _in_groups(*homes)
    price, hostings = CheapestHosting(TYPES).search(found, lambda one: len(one.members) < 3)
    assert price == 22.0
    assert {one.members for one in hostings} == together


def test_an_assignment_of_equal_price_keeps_the_present_sharing() -> None:
    """Two of three jobs share the rollout node; which two is all the same but for a move."""
    present = [
        SearchedJob(at, 30, (0.1, 0.1), home=1, masks=(rollout, 4))
        for at, rollout in enumerate((1, 2, 1))
    ]
    _, hostings = CheapestHosting(TYPES).search(present, lambda one: not _all_on_one(one))
    (hosting,) = hostings
    assert hosting.rollout[0] == hosting.rollout[2] != hosting.rollout[1]


def _all_on_one(hosting: Hosting) -> bool:
    return len(hosting.members) == 3 and len(set(hosting.rollout)) == 1
