"""Residency in the simulator: nobody loads where memory is still somebody else's."""

import numpy as np

from harvester.contracts.ids import GroupId, NodeId
from scheduler.policy.groups.compiled import Records
from scheduler.policy.groups.judge import OUR_RULES
from scheduler.policy.groups.stages import BULK, BUSY, TAIL_LEASED
from scheduler.policy.model import Node, Placement, Pool
from scheduler.sim.rollmux.floor import Floor, new_row
from scheduler.sim.rollmux.ledger import Ledger
from scheduler.sim.rollmux.site import Site
from scheduler.sim.rollmux.workload import w1

JOBS = w1(1, jobs=2)
NODES = (NodeId("r"), NodeId("t"))
PLACES = [
    Placement(job=one.job.job, rollout_nodes=NODES[:1], training_nodes=NODES[1:]) for one in JOBS
]


def _row(number: int) -> Records:
    return new_row(
        number,
        offset=0,
        iterations=JOBS[number].iterations,
        slo=1.5,
        began_s=0.0,
        solo_s=0.0,
        bulk_ratio=0.5,
        tail_share=0.25,
    )


def _site() -> Site:
    """The first job on two nodes whose memory is one byte too small for both."""
    site = Site(JOBS, OUR_RULES, Ledger())
    room = sum(one.job.host_bytes_per_node for one in JOBS) - 1
    for name, pool in zip(NODES, (Pool.ROLLOUT, Pool.TRAINING), strict=True):
        site.nodes[name] = (Node(node=name, pool=pool, host_bytes=room), GroupId("g"))
    assert site.enter(_row(0), PLACES[0], GroupId("g"), loading_s=1.0, now=0.0) == list(NODES)
    return site


def test_a_newcomer_waits_until_the_other_has_left() -> None:
    site = _site()
    assert not site.has_room(1, PLACES[1])
    site.stop(0, now=1.0)
    assert site.has_room(1, PLACES[1])


def test_who_is_stopped_keeps_its_place_on_the_nodes_that_it_keeps() -> None:
    site = _site()
    site.stop(0, keeps=NODES[:1], now=1.0)
    assert not site.has_room(1, PLACES[1])
    assert site.has_room(0, PLACES[0])
    site.forget(0)
    assert site.has_room(1, PLACES[1])


def test_a_leased_tail_that_is_stopped_leaves_its_node_to_who_runs_there() -> None:
    floor = Floor(OUR_RULES, np.concatenate([one.lengths_s for one in JOBS]))
    for number, place in enumerate(PLACES):
        floor.enter(_row(number), place, loading_s=0.0)
    floor.jobs["stage"] = (TAIL_LEASED, BULK)
    node = floor.mask(NODES[:1])
    floor.permits[BUSY] = node
    _, lost, rollout = floor.stop(0)
    assert (lost, rollout) == (node, True)
    assert floor.permits[BUSY] == node
