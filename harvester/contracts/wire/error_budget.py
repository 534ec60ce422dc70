"""An agent's evidence for the error budget of a service, and the allotment that answers it.

Counts are cumulative and carry the life and the run that they belong to, so that a lost or repeated
message and a restart count nothing twice. An allotment is in force only while its lease is.
"""

from typing import Annotated

import msgspec

from harvester.contracts.served import Served

Misses = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Allotment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a service's error budget that one slot may spend under its lease."""

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    """Rises with each one for the same life; a slot takes only one above all before it."""
    misses: Misses
    """Charged misses of 28 days, also from before the allotment, above which the slot stops."""
    budget: Misses
    """Misses that harvesting may cause to the whole service in 28 days."""
    spent: Misses
    """Misses charged for the whole service; above `budget` every slot of it stops."""
    known_s: Misses = 0.0
    """Time for which the scheduler knows the service."""


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of one slot for its service's budget."""

    service: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    life: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Random name of the slot's history on disk; a slot that lost its disk has another one."""
    run: Annotated[int, msgspec.Meta(ge=1)]
    """Rises with each start of the agent."""
    served: Served
    """Counts since the run began. Without proof slices only requests and misses; with proof slices
    no misses beside steps."""
    charged: Misses
    """Misses of 28 days charged to this slot alone."""
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    """Highest number of an allotment that a lease of this run has had."""
    limit: Misses | None = None
    """Charged misses at which it stops under the lease in force; null without a lease."""
    allowed_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Misses that harvesting may cause for each request of production."""
    minimum_misses: Misses
    """Fewer misses than this are no trend; the least budget of a service."""
    allotment: Allotment | None = None
    """The allotment taken last."""
