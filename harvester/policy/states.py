"""The slot's states and transitions as data; the policy, the documentation and the tests read it.

    shrink at once:  any breach leaves OPEN in the same beat
    grow slowly:     COOLDOWN must pass in quiet before OPEN, and OPEN grows its level step by step

Only OPEN writes a grant that lets the guest run.
"""

from enum import StrEnum


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


DANGERS = frozenset(
    {
        Condition.SILENT,
        Condition.UNSEEN,
        Condition.HUNG,
        Condition.OVERSPENT,
        Condition.HARMFUL,
    }
)
"""Conditions after which quiet time must pass, as after the kill switch."""

_TARGET: dict[Condition, State] = {
    Condition.KILLED: State.OFF,
    Condition.DRAINED: State.OFF,
    Condition.HELD: State.OFF,
    Condition.QUARANTINED: State.OFF,
    Condition.UNRECORDED: State.OFF,
    Condition.UNFIT: State.OFF,
    Condition.SILENT: State.COOLDOWN,
    Condition.RESTARTED: State.LEARNING,
    Condition.UNSEEN: State.COOLDOWN,
    Condition.UNLEARNED: State.LEARNING,
    Condition.HUNG: State.COOLDOWN,
    Condition.OVERSPENT: State.COOLDOWN,
    Condition.HARMFUL: State.COOLDOWN,
    Condition.COOLING: State.COOLDOWN,
    Condition.STARVED: State.CLOSED,
    Condition.STOPPED: State.CLOSED,
    Condition.GUESTLESS: State.CLOSED,
    Condition.UNLEASED: State.CLOSED,
    Condition.WITHHELD: State.CLOSED,
    Condition.CLEAR: State.OPEN,
}

_EXCEPTIONS: dict[tuple[State, Condition], State] = {
    # Nothing is granted while learning, so a missing pulse (before the first, say) is no breach.
    (State.LEARNING, Condition.SILENT): State.LEARNING,
    # Off and learning are left through one beat of CLOSED, so that OPEN is never entered blind.
    (State.OFF, Condition.CLEAR): State.CLOSED,
    (State.LEARNING, Condition.CLEAR): State.CLOSED,
}

TRANSITIONS: dict[tuple[State, Condition], State] = {
    (state, condition): _EXCEPTIONS.get((state, condition), _TARGET[condition])
    for state in State
    for condition in Condition
}
