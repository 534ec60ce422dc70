"""Compares configurations on the samples of a recorded slot journal: each one's grants.

Two policies decide each sample: one with the recorded settings, one with the new ones. The
samples show production beside the recorded grants, so the answer holds where a change of grants
changes production little. A journal has no step-by-step decisions of the guest's own gate (the
slack law): tokens are estimated at the guest's recorded pace.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from harvester.contracts.errors import UNDECODABLE, Corrupt, Unsupported
from harvester.contracts.journal import Decided, Opened, read_journal
from harvester.contracts.page import Guest
from harvester.policy.sample import SlotSample
from harvester.policy.settings import Mode, SlotSettings, flat_fields
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition, State

GATE_SETTINGS = frozenset(
    {
        *("epsilon", "law", "blocking_ratio", "preemption_s", "phantom_prompt_tokens"),
        *("kv_budget_tokens", "kv_deadline_s", "kv_retained_ratio", "abort_grace_s"),
    }
)
"""Settings that act in the guest or at its gate."""


@dataclass(slots=True)
class TimeAccount:
    """Time under one configuration, in s."""

    grantable_s: float = 0.0
    closed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Key: the condition that kept the slot closed."""
    tokens: float = 0.0
    """Estimated from the guest's pace: its counted tokens over the time recorded as grantable."""

    def add(self, policy: SlotPolicy, duration_s: float) -> None:
        if policy.state is State.OPEN and policy.condition is Condition.CLEAR:
            self.grantable_s += duration_s
        else:
            # The state machine passes through one closed beat on its way to open.
            self.closed_s[policy.condition] += duration_s


@dataclass(slots=True)
class WhatIf:
    slot: str
    recorded: TimeAccount = field(default_factory=TimeAccount)
    changed: TimeAccount = field(default_factory=TimeAccount)
    decisions: int = 0
    begins: str = ""
    """Wall time of the first decision."""
    gaps_s: float = 0.0
    """Time without decisions, such as a stopped agent: of neither account."""
    guest_tokens: int | None = None
    """Tokens that the guest counted in the recorded time; None if no guest stepped."""
    differing: tuple[str, ...] = ()
    """Settings that differ from the last recorded ones, with both values."""

    @property
    def span_s(self) -> float:
        return self.recorded.grantable_s + sum(self.recorded.closed_s.values())


def what_if(path: Path, settings: SlotSettings) -> WhatIf:
    """Decide a slot's journal again with its own settings and with `settings`.

    The mode is the recorded one unless `settings` says off: a journal of `observe` has no lease and
    no guest to judge. Raises Corrupt for a file that is no journal, Unsupported for one of another
    policy than a slot's.
    """
    run: _Run | None = None
    for number, line in enumerate(read_journal(path), start=1):
        where = f"{path.name} line {number}"
        match line:
            case Opened():
                run = run or _Run(line, settings)
                run.open(line, where)
            case Decided() if run is not None:
                run.decide(line, where)
            case Decided():
                raise Corrupt(f"{where}: a decision before 'opened'")
    if run is None:
        raise Corrupt(f"{path.name}: no line is whole")
    return run.ended()


class _Run:
    def __init__(self, line: Opened, settings: SlotSettings) -> None:
        self._settings = settings
        self.found = WhatIf(slot=line.actor.removeprefix("agent:"), begins=line.wall)
        self._recorded = self._changed = SlotPolicy(settings)
        self._life: tuple[Any, Any] | None = None
        self._at_s: float | None = None
        self._tokens: int | None = None

    def open(self, line: Opened, where: str) -> None:
        """The recorded policy begins with what it remembered; the other keeps its own memory over a
        reload and a new file, and takes the recorded one after a restart."""
        if line.policy != SlotPolicy.NAME:
            raise Unsupported(f"{where}: a journal of {line.policy}, not of a slot")
        snapshot = line.snapshot or {}
        try:
            self._recorded = SlotPolicy.from_config(line.config)
            mode = self._recorded.settings.mode
            settings = replace(
                self._settings, mode=Mode.OFF if self._settings.mode is Mode.OFF else mode
            )
            changed = SlotPolicy(settings)
            life = snapshot.get("life"), snapshot.get("run")
            goes_on = self._life == life and line.missing == 0
            changed.restore(self._changed.snapshot() if goes_on else snapshot)
            if snapshot:
                self._recorded.restore(snapshot)
        except (*UNDECODABLE, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{where}: {error}") from error
        self._changed, self._life = changed, life
        self.found.differing = _differences(self._recorded.settings, settings)

    def decide(self, line: Decided, where: str) -> None:
        found = self.found
        try:
            sample = msgspec.convert(line.sample, SlotSample)
        except UNDECODABLE as error:
            raise Corrupt(f"{where}: sample: {error}") from error
        if self._at_s is not None:
            self._pass(line.t_s - self._at_s)
        self._at_s = line.t_s
        for policy in (self._recorded, self._changed):
            policy.observe(sample, now=line.t_s)
        found.decisions += 1
        self._count(sample.guest.record)

    def ended(self) -> WhatIf:
        found = self.found
        if found.guest_tokens and found.recorded.grantable_s > 0:
            pace = found.guest_tokens / found.recorded.grantable_s
            for account in (found.recorded, found.changed):
                account.tokens = pace * account.grantable_s
        return found

    def _pass(self, elapsed_s: float) -> None:
        """A decision holds until the next, but no longer than its grant."""
        duration_s = min(max(0.0, elapsed_s), self._recorded.settings.grant_ttl_s)
        self.found.gaps_s += max(0.0, elapsed_s - duration_s)
        self.found.recorded.add(self._recorded, duration_s)
        self.found.changed.add(self._changed, duration_s)

    def _count(self, guest: Guest | None) -> None:
        """Adds the tokens since the last page; a restarted guest's counter begins at 0."""
        if guest is None or not guest.steps_finished:
            return
        if self._tokens is not None:
            new = max(0, guest.tokens_total - self._tokens)
            self.found.guest_tokens = (self.found.guest_tokens or 0) + new
        self._tokens = guest.tokens_total


def _differences(old: SlotSettings, new: SlotSettings) -> tuple[str, ...]:
    before, after = (dict(flat_fields(msgspec.to_builtins(each))) for each in (old, new))
    return tuple(
        f"{name}: {before.get(name)} -> {value}"
        for name, value in sorted(after.items())
        if before.get(name) != value
    )


def what_if_text(found: WhatIf) -> str:
    return "\n".join(_lines(found))


def _lines(found: WhatIf) -> Iterator[str]:
    gaps = f", and {_time(found.gaps_s)} without decisions" if found.gaps_s >= 1 else ""
    yield (
        f"slot {found.slot}: {found.decisions} decisions over {_time(found.span_s)}{gaps}, "
        f"from {found.begins}"
    )
    yield "changed: " + ("; ".join(found.differing) or "nothing")
    yield _row("", "recorded", "changed", "difference")
    recorded, changed = found.recorded, found.changed
    yield _times("grantable", recorded.grantable_s, changed.grantable_s, found.span_s)
    for reason in sorted(
        recorded.closed_s.keys() | changed.closed_s.keys(),
        key=lambda one: -max(recorded.closed_s[one], changed.closed_s[one]),
    ):
        times = recorded.closed_s[reason], changed.closed_s[reason]
        yield _times(f"closed: {reason}", *times, found.span_s)
    if found.guest_tokens is None:
        yield "no tokens: the journal has no guest that stepped"
    else:
        more = f"{changed.tokens - recorded.tokens:+,.0f}"
        tokens = f"{recorded.tokens:,.0f}", f"{changed.tokens:,.0f}", more
        yield _row("guest tokens, at its recorded pace", *tokens)
    gate = {one.partition(":")[0] for one in found.differing} & GATE_SETTINGS
    if gate:
        yield (
            f"not in these figures: {', '.join(sorted(gate))} also act in the guest's own gate, "
            "whose steps a journal does not have"
        )
    yield "production's latencies are those beside the recorded grants"


def _times(name: str, recorded_s: float, changed_s: float, span_s: float) -> str:
    more_s = changed_s - recorded_s
    difference = f"{'-' if more_s < 0 else '+'}{_time(abs(more_s))}"
    return _row(name, _share(recorded_s, span_s), _share(changed_s, span_s), difference)


def _share(part_s: float, span_s: float) -> str:
    return f"{_time(part_s)} ({part_s / span_s:.1%})" if span_s else _time(part_s)


def _row(name: str, recorded: str, changed: str, difference: str) -> str:
    return f"{name:36}{recorded:>24}{changed:>24}{difference:>16}".rstrip()


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    return f"{int(seconds // 3600)} h {seconds % 3600 / 60:.0f} min"
