"""Memory that production needs back: the guest's deadline, and the steps that enforce it.

A guest that holds more than its KV budget is lifted out of its isolation at once, since in the idle
class it would release nothing beside saturated production. At the deadline it is ended; a guest of
another user ends itself soon after. One that still reports, owes memory then and cannot be ended is
out of reach. Lift and kill are effects, whose outcomes arrive with a later sample. A guest in debt
is often too starved to write, so its last page stands until it is replaced or gone.
"""

import msgspec

from harvester.contracts.page.seal import PageFault
from harvester.contracts.process import ProcessId
from harvester.policy.effects import KillGuest, LiftGuest, SettleGuest
from harvester.policy.sample import ActionOutcome, GuestAction, GuestReading, KvReading

SELF_END_S = 3.0
"""Seconds after the deadline for a guest that only its own user can end: it ends itself after one
second, and its page is missed within half a second more. Doubled for a machine where both are late.
"""


class ReclaimState(msgspec.Struct, kw_only=True):
    since_s: float | None = None
    """Time at which the guest first exceeded its budget; None while it does not."""
    killed: bool = False
    kills: int = 0
    """Kill effects for the present debt."""
    in_time: int = 0
    missed: int = 0
    usable_tokens: int = 0
    processes: tuple[ProcessId, ...] = ()
    """Processes that the guest last named."""
    ended: tuple[ProcessId, ...] = ()
    """Processes known to have ended: the memory that their page still reports is free."""
    unreached: str = ""
    """Why the guest could not be ended, while it owes memory."""


class Reclaim:
    def __init__(self, deadline_s: float, state: ReclaimState | None = None) -> None:
        self._deadline_s = deadline_s
        self.state = state or ReclaimState()

    def observe(
        self,
        reading: GuestReading,
        *,
        budget_tokens: int | None,
        now: float,
        shared: KvReading | None = None,
        outcomes: tuple[ActionOutcome, ...] = (),
    ) -> tuple[LiftGuest | SettleGuest | KillGuest, ...]:
        """Compare the guest's KV with its budget. `budget_tokens` is the KV that this beat's grant
        leaves the guest; None: no limit.

        Where KV is shared page by page, mapped bytes count too: a budget that the guest obeys in
        its own accounts frees nothing while the pages stay mapped.
        """
        state, guest = self.state, reading.record
        self._note(outcomes)
        if guest is not None and not (guest.processes and set(guest.processes) <= set(state.ended)):
            state.usable_tokens = guest.kv_tokens_total - guest.kv_tokens_withheld
            state.processes = guest.processes
        elif reading.fault is PageFault.MISSING:
            # The page is gone, and the guest's memory with it.
            state.usable_tokens, state.processes = 0, ()
        over_bytes = 0 if shared is None or not state.processes else shared.over_bytes
        if budget_tokens is None or (state.usable_tokens <= budget_tokens and not over_bytes):
            return self._settled()
        if state.since_s is None:
            state.since_s = now
            return (LiftGuest(processes=state.processes, reason="memory is due"),)
        elapsed_s = now - state.since_s
        # Repeat after each further deadline: the kill itself may have failed.
        if elapsed_s < self._deadline_s * (state.kills + 1):
            return ()
        state.kills += 1
        state.missed += not state.killed
        state.killed = True
        held = f"held {state.usable_tokens} tokens of KV, {budget_tokens} allowed"
        if over_bytes:
            held = f"{held}, {over_bytes} bytes mapped above its limit"
        reason = f"{held} for {elapsed_s:.1f} s"
        return (KillGuest(processes=state.processes, reason=reason),)

    def out_of_reach(self, reading: GuestReading, *, now: float) -> str:
        """Why a guest that reports and owes memory cannot be ended; "" if it can, or may yet."""
        since_s = self.state.since_s
        if reading.record is None or since_s is None:
            return ""
        had_its_time = now - since_s >= self._deadline_s + SELF_END_S
        return self.state.unreached if had_its_time else ""

    def _note(self, outcomes: tuple[ActionOutcome, ...]) -> None:
        state = self.state
        for outcome in outcomes:
            if outcome.action is not GuestAction.KILL:
                continue
            state.unreached = outcome.fault if state.since_s is not None else ""
            if outcome.fault:
                continue
            state.ended = outcome.processes
            if set(state.processes) <= set(state.ended):
                state.usable_tokens, state.processes = 0, ()

    def _settled(self) -> tuple[SettleGuest, ...]:
        state = self.state
        if state.since_s is None:
            return ()
        state.in_time += not state.killed
        state.since_s, state.killed, state.kills, state.unreached = None, False, 0, ""
        return (SettleGuest(reason="nothing is due"),)
