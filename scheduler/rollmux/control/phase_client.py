"""Phases in a job's code: they run when their nodes are free, and start warm.

    phases = PhaseClient(SocketTransport(Path("/run/phases/phases.sock")), terms)
    phases.resident(PhaseKind.TRAINING, on_resume=load, on_release=offload)

    @phases.phase("rollout")
    def roll_out(): ...

    with phases.phase("training") as permit:  # or `async with`
        permit.progress(0.5)

Entering waits for the permit, then loads the state from host memory; leaving gives the nodes back.
The state stays loaded until another job is to start there; with `stays_loaded=False` it leaves at
the end of its phase. The process lives on: communicators and environments are made once.
"""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import msgspec

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, Stale
from scheduler.model import JobSpec, PhaseKind
from scheduler.rollmux.cluster.runtime_events import OrderMove, Submit
from scheduler.rollmux.control.job_gateway import GatewayAccess
from scheduler.rollmux.control.leased_rollout import LeasedRollout
from scheduler.rollmux.control.loaded_states import LoadedStates
from scheduler.rollmux.control.permit import Permit as PhasePermit
from scheduler.rollmux.control.phase import Phase
from scheduler.rollmux.control.repeated_calls import RepeatedCalls
from scheduler.rollmux.control.wire import (
    Accepted,
    Granted,
    Placed,
    Reply,
    Transport,
)
from scheduler.rollmux.permits.events import Enter, Forget, Leave, Register
from scheduler.rollmux.permits.leased_tail import Tail
from scheduler.rollmux.permits.terms import JobTerms, leased_tail, terms_fault

Resume = Callable[[bool], None]
"""Called with whether the start is cold: the first of this kind in this process."""
Release = Callable[[], None]
OnMove = Callable[[OrderMove], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Record of a phase's start."""

    kind: PhaseKind
    cold: bool
    waited_s: float
    """Wait for the permit, in s."""
    resume_s: float
    """Time from the permit to the phase's first line, in s."""


@dataclass(frozen=True, slots=True)
class _Resident:
    on_resume: Resume
    on_release: Release
    stays_loaded: bool


class PhaseClient:
    """A job's side of the phase control. One phase of a job runs at a time."""

    Terms, Gateway = JobTerms, GatewayAccess
    Permit: TypeAlias = PhasePermit
    Move: TypeAlias = OrderMove
    _installed: ClassVar["PhaseClient | None"] = None
    """The process's client: a phase may run in any thread of it."""

    def __init__(
        self,
        transport: Transport,
        terms: JobTerms | JobSpec,
        *,
        clock: Clock | None = None,
        timeout_s: float = float("inf"),
        on_move: OnMove = lambda _move: None,
        gateway: GatewayAccess | None = None,
    ) -> None:
        """`terms` name the job's nodes; a planning control takes a `JobSpec` and names them.

        `timeout_s` bounds the wait for a placement, for a permit and for an absent control.
        A job's move comes between two iterations: `on_move` frees what it holds on its old
        nodes, and the job waits until its new ones have room. Its next phase loads it there.
        With a `gateway` its rollouts use leases of it, and their tails may end there.

        Raises ConfigError if the job is refused, Exhausted if no control answers in time.
        """
        if not timeout_s >= 0:
            raise ConfigError(f"timeout_s {timeout_s}: use 0 or more")
        self.job = terms.job
        self.starts: list[Start] = []
        self.placement: Placed | None = None
        """Placement by a planning control; None without a plan."""
        self.tails: list[Tail] = []
        """Tails that left their nodes for leases, of rollouts that have ended."""
        self._transport = transport
        if isinstance(terms, JobTerms) and (fault := terms_fault(terms)):
            raise ConfigError(f"job {terms.job}: {fault}")
        self._gateway = None if gateway is None else gateway.of(terms.job)
        self._leased: LeasedRollout | None = None
        self._clock = clock or MonotonicClock()
        self._calls = RepeatedCalls(transport, self._clock, terms.job, timeout_s=timeout_s)
        self._holder = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._declaration = _declaration(terms, self._holder, harvesting=gateway is not None)
        self._on_move = on_move
        self._loading_s = self._released_s = 0.0
        self._leased_s = 0.0
        self._loaded = LoadedStates(transport, self._clock, self.job, self._holder)
        self._residents: dict[PhaseKind, _Resident] = {}
        self._entered: set[PhaseKind] = set()
        self._open: PhaseKind | None = None
        self._opening = threading.Lock()
        if self._gateway is not None:
            # A job that its gateway refuses must take no nodes.
            self._gateway.switch_off()
        try:
            self.placement = self._calls.place(self._declaration)
        except ConfigError:
            raise
        except BaseException:
            # Later jobs would wait behind one that has no process.
            self._calls.withdraw(self._holder)
            raise

    def resident(
        self,
        kind: PhaseKind,
        *,
        on_resume: Resume = lambda _cold: None,
        on_release: Release = lambda: None,
        stays_loaded: bool = True,
    ) -> None:
        """Hooks that load this kind of phase's state on accelerators, and take it off them.

        The state stays loaded when its phase ends, until another job is to start there:
        `on_release` may be called by another thread, during another phase of the job. Without
        `stays_loaded` it is called when the phase ends.
        """
        self._residents[PhaseKind(kind)] = _Resident(on_resume, on_release, stays_loaded)

    def phase(self, kind: PhaseKind | str) -> Phase:
        """A context manager and a decorator."""
        return Phase(lambda: self, PhaseKind(kind))

    @staticmethod
    def late_phase(kind: PhaseKind | str) -> Phase:
        """A phase of the client that is installed at entry, not at declaration.

        Raises ConfigError on entry without an installed client.
        """
        return Phase(_installed, PhaseKind(kind))

    def install(self) -> None:
        """Makes it the client of `late_phase` from here on, in every thread."""
        PhaseClient._installed = self

    def forget(self) -> None:
        """The job is over: give up its placement for good."""
        self._loaded.release()
        self._transport.call(Forget(job=self.job))

    def begin(self, kind: PhaseKind, *, cancelled: threading.Event | None = None) -> PhasePermit:
        """`cancelled`, set by another thread, ends the wait for the permit.

        Raises Exhausted where no permit came in time, ConfigError for a phase it has not.
        """
        with self._opening:
            if self._open is not None:
                raise ConfigError(f"job {self.job}: its {self._open} phase must end before {kind}")
            # Before the wait: another thread of the process would be granted the same permit.
            self._open = kind
        waits_s = self._clock.now()
        try:
            granted, asked_s = self._awaited(kind, cancelled or threading.Event())
        except BaseException:
            # A permit that has come unseen goes with the wait, and its nodes to another job.
            try:
                self._loaded.release()
                self._calls.withdraw(self._holder)
            finally:
                self._open = None
            raise
        granted_s = self._clock.now()
        permit = PhasePermit(
            self._transport, self._clock, job=self.job, kind=kind, granted=granted, asked_s=asked_s
        )
        self._loaded.busy = lambda: permit.nodes
        cold = kind not in self._entered
        resident = self._residents.get(kind)
        taken = False
        try:
            found = self._loaded.take(kind, granted.nodes)
            taken = True
            if not found and resident is not None:
                resident.on_resume(cold)
        except BaseException as error:
            # A state that could not make way is still there.
            self._leave(permit, failed=f"could not be resumed: {error!r}", stays_loaded=not taken)
            raise
        self._entered.add(kind)
        if kind is PhaseKind.ROLLOUT and self._gateway is not None:
            leases = self.placement is None or self.placement.harvesting
            leased = LeasedRollout(
                permit, self._gateway, self._transport, self._clock, leases=leases
            )
            # Set before: an interrupted beginning has to take engines and leases away again.
            self._leased = leased
            with self._given_back(permit):
                leased.begin()
        resumed_s = self._clock.now()
        self._loading_s = resumed_s - granted_s
        self.starts.append(
            Start(
                kind=kind, cold=cold, waited_s=granted_s - waits_s, resume_s=resumed_s - granted_s
            )
        )
        return permit

    def end(self, permit: PhasePermit, *, failed: str = "") -> None:
        """Raises Stale where the permit ended before its phase did."""
        resident = self._residents.get(permit.kind)
        leased, self._leased = self._leased, None
        if leased is not None:
            with self._given_back(permit):
                leased.end()
            self.tails += leased.tails
            self._leased_s = leased.leased_s
            self._loading_s += sum(tail.in_line_s for tail in leased.tails)
        self._loading_s += permit.narrowing_s
        ended_s = self._clock.now()
        whole = permit.stage.is_whole and not failed and not permit.in_doubt
        stays_loaded = resident is not None and resident.stays_loaded and whole
        try:
            if resident is not None and not stays_loaded:
                resident.on_release()
        except BaseException as error:
            # It is still there: the next job waits until another try has taken it off.
            self._keep_loaded(permit, resident, stuck=True)
            failed = failed or f"could not be released: {error!r}"
            self._leave(permit, failed=failed, stays_loaded=True)
            raise
        self._released_s = self._clock.now() - ended_s
        self._loading_s += self._released_s
        if stays_loaded:
            self._keep_loaded(permit, resident)
        self._leave(permit, failed=failed, stays_loaded=stays_loaded)
        if not failed:
            permit.check()

    def _keep_loaded(
        self, permit: PhasePermit, resident: _Resident | None, *, stuck: bool = False
    ) -> None:
        """The phase's state stays on its nodes."""
        if resident is not None:
            release, lease_s = resident.on_release, permit.lease_s
            self._loaded.leave(permit.kind, permit.nodes, release, lease_s=lease_s, stuck=stuck)

    @contextmanager
    def _given_back(self, permit: PhasePermit) -> Iterator[None]:
        """Gives the permit back where the gateway's calls are interrupted, as by Ctrl-C."""
        try:
            yield
        except BaseException as error:
            self.end(permit, failed=repr(error))
            raise

    def _awaited(self, kind: PhaseKind, cancelled: threading.Event) -> tuple[Granted, float]:
        """The permit, and the time of the request that it answers."""
        pauses = self._calls.patience()
        entry = Enter(job=self.job, kind=kind, holder=self._holder, wait_s=1.0)
        while (found := self._calls.enter(entry, pauses, cancelled)) is None:
            self._place_again()
        return found

    def _leave(self, permit: PhasePermit, *, failed: str, stays_loaded: bool = False) -> None:
        """Repeats until the control has received it; an absent one receives it on its return."""
        self._loaded.busy = tuple
        leave = Leave(
            job=self.job,
            epoch=permit.epoch,
            failed=failed[:500],
            loading_s=self._loading_s,
            leased_s=self._leased_s,
            stays_loaded=stays_loaded,
            released_s=self._released_s,
        )
        self._leased_s = self._released_s = 0.0
        # A failed holder reports it while its lease lasts: after that the control knows by itself.
        timeout_s = self._calls.timeout_s
        timeout_s = min(timeout_s, permit.lease_s) if failed else timeout_s
        try:
            permit.end()
            self._open = None
            reply = self._calls.leave(leave, timeout_s=timeout_s)
        except BaseException as error:
            # Another job may be where its states are, or is once the permit has lapsed.
            self._open = None
            self._loaded.release(permit.nodes)
            self._loaded.release()
            if failed and isinstance(error, Exhausted | Stale | PeerProtocolError):
                return
            raise
        if not failed:
            self._apply_leave_reply(reply)

    def _apply_leave_reply(self, reply: Reply) -> None:
        if not isinstance(reply, Accepted):
            return
        if reply.unload:
            self._loaded.release(reply.unload)
        if reply.move is None or self.placement is None:
            return
        self._loaded.release()
        self._on_move(reply.move)
        self._place_again()

    def _place_again(self) -> None:
        # A control that lost its state does not know what is loaded.
        self._loaded.release()
        self.placement = self._calls.place(self._declaration)


def _declaration(terms: JobTerms | JobSpec, holder: str, *, harvesting: bool) -> Submit | Register:
    """The job's first call; with `harvesting` its rollouts may use leases."""
    if isinstance(terms, JobSpec):
        harvesting |= terms.harvesting
        return Submit(spec=msgspec.structs.replace(terms, harvesting=harvesting), holder=holder)
    phases = tuple(map(leased_tail, terms.phases)) if harvesting else terms.phases
    return Register(terms=msgspec.structs.replace(terms, phases=phases))


def _installed() -> PhaseClient:
    if PhaseClient._installed is None:
        raise ConfigError("no phase client is installed: call its install()")
    return PhaseClient._installed
