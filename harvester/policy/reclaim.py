"""Memory that production needs back: how long the guest may take, and what then happens.

The KV budget falls first, in the grant. From the beat in which the guest holds more than that it is
lifted out of its isolation backend, since a guest in the idle class beside saturated production
would give nothing back for as long as production is saturated. What it still keeps at the deadline
is taken by ending it. Both are effects, and both are counted.
"""

import msgspec

from harvester.contracts.page.records import Guest
from harvester.policy.effects import KillGuest, LiftGuest, SettleGuest


class ReclaimState(msgspec.Struct, kw_only=True):
    since_s: float | None = None
    """When the guest first held more than its budget; None while it does not."""
    killed: bool = False
    in_time: int = 0
    missed: int = 0
    last_s: float = 0.0
    """How long the last one took, or has been taking."""


class Reclaim:
    def __init__(self, deadline_s: float, state: ReclaimState | None = None) -> None:
        self._deadline_s = deadline_s
        self.state = state or ReclaimState()

    def observe(
        self, guest: Guest | None, *, budget_tokens: int | None, now: float
    ) -> tuple[LiftGuest | SettleGuest | KillGuest, ...]:
        """`budget_tokens` is what this beat's grant leaves the guest; None is all that it has."""
        state = self.state
        if guest is None:
            # Ended, or silent: in either case it is for the conditions of a lost guest.
            state.since_s, state.killed = None, False
            return ()
        owing = budget_tokens is not None and _usable(guest) > budget_tokens
        if not owing:
            if state.since_s is None:
                return ()
            state.in_time += not state.killed
            state.since_s, state.killed = None, False
            return (SettleGuest(processes=guest.processes),)
        if state.since_s is None:
            state.since_s, state.last_s = now, 0.0
            return (LiftGuest(processes=guest.processes, reason="memory is due"),)
        state.last_s = now - state.since_s
        if state.killed or state.last_s < self._deadline_s:
            return ()
        state.killed = True
        state.missed += 1
        why = f"held {_usable(guest)} tokens of KV, {budget_tokens} allowed"
        reason = f"{why} for {state.last_s:.1f} s"
        return (KillGuest(processes=guest.processes, reason=reason),)


def _usable(guest: Guest) -> int:
    return guest.kv_tokens_total - guest.kv_tokens_withheld
