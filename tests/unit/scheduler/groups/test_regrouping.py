"""The cheapest hosting: as cheap as a search that leaves nothing out."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.groups.book import NodeType
from scheduler.policy.groups.regrouping import CheapestHosting, Guest, Hosting, block_choices
from scheduler.policy.model import Pool

TYPES = {
    Pool.ROLLOUT: NodeType(type="r", accelerators=8, price_per_hour=3.0, host_bytes=100),
    Pool.TRAINING: NodeType(type="t", accelerators=8, price_per_hour=8.0, host_bytes=100),
}
guests = st.lists(
    st.tuples(st.integers(10, 60), st.floats(0.1, 0.7), st.floats(0.1, 0.7)), min_size=1, max_size=4
)


def _fits(found: list[Guest], hosting: Hosting) -> bool:
    for blocks, side in ((hosting.rollout, 2), (hosting.training, 3)):
        for block in set(blocks):
            inside = [
                found[one] for one, at in zip(hosting.members, blocks, strict=True) if at == block
            ]
            if sum(one.host_bytes for one in inside) > 100 or sum(one[side] for one in inside) > 1:
                return False
    return True


@settings(max_examples=30, deadline=None)
@given(guests)
def test_finds_the_price_of_the_search_over_everything(
    drawn: list[tuple[int, float, float]],
) -> None:
    """Without SLOs one big group may use any nodes: all splits of both pools are all there is."""
    found = [Guest(at, *one) for at, one in enumerate(drawn)]
    everybody = tuple(range(len(found)))
    price, hostings = CheapestHosting(TYPES).search(found, lambda _: True)
    prices = [
        3.0 * (max(rollout) + 1) + 8.0 * (max(training) + 1)
        for rollout, training in product(block_choices(len(found)), repeat=2)
        if _fits(found, Hosting(everybody, rollout, training))
    ]
    assert np.isclose(price, min(prices))
    assert sorted(one for hosting in hostings for one in hosting.members) == list(everybody)
    assert all(_fits(found, hosting) for hosting in hostings)


def test_a_refused_pair_is_never_hosted_together() -> None:
    found = [Guest(at, 10, 0.1, 0.1) for at in range(4)]
    price, hostings = CheapestHosting(TYPES).search(
        found, lambda hosting: not {0, 1} <= set(hosting.members)
    )
    assert price == 22.0
    assert not any({0, 1} <= set(hosting.members) for hosting in hostings)
