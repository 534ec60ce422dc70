"""State of a slot's guest: its last page, when it was last seen, how often it was lost, and how
often production was lost beside it.

A guest writes its page ten times a second. A guest that ranks below production on its cores may get
no CPU for as long as production has work: it is silent then, and not lost.
"""

from typing import Literal

import msgspec

from harvester.contracts.isolation import IDLE_GROUP_PREEMPTION_S, PREEMPTION_S, IsolationBackend
from harvester.contracts.page.records import Guest
from harvester.policy.sample import GuestReading, MpsReading
from harvester.policy.settings import AUTO, SlotSettings
from harvester.policy.states import Condition

_HELD_BY_LAW = "no_slack", "resting"
_LAW_WINDOW_S = 60.0


class GuestState(msgspec.Struct, kw_only=True):
    seen_at_s: float | None = None
    active_at_s: float | None = None
    """Time of the last beat at which a guest step ran or had just ended."""
    stepping: bool = False
    """Whether its last page was in the middle of a step."""
    steps_finished: int = 0
    kv_tokens: int = 0
    """The engine's KV capacity in tokens, as last reported."""
    isolation: str = ""
    floor_bytes: int = 0
    blocking_ratio: float = 1.0
    isolation_fault: str = ""
    losses_s: list[float] = []
    """Times of losses under a lease."""
    beside_at_s: float | None = None
    """Time of its last step under an open grant; None once production has crashed since."""
    crashes_s: list[float] = []
    """Times of production's crashes beside its steps."""
    stopped: bool = False
    """Whether its last page announced a stop on purpose."""
    law_binds: bool = False
    """Whether it had work, and the slack law alone kept it from a step, at the last beat."""
    law_ratio: float = 0.0
    """Share of the last minute's beats for which that held."""


class GuestWatch:
    def __init__(self, settings: SlotSettings, state: GuestState | None = None) -> None:
        self._settings = settings
        self.state = state or GuestState()

    def observe(self, reading: GuestReading, *, leased: bool, now: float) -> None:
        guest, state = reading.record, self.state
        if guest is None and state.stepping and leased and not reading.runs_below_production:
            # Silence in the middle of a step ends no step.
            state.active_at_s = now
        state.law_binds = (
            guest is not None
            and not guest.leaving
            and guest.running + guest.waiting > 0
            and guest.reason in _HELD_BY_LAW
        )
        gain = min(1.0, self._settings.beat_s / _LAW_WINDOW_S)
        state.law_ratio += gain * (state.law_binds - state.law_ratio)
        if guest is None or (guest.leaving and state.stopped):
            # A stopping guest's last record no longer changes, possibly in the middle of a step.
            return
        state.stopped = guest.leaving
        state.seen_at_s = now
        state.kv_tokens = guest.kv_tokens_total
        state.isolation = guest.isolation
        state.floor_bytes = guest.memory.floor_bytes
        state.isolation_fault = guest.isolation_fault
        promised = guest.blocking_ratio
        # Any other value of the page, NaN included, promises nothing.
        state.blocking_ratio = promised if 0.0 < promised <= 1.0 else 1.0
        state.stepping = not guest.leaving and guest.steps_launched > guest.steps_finished
        if state.stepping or guest.steps_finished != state.steps_finished:
            state.active_at_s = now
        state.steps_finished = guest.steps_finished

    def stepped_during(self, latency_s: float, *, now: float) -> bool:
        """Whether a guest step ran within production's latency that ended now."""
        active_at_s = self.state.active_at_s
        return active_at_s is not None and now - active_at_s <= latency_s + self._settings.beat_s

    def away(self, *, now: float) -> bool:
        seen_at_s = self.state.seen_at_s
        return seen_at_s is None or now - seen_at_s > self._settings.guest_away_s

    def starved(self, reading: GuestReading, *, idle_at_s: float | None) -> bool:
        """Whether a silent guest lives below production and production has been busy since the
        silence.

        `idle_at_s` is the time of production's last idle moment; None if it was never idle.
        """
        seen_at_s = self.state.seen_at_s
        if not reading.runs_below_production or seen_at_s is None:
            return False
        return idle_at_s is None or idle_at_s - seen_at_s < self._settings.guest_away_s

    def silence(self, reading: GuestReading) -> str:
        """Why the guest is away, as far as its page and its processes show it."""
        fault, rank = reading.fault or "missing", ""
        if not reading.lives:
            return f"guest {fault}"
        if reading.runs_below_production:
            rank = " below production"
        does = "starts" if self.state.seen_at_s is None else "hangs"
        return f"guest {fault}, its process lives{rank}: it gets no core, or {does}"

    def blocking_ratio(
        self, configured: float | Literal["auto"], reading: GuestReading, *, now: float
    ) -> float:
        """Share of a running guest step that production waits for: 1 if the guest's isolation is
        "none" or does not hold, even against a configured ratio, which was measured under
        isolation. A guest that reports no isolation may be isolated from outside."""
        state = self.state
        if state.isolation_fault or state.isolation == IsolationBackend.NONE:
            return 1.0
        if configured != AUTO:
            return configured
        # A guest starved of its page's beat runs no step; it reports again when it steps.
        gone = reading.record is None and self.away(now=now) and not reading.runs_below_production
        return 1.0 if gone else state.blocking_ratio

    def preemption_s(self, configured: float | Literal["auto"]) -> float:
        """Cost to production of a running guest step beside that share, in s."""
        if configured != AUTO:
            return configured
        grouped = self.state.isolation == IsolationBackend.IDLE_GROUP
        return IDLE_GROUP_PREEMPTION_S if grouped else PREEMPTION_S

    def granted(self, *, now: float) -> None:
        """Record that this beat's grant is open."""
        if self.state.active_at_s == now:
            self.state.beside_at_s = now

    def lose(self, reading: GuestReading, *, now: float) -> str:
        """Count a loss under a lease. Returns the reason for a quarantine, "" below the limit."""
        self.state.losses_s, times = self._counted(self.state.losses_s, now)
        return f"guest lost {times} ({reading.fault or 'missing'})" if times else ""

    def crash(self, condition: Condition, *, since_s: float, now: float) -> str:
        """Count production's restart, or the silence after which it counts as lost, if that began
        within as long after a step under an open grant. Returns as `lose` does."""
        state, lost_s = self.state, self._settings.production_lost_s
        lost = condition is Condition.SILENT and now - since_s >= lost_s
        beside = state.beside_at_s is not None and since_s - state.beside_at_s <= lost_s
        if not (beside and (lost or condition is Condition.RESTARTED)):
            return ""
        state.beside_at_s = None
        state.crashes_s, times = self._counted(state.crashes_s, now)
        return f"production was lost or restarted {times} beside a stepping guest" if times else ""

    def _counted(self, before_s: list[float], now: float) -> tuple[list[float], str]:
        """Times within the window, `now` included, and their number as text; "" below the limit."""
        window_s = self._settings.quarantine_window_s
        times_s = [*[at_s for at_s in before_s if now - at_s < window_s], now]
        enough = len(times_s) >= self._settings.quarantine_losses
        return times_s, f"{len(times_s)} times in {window_s:.0f} s" if enough else ""


def lacks_consent(mps: MpsReading | None, guest: Guest | None) -> bool:
    """Whether the guest runs under MPS without consent in the slot's configuration."""
    return mps is None and guest is not None and guest.isolation == "mps"
