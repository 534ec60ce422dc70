"""Which waiting turns are equals: what clients may choose freely makes no line of its own."""

from itertools import pairwise

from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from scheduler.gateway.policy.routing_events import TurnArrived
from scheduler.gateway.policy.turn_queue import QueuePriority, TurnQueue, WaitingTurn


def turn(minimum: int) -> TurnArrived:
    return TurnArrived(
        turn=f"t{minimum}",
        trajectory=TrajectoryId(f"t{minimum}"),
        job=JobId("job"),
        tokens=10,
        minimum=WeightVersion(minimum),
    )


def lines(queue: TurnQueue) -> list[list[str]]:
    """Waiting turns by their line, from the oldest."""
    found: dict[object, list[str]] = {}
    for each in queue:
        found.setdefault(queue.line_key(each), []).append(each.turn)
    return list(found.values())


def test_least_versions_that_the_same_engines_have_are_one_line() -> None:
    queue = TurnQueue()
    for minimum in range(1, 12):
        queue.add(WaitingTurn(turn(minimum), QueuePriority.FRESH, float(minimum), None))
    queue.tell_apart([WeightVersion(8), WeightVersion(3), WeightVersion(8)])
    assert [len(line) for line in lines(queue)] == [3, 5, 3]
    firsts = [each.turn.turn for each in queue.oldest_first(QueuePriority.FRESH)]
    assert firsts == ["t1", "t4", "t9"]
    queue.tell_apart([WeightVersion(20)])
    assert [each.turn.turn for each in queue.oldest_first(QueuePriority.FRESH)] == ["t1"]
    assert all(queue.has_line(one) for one in (turn(1), turn(20)))
    assert not queue.has_line(turn(21))


def test_a_line_keeps_the_order_of_arrival_when_versions_change() -> None:
    queue = TurnQueue()
    queue.tell_apart([WeightVersion(5)])
    for minimum in (9, 2, 7):
        queue.add(WaitingTurn(turn(minimum), QueuePriority.FRESH, float(minimum), None))
    queue.tell_apart([WeightVersion(9)])
    left = []
    for first in queue.oldest_first(QueuePriority.FRESH):
        left.append(first.since_s)
        queue.remove(first.turn.turn)
    assert len(left) == 3
    assert all(earlier < later for earlier, later in pairwise(left))
