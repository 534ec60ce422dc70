"""The guest's side of its slot: reads grant and pulses, decides steps, keeps the guest page.

One object per guest engine process. The engine loop's thread asks it before every step; the waker's
thread asks it while the gate is closed and while there is no work, so every call takes its lock.
Imports nothing of vLLM.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from random import random
from time import thread_time_ns

import msgspec

from coserve.guest.guest_steps import GuestSteps, ProductionMoment
from coserve.guest.isolation_watch import IsolationWatch, ObservedIsolation
from coserve.guest.memory_deadline import MemoryDeadline
from coserve.law.engine_terms import idle, terms_of
from coserve.law.gate import Closed, StepDecision, decide
from coserve.law.granted_pulses import GrantedPulses
from coserve.law.lending import lending
from harvester.contracts.bell import Word
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.isolation import PREEMPTING, IsolationBackend
from harvester.contracts.page import (
    OWN_USER,
    Grant,
    GrantMode,
    Guest,
    GuestMemory,
    Lending,
    PageDirectory,
    PageOwners,
    PulseHead,
    Reading,
)
from harvester.contracts.process import ProcessId

GUEST_PAGE_TTL_NS = 500_000_000
_GRACE_MAX_S, _DEADLINE_MAX_S = 600.0, 60.0
"""Upper bounds on the grant's grace and memory deadline, whatever the grant says; equal to the
bounds of an agent's settings."""
_LOOK_NS = 100_000_000
"""Interval at which the guest checks that its page still exists."""
_STEP_PAGE_NS = 50_000_000
"""Least time between two pages that only tell of steps: the agent looks every 100 ms, and a page
that is written out of an engine's cold caches takes 0.1 ms."""
_HELD_TOKENS = 256
"""A decision counts the context in multiples of this, rounded up, so that it holds as it grows."""
_MOST_PROCESSES = 48
"""More would not fit into a page."""
_LENDING_NS = 1_000_000_000
_FAULT_CHARACTERS = 300


class GuestQueue(msgspec.Struct):
    """Present state of the guest's scheduler, under the names of its page."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_tokens_total: int = 0
    kv_tokens_withheld: int = 0
    kv_tokens_retained: int = 0
    prefix_tokens_used_total: int = 0
    prefix_tokens_dropped_total: int = 0
    weight_version: str = ""
    processes: tuple[ProcessId, ...] = ()
    weights_away: bool = False
    isolation: str = ""
    memory: GuestMemory = GuestMemory()


class OwnWork:
    """CPU time of one thread between entering and leaving; not entered twice at once."""

    __slots__ = ("_began_ns", "total_s")

    def __init__(self) -> None:
        self._began_ns, self.total_s = 0, 0.0

    def __enter__(self) -> None:
        self._began_ns = thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self.total_s += (thread_time_ns() - self._began_ns) * 1e-9


@dataclass(slots=True)
class _SeenPages:
    """Conclusions from the pages as last read. Most steps begin and end between two writes of a
    page, which come each 100 ms."""

    grant: Reading[Grant]
    pulses: Sequence[Reading[PulseHead]] = ()
    moment: ProductionMoment | None = None
    """Production's state; None if it is unknown, or not asked for yet."""
    decision: StepDecision | None = None
    """A step beside idle production without a rest: it may begin again while the load is as it
    was and no step was longer than predicted, since only a page can tell of an arrival."""
    load: tuple[int, int] = (0, 0)
    """Decodes and context tokens of the decision."""


class GuestSlot:
    """Decisions and accounts of one guest on one slot."""

    def __init__(self, directory: Path, *, token_limit: int, owners: PageOwners = OWN_USER) -> None:
        """Raises ConfigError or Exhausted if the guest page cannot be made, PageHeld if another
        guest runs on the slot."""
        self._directory = PageDirectory(directory, owners)
        self._grant_page = self._directory.grant_reader()
        self._guest_page = self._directory.guest_page()
        self._guest_page.make()
        self._look_ns = self._published_ns = 0
        self._pulses = GrantedPulses(self._directory)
        self._token_limit = token_limit
        self._seen = _SeenPages(self._grant_page.read())
        self.steps = GuestSteps()
        self.load = GuestQueue()
        self.kv_obeyed_tokens: int | None = None
        """The last obeyed budget; None: no limit."""
        self.kv_short_tokens = 0
        """KV tokens that requests held above the budget at that time."""
        self.sleeps = False
        """Whether the weights are offloaded when the slot falls asleep."""
        self.last = self._for_step = StepDecision(0, Closed.NO_GRANT, 0.0)
        self._mean_wait_s: float | None = None
        """`mean_wait_s` of the launched step; a step that owes a rest runs alone."""
        self.granted = Grant(epoch=0, mode=GrantMode.CLOSED, kv_retained_ratio=0.0)
        """The last readable grant; without a grant nothing falls asleep or wakes up."""
        self._memory_deadline = MemoryDeadline()
        self._watch: IsolationWatch | None = None
        self._granted_ns = monotonic_ns()
        self._closings = self._aborted = 0
        self._decide_s = 0.0
        self.own_work = OwnWork()
        """Accounts for the CPU time of the engine loop's thread."""
        self._lending_ns, self._lends = 0, Lending()
        self._closed = False
        self._lock = threading.Lock()

    def decide(self, *, for_step: bool = False) -> StepDecision:
        """Decide whether a step may start now. Reads every page of the slot.

        `for_step` is False for the waker's checks, whose cost does not enter the mean decision
        time.
        """
        with self._lock:
            # CPU time of this thread: beside production the idle class is preempted at any moment.
            began_ns, now_ns = thread_time_ns(), monotonic_ns()
            grant = self._grant_page.read(now_ns=now_ns)
            pulses: list[Reading[PulseHead]] = []
            if grant.record is not None:
                self._granted_ns, self.granted = now_ns, grant.record
                pulses = self._pulses.read(grant.record, now_ns=now_ns)
            seen = self._see(grant, pulses)
            load = self.load.running, -(-self.load.kv_tokens // _HELD_TOKENS) * _HELD_TOKENS
            decision = seen.decision
            if decision is None or load != seen.load or self.steps.owes:
                decision = self._decided(load, now_ns)
                holds = decision.open and decision.owed_s is not None
                holds = holds and decision.mean_wait_s is None and not self.steps.owes
                seen.decision, seen.load = decision if holds else None, load
            if decision.tokens == 0 < self.last.tokens:
                self._closings += 1
            self.last = decision
            if for_step:
                self._for_step = decision
                self._decide_s += 0.01 * ((thread_time_ns() - began_ns) * 1e-9 - self._decide_s)
            return decision

    def _decided(self, load: tuple[int, int], now_ns: int) -> StepDecision:
        steps, seen = self.steps, self._seen
        guest = steps.load
        guest.decodes, guest.context_tokens = load
        guest.launched_s, guest.cap = steps.launched_s, self._token_limit
        may_probe = now_ns > steps.probe_ns
        decision = decide(seen.grant, seen.pulses, guest, may_probe=may_probe, now_ns=now_ns)
        if decision.owed_s is not None:
            guest.rest_s, guest.rested_ns = decision.owed_s, now_ns
        return decision

    def written(self, *, grant_only: bool = False) -> tuple[Word, ...]:
        """Futex words of the slot's pages, to wait on."""
        with self._lock:
            pages = () if grant_only else self._pulses.pages
            words = [self._grant_page.peek(), *[page.peek() for page in pages]]
            return tuple([word for word in words if word is not None])

    def isolation_watch(self) -> IsolationWatch | None:
        """A watch that is not started yet; None for an isolation that cannot fail later."""
        load = self.load
        if load.isolation in PREEMPTING:
            backend = IsolationBackend(load.isolation)
            self._watch = IsolationWatch(backend, self._directory, guest=lambda: load.processes)
        return self._watch

    @property
    def abort_grace_s(self) -> float:
        return min(self.granted.abort_grace_s, _GRACE_MAX_S)

    def grace_over(self) -> bool:
        """Whether, at the last decision, the grant had been missing for longer than its grace."""
        if self._seen.grant.record is not None:
            return False
        return monotonic_ns() - self._granted_ns > self.abort_grace_s * 1e9

    def kv_budget_tokens(self) -> int | None:
        """KV that the guest may keep after the last decision; None: no limit."""
        # A late grant takes nothing; a grant that is missing beyond its grace takes everything.
        if self.grace_over() or self.granted.asleep:
            return 0
        return self.granted.kv_budget_tokens or None

    def owes_memory(self) -> bool:
        """Whether the engine loop must obey a new budget, or sleep or wake."""
        if self.sleeps and self.load.weights_away != self.granted.asleep:
            return True
        return self.kv_short_tokens > 0 or self.kv_obeyed_tokens != self.kv_budget_tokens()

    def memory_missed(self) -> bool:
        """Whether the guest, at the last decision, had held more than its budget for longer than
        its deadline. A sleeping guest has no deadline: production does not need that memory yet.
        Called by one thread only."""
        waits = self.grace_over() or not self.granted.asleep
        return self._memory_deadline.missed(
            usable_tokens=self.load.kv_tokens_total - self.load.kv_tokens_withheld,
            budget_tokens=self.kv_budget_tokens() if waits else None,
            deadline_s=min(self.granted.kv_deadline_s, _DEADLINE_MAX_S),
            now=monotonic_ns() * 1e-9,
        )

    def launched(self, *, decodes: int, prefill_tokens: int) -> None:
        with self._lock:
            now_ns = monotonic_ns()
            self.steps.launch(
                decodes=decodes,
                prefill_tokens=prefill_tokens,
                context_tokens=self.load.kv_tokens,
                production=self._production(now_ns),
                now_ns=now_ns,
            )
            self._mean_wait_s = self._for_step.mean_wait_s

    def finished(self) -> None:
        """Record the end of the oldest launched step."""
        with self._lock:
            now_ns = monotonic_ns()
            self._see(self._seen.grant, [page.read(now_ns=now_ns) for page in self._pulses.pages])
            self.steps.finish(
                production=self._production(now_ns),
                now_ns=now_ns,
                preempted=self.granted.blocking_ratio < 1.0,
            )
            if self.steps.load.last_own_s > self.steps.last_predicted_s:
                # The machine may have become slower: the next step is decided by what was learned.
                self._seen.decision = None
            wait_s, self._mean_wait_s = self._mean_wait_s, None
            if wait_s is not None:
                self.steps.rest(wait_s, self.granted, chance=random())

    def aborted(self, requests: int) -> None:
        self._aborted += requests

    def page_due(self) -> bool:
        """Whether to write the guest page after a step, or it has been written just before."""
        return monotonic_ns() - self._published_ns >= _STEP_PAGE_NS

    def publish(self) -> None:
        """Write the guest page."""
        with self._lock:
            if not self._closed:
                self._published_ns = now_ns = monotonic_ns()
                if now_ns >= self._look_ns:
                    self._look_ns = now_ns + _LOOK_NS
                    self._guest_page.keep()
                self._guest_page.write(
                    self._record(now_ns), now_ns=now_ns, ttl_ns=GUEST_PAGE_TTL_NS
                )

    def close(self) -> None:
        """Give up the guest page; later calls do not write it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._guest_page.close(unlink=True)

    def _record(self, now_ns: int) -> Guest:
        decision, steps = self.last, self.steps
        observed = ObservedIsolation() if self._watch is None else self._watch.observed
        alone, beside = steps.calibrations(now_ns=now_ns)
        queue = msgspec.structs.asdict(self.load)
        queue["processes"] = self.load.processes[:_MOST_PROCESSES]
        return Guest(
            **queue,
            epoch=self.granted.epoch,
            gate="open" if decision.open else "closed",
            reason=(decision.fault or decision.reason or ""),
            steps_launched=steps.launched_total,
            steps_finished=steps.finished_total,
            tokens_total=steps.tokens_total,
            last_step_tokens=steps.last_tokens,
            last_step_s=steps.last_step_s,
            last_step_end_ns=steps.load.last_end_ns,
            blocking_ratio=observed.blocking_ratio,
            isolation_fault=observed.fault[:_FAULT_CHARACTERS],
            step_over_ratio=steps.model.over_ratio,
            step_calibration=alone,
            beside_calibration=beside,
            aborted_total=self._aborted,
            closings_total=self._closings,
            decide_s_mean=self._decide_s,
            step_work_s_total=self.own_work.total_s,
            lending=self._lending(now_ns),
            steps_met=tuple(steps.met.counts),
            latest_steps_ns=tuple(steps.latest_ns),
        )

    def _lending(self, now_ns: int) -> Lending:
        """Renewed once a second; nothing known without grant and pulses."""
        if now_ns >= self._lending_ns:
            self._lending_ns = now_ns + _LENDING_NS
            pulses = self._pulses.read(self.granted, now_ns=now_ns)
            present = [pulse.record for pulse in pulses if pulse.record is not None]
            self._lends = Lending()
            if present and len(present) == len(pulses):
                self._lends = lending(
                    present, self.granted, self.steps.model, token_limit=self._token_limit
                )
        return self._lends

    def _see(self, grant: Reading[Grant], pulses: Sequence[Reading[PulseHead]]) -> _SeenPages:
        """Conclusions from these readings; the earlier ones while each page reads as before."""
        seen = self._seen
        alike = grant is seen.grant and len(pulses) == len(seen.pulses)
        if not (alike and all(map(is_, pulses, seen.pulses))):
            seen = self._seen = _SeenPages(grant, pulses)
        return seen

    def _production(self, now_ns: int) -> ProductionMoment | None:
        """Production's state by the pages as last read; None without the grant or a pulse."""
        seen = self._seen
        grant = seen.grant.record
        if seen.moment is None and grant is not None:
            pulses = [reading.record for reading in seen.pulses if reading.record is not None]
            if len(pulses) == len(seen.pulses):
                seen.moment = ProductionMoment(
                    idle(pulses, terms_of(pulses, grant), now_ns=now_ns),
                    sum([pulse.requests_total for pulse in pulses]),
                    sum([pulse.waiting for pulse in pulses]),
                )
        return seen.moment
