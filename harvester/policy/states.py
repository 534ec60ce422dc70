"""The slot's states, and what its conditions lead to, as data that policy, page and tests read.

    shrink at once:  any breach leaves OPEN in the same beat
    grow slowly:     COOLDOWN must pass in quiet before OPEN, and OPEN grows its level step by step

Only OPEN writes a grant that lets the guest run.
"""

from enum import StrEnum
from typing import NamedTuple

from harvester.contracts.wire.leases import EndReason

_LOST = EndReason.PRODUCTION_LOST


class State(StrEnum):
    OFF = "off"
    """Harvesting is not allowed here: mode, kill switch, stop, quarantine or no record of it."""
    LEARNING = "learning"
    """Production's model is not yet to be believed."""
    CLOSED = "closed"
    """No breach and no work: no guest, no lease or a withheld slice."""
    COOLDOWN = "cooldown"
    """Production had a breach; waiting for quiet."""
    OPEN = "open"


class Condition(StrEnum):
    """The most severe thing that is true in a beat; the order here is the order of severity."""

    KILLED = "killed"
    DRAINED = "drained"
    """An order to drain: no grant, and the lease ends."""
    HELD = "held"
    """An order to hold, and no lease any more."""
    QUARANTINED = "quarantined"
    UNRECORDED = "unrecorded"
    """The journal or the state file cannot be written."""
    UNFIT = "unfit"
    """Production is deployed in a way beside which no guest may run."""
    SILENT = "silent"
    """An expected pulse is missing, expired, torn or foreign."""
    RESTARTED = "restarted"
    """A pulse's counters went backwards: a new engine, not an idle one."""
    UNSEEN = "unseen"
    """The engine steps while nothing is in flight: its requests arrive unseen."""
    UNLEARNED = "unlearned"
    HUNG = "hung"
    """Requests in flight and no step for several predicted steps."""
    OVERSPENT = "overspent"
    """The error budget says stop."""
    HARMFUL = "harmful"
    """The proof slices say stop."""
    COOLING = "cooling"
    """The last breach, or the kill switch, is less than the quiet time ago."""
    STARVED = "starved"
    """The guest lives below production, which has left it no time to say so."""
    STOPPED = "stopped"
    """The guest's page states a stop on purpose."""
    GUESTLESS = "guestless"
    UNLEASED = "unleased"
    WITHHELD = "withheld"
    """A proof slice without a grant."""
    CLEAR = "clear"


class ConditionOutcome(NamedTuple):
    state: State
    ends_lease: EndReason | None = None
    breach: bool = False
    """Quiet time must pass afterwards, as after the kill switch."""
    proven: bool = False
    """Voids no slice of the proof, since a guest's step or its job may bring it about: a guest that
    falls silent, or a lease that is shorter than a slice, would hide its harm."""
    stops_work: bool = False
    """An order or verdict against the guest: its weight work, which may go without slack, rests
    too."""


OUTCOMES: dict[Condition, ConditionOutcome] = {
    Condition.KILLED: ConditionOutcome(State.OFF, stops_work=True),
    Condition.DRAINED: ConditionOutcome(State.OFF, EndReason.DRAIN, stops_work=True),
    Condition.HELD: ConditionOutcome(State.OFF),
    Condition.QUARANTINED: ConditionOutcome(State.OFF, EndReason.DRAIN, stops_work=True),
    Condition.UNRECORDED: ConditionOutcome(State.OFF, EndReason.DRAIN),
    Condition.UNFIT: ConditionOutcome(State.OFF, EndReason.DRAIN, stops_work=True),
    Condition.SILENT: ConditionOutcome(State.COOLDOWN, _LOST, breach=True, proven=True),
    Condition.RESTARTED: ConditionOutcome(State.LEARNING, _LOST),
    Condition.UNSEEN: ConditionOutcome(State.COOLDOWN, _LOST, breach=True, proven=True),
    Condition.UNLEARNED: ConditionOutcome(State.LEARNING, _LOST),
    Condition.HUNG: ConditionOutcome(State.COOLDOWN, _LOST, breach=True, proven=True),
    Condition.OVERSPENT: ConditionOutcome(
        State.COOLDOWN, EndReason.BUDGET, breach=True, stops_work=True
    ),
    Condition.HARMFUL: ConditionOutcome(
        State.COOLDOWN, EndReason.BREACH, breach=True, stops_work=True
    ),
    Condition.COOLING: ConditionOutcome(State.COOLDOWN, proven=True),
    Condition.STARVED: ConditionOutcome(State.CLOSED, proven=True),
    Condition.STOPPED: ConditionOutcome(State.CLOSED, EndReason.DRAIN, proven=True),
    Condition.GUESTLESS: ConditionOutcome(State.CLOSED, EndReason.GUEST_LOST, proven=True),
    Condition.UNLEASED: ConditionOutcome(State.CLOSED, proven=True),
    Condition.WITHHELD: ConditionOutcome(State.CLOSED, proven=True),
    Condition.CLEAR: ConditionOutcome(State.OPEN, proven=True),
}

_EXCEPTIONS: dict[tuple[State, Condition], State] = {
    # Nothing is granted while learning, so a missing pulse (before the first, say) is no breach.
    (State.LEARNING, Condition.SILENT): State.LEARNING,
    # Off and learning are left through one beat of CLOSED, so that OPEN is never entered blind.
    (State.OFF, Condition.CLEAR): State.CLOSED,
    (State.LEARNING, Condition.CLEAR): State.CLOSED,
}

TRANSITIONS: dict[tuple[State, Condition], State] = {
    (state, condition): _EXCEPTIONS.get((state, condition), OUTCOMES[condition].state)
    for state in State
    for condition in Condition
}
