"""Orders to stop lending, as agents, gateways and commands exchange them.

    GET  /v1/stops    -> StopsInForce                 agent
    POST /v1/stops    StopRequest -> StopReply         agent
    POST /v1/stops    StopRequest -> ClusterStopReply  gateway, operator only

An order has a scope (the node; one slot; one tenant, on the node or in the cluster) and a source.
Each source lifts its own orders only, a weaker order never replaces a stronger one of its source
and scope, and the strongest order in force binds. Every call may be repeated.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import NodeId, checked_name

REASON_CHARS_MAX = 200
NUMBER_MAX = (1 << 53) - 1
"""The highest number that an agent takes."""
_Text = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]


class StopOrder(StrEnum):
    """Orders, the weakest first."""

    NONE = "none"
    HOLD = "hold"
    """No new lease, and no new turn under one in force; running turns end by themselves."""
    DRAIN = "drain"
    """Like `hold`, and running turns are evicted: the grant closes and the lease ends at once."""

    @property
    def strength(self) -> int:
        return tuple(StopOrder).index(self)


KUEUE_WORDS = {
    "None": StopOrder.NONE,
    "Hold": StopOrder.HOLD,
    "HoldAndDrain": StopOrder.DRAIN,
}
"""Values of `stopPolicy` in Kueue's ClusterQueue and LocalQueue."""


def order_of(word: str) -> StopOrder | None:
    """The order for RoseMux's or Kueue's word; None for any other word."""
    if word in KUEUE_WORDS:
        return KUEUE_WORDS[word]
    return StopOrder(word) if word in tuple(StopOrder) else None


def one_line(text: str) -> str:
    """A reason from elsewhere, fit for a log, a terminal and a label."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(shown.split())[:REASON_CHARS_MAX]


class StopSource(StrEnum):
    CONFIG = "config"
    """The agent's configuration file."""
    FILE = "file"
    """The node's stop file."""
    OPERATOR = "operator"
    """A call of this agent."""
    CLUSTER = "cluster"
    """A call of the gateway, which tells all its agents."""
    INTERLOCK = "interlock"
    """Alerts, evictions or accelerators, by the agent's configuration."""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """One order in force."""

    order: StopOrder
    source: StopSource
    slot: str = ""
    """Slot of the order; "" means every slot of the node."""
    tenant: str = ""
    """Tenant of the order; "" means every tenant."""
    by: str = ""
    reason: str = ""
    at: str = ""
    """Wall time of the order (UTC, ISO 8601), for people."""
    number: int = 0
    """Number of a cluster's order: later ones have higher numbers."""

    @property
    def text(self) -> str:
        by = f" by {self.by}" if self.by else ""
        since = f" since {self.at}" if self.at else ""
        return f"{self.order} ({self.source}){by}{since}: {self.reason or 'no reason given'}"


class StopRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    order: StopOrder
    """`none` lifts what this source has ordered for this scope."""
    slot: _Name = ""
    tenant: _Name = ""
    by: _Text = ""
    reason: _Text = ""
    cluster: bool = False
    """Whether the order to an agent is the cluster's."""
    number: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)] = 0

    def check(self) -> None:
        """Raises PeerProtocolError for a scope that no order can have, and for a missing reason."""
        for what in ("slot", "tenant"):
            if given := getattr(self, what):
                checked_name(given, what=what)
        if not (self.by.isprintable() and self.reason.isprintable()):
            raise PeerProtocolError("reason, by: use one line of printable characters")
        if self.slot and (self.tenant or self.cluster):
            raise PeerProtocolError("slot: goes neither with tenant nor with cluster")
        if self.order is not StopOrder.NONE and not self.reason.strip():
            raise PeerProtocolError("reason: state why the slots stop")


class StopReply(msgspec.Struct, frozen=True, kw_only=True):
    in_force: Stop | None
    """This source's order for this scope after the call; it may be an earlier, stronger one."""
    recorded: bool = True
    """Whether a restarted agent would know it."""
    lifted: bool = True
    """False after an end for which this source had no order of this scope."""
    reached: tuple[str, ...] | None = None
    """Leases in force that it reaches, for people; None from an agent of before."""
    tenants: tuple[str, ...] | None = None
    """Tenants of the configuration and of leases in force: an order for another one may have a
    misspelt name. None from an agent of before."""
    left: tuple[Stop, ...] | None = None
    """All orders in force on the node after the call; None from an agent of before."""


class StopsInForce(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    stops: tuple[Stop, ...]


class ClusterStopReply(msgspec.Struct, frozen=True, kw_only=True):
    in_force: Stop | None
    agents: dict[str, str]
    """Faults by agent: "" if the agent obeys, else why this is not known. Such an agent gets the
    order again each second."""
    recorded: bool = True
    """Whether a restarted gateway would know it."""
    lifted: bool = True
    """False after an end for which the gateway knew no order of the cluster."""
    reached: tuple[str, ...] | None = None
    """Jobs of the gateway that it reaches; None from a gateway of before."""
    tenants: tuple[str, ...] | None = None
    """Tenants of the gateway's jobs; None from a gateway of before."""
    left: tuple[Stop, ...] | None = None
    """All orders of the cluster in force after the call; None from a gateway of before."""
