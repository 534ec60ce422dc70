"""Orders to stop lending: which are in force, and which one binds a slot and a tenant.

    binding order = the strongest of all sources and scopes;  a source lifts its own orders only

Orders are kept by source and scope. A weaker order never replaces a stronger one, and a repeated
one keeps its first author and time. It reads no clock and no file.
"""

from collections.abc import Iterable, Sequence

import msgspec

from harvester.contracts.errors import Exhausted
from harvester.contracts.wire.stops import NUMBER_MAX, Stop, StopSource

STOPS_MAX = 256
"""Bound on orders for tenants, whose names come from outside. An order for a slot or the node is
never refused."""

_Key = tuple[StopSource, str, str]


class StopTable:
    def __init__(self, stops: Iterable[Stop] = ()) -> None:
        self._stops = {_key(stop): stop for stop in stops}
        self._lifted: dict[str, int] = {}
        """Numbers of the last ends of the cluster's orders, by tenant."""

    @property
    def stops(self) -> tuple[Stop, ...]:
        return tuple(stop for _, stop in sorted(self._stops.items()))

    def place(self, stop: Stop) -> Stop:
        """The order in force after it. Raises Exhausted where there are too many."""
        lifted = self._lifted.get(stop.tenant, -1)
        if stop.source is StopSource.CLUSTER and stop.number <= lifted:
            # The gateway missed another's end: with a higher number, its repeat lifts nothing.
            stop = msgspec.structs.replace(stop, number=min(lifted + 1, NUMBER_MAX))
        known = self._stops.get(_key(stop))
        if known is not None and known.order.strength >= stop.order.strength:
            # A late end of an earlier order must not lift this one.
            number = max(known.number, stop.number)
            self._stops[_key(stop)] = known = msgspec.structs.replace(known, number=number)
            return known
        tenants = sum(each.tenant != "" for each in self._stops.values())
        if known is None and stop.tenant and tenants >= STOPS_MAX:
            raise Exhausted(f"{STOPS_MAX} tenants are stopped; lift one first")
        self._stops[_key(stop)] = stop
        return stop

    def lift(
        self, source: StopSource, *, slot: str = "", tenant: str = "", number: int = 0
    ) -> Stop | None:
        """The order that stays, a cluster's later than `number`; None if the order was lifted."""
        known = self._stops.get((source, slot, tenant))
        if known is not None and source is StopSource.CLUSTER and known.number > number:
            return known
        if self._stops.pop((source, slot, tenant), None) and source is StopSource.CLUSTER:
            # An operator at this agent lifts any order: no number may follow NUMBER_MAX.
            end = known.number if known is not None and number == NUMBER_MAX else number
            self._lifted.pop(tenant, None)
            self._lifted[tenant] = end
            if len(self._lifted) > STOPS_MAX:
                del self._lifted[next(iter(self._lifted))]
        return None


def binding(stops: Sequence[Stop], *, slot: str, tenant: str = "") -> Stop | None:
    """The strongest of the orders that reach this slot and, under a lease, its tenant."""
    reached = [stop for stop in stops if stop.slot in ("", slot) and stop.tenant in ("", tenant)]
    # The widest of equally strong orders binds, because a resume has to name its scope.
    return max(
        reached,
        key=lambda stop: (stop.order.strength, stop.slot == "", stop.tenant == ""),
        default=None,
    )


def _key(stop: Stop) -> _Key:
    return (stop.source, stop.slot, stop.tenant)
