"""Residency in the simulator: nobody loads where memory is still somebody else's."""

from harvester.contracts.ids import GroupId, NodeId
from scheduler.policy.groups.judge import OUR_RULES
from scheduler.policy.model import Node, Placement, Pool
from scheduler.sim.rollmux.floor import new_row
from scheduler.sim.rollmux.ledger import Ledger
from scheduler.sim.rollmux.site import Site
from scheduler.sim.rollmux.workload import w1

JOBS = w1(1, jobs=2)
NODES = (NodeId("r"), NodeId("t"))
PLACES = [
    Placement(job=one.job.job, rollout_nodes=NODES[:1], training_nodes=NODES[1:]) for one in JOBS
]


def _site() -> Site:
    """The first job on two nodes whose memory is one byte too small for both."""
    site = Site(JOBS, OUR_RULES, Ledger())
    room = sum(one.job.host_bytes_per_node for one in JOBS) - 1
    for name, pool in zip(NODES, (Pool.ROLLOUT, Pool.TRAINING), strict=True):
        site.nodes[name] = (Node(node=name, pool=pool, host_bytes=room), GroupId("g"))
    row = new_row(
        0,
        offset=0,
        iterations=JOBS[0].iterations,
        slo=1.5,
        began_s=0.0,
        solo_s=0.0,
        bulk_ratio=0.5,
        tail_share=0.25,
    )
    assert site.enter(row, PLACES[0], GroupId("g"), loading_s=1.0, now=0.0) == list(NODES)
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
