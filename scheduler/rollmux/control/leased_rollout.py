"""The shell around a rollout's leased tail: one permit, the job's gateway and its own thread.

The thread polls both, renews the job's switches at the gateway and sends the permit's requests,
independent of the job's code, synchronous or asyncio. Without an answer from the gateway nothing
moves, and its switches expire there.
"""

import logging
import threading
from typing import Final

from harvester.contracts.clock import Clock
from harvester.contracts.errors import RoseMuxError, Stale
from harvester.contracts.ids import NodeId
from scheduler.model import EngineKind
from scheduler.rollmux.control.job_gateway import GatewayView, JobGateway
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.wire import Transport
from scheduler.rollmux.permits.leased_tail import (
    BULK_RATIO,
    EngineSwitches,
    LeasedTail,
    RecallTail,
    ReportNarrowed,
    Tail,
    TailSample,
    TailState,
    taken_off_s,
)

POLL_S: Final = 0.1
SWITCH_TTL_S: Final = 10.0
"""A process that dies leaves nothing switched on for longer, nor for longer than its permit."""
RENEWALS: Final = 3
OFF: Final = EngineSwitches(dedicated=False, harvesting=False)

_log = logging.getLogger(__name__)


class LeasedRollout:
    """One rollout: `begin`, then `end`."""

    def __init__(
        self,
        permit: Permit,
        gateway: JobGateway,
        transport: Transport,
        clock: Clock,
        *,
        leases: bool,
    ) -> None:
        self._permit = permit
        self._gateway = gateway
        self._transport = transport
        self._clock = clock
        self._tail = LeasedTail(leases=leases)
        self._nodes = permit.nodes
        self._switch_ttl_s = min(SWITCH_TTL_S, permit.lease_s)
        self._kept: EngineSwitches | None = None
        """Switches that the gateway has confirmed; None before the first."""
        self._renew_s = 0.0
        self._off_by_s = 0.0
        """Time at which the switches that the gateway last confirmed expire."""
        self._tokens: dict[EngineKind, int] = {}
        """Tokens before the rollout, by the kind of engine."""
        self._began_s = 0.0
        self._bulk_over_s: float | None = None
        self._leased_ratio = 0.0
        """Share of the bulk's tokens made on leases."""
        self._stays: bool | None = None
        """Whether a job that waits for the nodes uses the same gateway; None: not looked at yet."""
        self._fault = ""
        self._over = threading.Event()
        self._poller = threading.Thread(target=self._poll, name=f"leases-{permit.job}", daemon=True)

    @property
    def leased_s(self) -> float:
        """The time that leases have taken off the rollout; its tail took as long as at home."""
        bulk_s = (self._bulk_over_s or self._began_s) - self._began_s
        return taken_off_s(bulk_s, leased_ratio=self._leased_ratio)

    @property
    def tails(self) -> tuple[Tail, ...]:
        """The ended tails."""
        return tuple(self._tail.tails)

    def begin(self) -> None:
        """Gives the job its engines and makes them serve it, if the gateway answers."""
        view = self._view()
        self._tokens = {} if view is None else view.tokens(self._permit.job)
        self._began_s = self._clock.now()
        if view is not None and view.active_job not in (None, self._permit.job):
            try:
                self._gateway.activate()
            except Stale:
                pass  # The job's first publish makes it the served job.
            except RoseMuxError as error:
                self._log_once(error)
        self._keep_switches()
        self._poller.start()

    def end(self) -> None:
        """Takes engines and leases from the job, also where `begin` was interrupted."""
        self._over.set()
        try:
            if self._poller.ident is not None:
                self._poller.join()
            self._tail.end(now=self._clock.now())
            self._measure_bulk()
        finally:
            self._switch_off()

    def _switch_off(self) -> None:
        try:
            self._gateway.switch(OFF, for_s=0.0)
        except RoseMuxError as error:
            self._log_once(error)
            # The nodes are the job's until its turns there have ended by themselves.
            threading.Event().wait(max(0.0, self._off_by_s - self._clock.now()))

    def _measure_bulk(self) -> None:
        """Measures the bulk, once, when the rollout is in its tail or over."""
        if self._bulk_over_s is None:
            self._bulk_over_s = self._clock.now()
            self._leased_ratio = self._measured_ratio()

    def _measured_ratio(self) -> float:
        """Share of the tokens so far that guests generated; 0 without a report of the gateway."""
        # A gateway that failed to answer last is not asked: other jobs wait for these nodes.
        view = self._view() if self._kept is not None and self._tokens else None
        if view is None:
            return 0.0
        tokens = view.tokens(self._permit.job)
        made = {kind: tokens.get(kind, 0) - before for kind, before in self._tokens.items()}
        if min(made.values()) < 0 or not any(made.values()):
            return 0.0
        return made.get(EngineKind.GUEST, 0) / sum(made.values())

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            self._poll_once()

    def _poll_once(self) -> None:
        if self._permit.keep is not None or self._permit.complete_ratio >= BULK_RATIO:
            self._measure_bulk()
        for effect in self._tail.observe(self._sample(), now=self._clock.now()):
            match effect:
                case ReportNarrowed():
                    self._permit.narrowed()
                case RecallTail():
                    self._permit.recall(effect.how)
        self._keep_switches()

    def _sample(self) -> TailSample:
        asked = self._permit.keep == ()
        if not asked:
            # Another job may be the one that waits next.
            self._stays = None
        away = self._tail.state in (TailState.AWAY, TailState.IN_LINE)
        view = self._view() if asked or away else None
        tokens = {} if view is None else view.tokens(self._permit.job)
        serves = view is not None and view.guest_serves(self._permit.job)
        return TailSample(
            stage=self._permit.stage,
            may_leave=asked and serves and view is not None and not self._shares(view),
            lost=bool(self._permit.lost),
            guest_serves=serves,
            guest_busy=view is not None and view.guest_busy,
            guest_tokens=tokens.get(EngineKind.GUEST, 0),
            engines_off=self._kept is not None and not self._kept.dedicated,
        )

    def _view(self) -> GatewayView | None:
        try:
            return self._gateway.view()
        except RoseMuxError as error:
            self._log_once(error)
            return None

    def _shares(self, view: GatewayView) -> bool:
        """A waiting job of the same gateway would take the leased guests with the engines."""
        if self._stays is None:
            required: set[NodeId] = set(self._nodes)
            try:
                jobs = self._transport.jobs()
            except RoseMuxError as error:
                self._log_once(error)
                return True
            waiting = (each.job for each in jobs if required & set(each.awaits))
            self._stays = any(job in view.jobs for job in waiting if job != self._permit.job)
        return self._stays

    def _keep_switches(self) -> None:
        """Sends the switches in force, if they changed or are about to expire."""
        target, now = self._tail.switches, self._clock.now()
        if target == self._kept and now < self._renew_s:
            return
        try:
            self._gateway.switch(target, for_s=self._switch_ttl_s)
        except RoseMuxError as error:
            self._kept = None
            self._log_once(error)
            return
        self._kept, self._fault = target, ""
        self._renew_s = now + self._switch_ttl_s / RENEWALS
        self._off_by_s = self._clock.now() + self._switch_ttl_s if target.dedicated else 0.0

    def _log_once(self, error: RoseMuxError) -> None:
        """Logs once for each fault in a row."""
        if str(error) != self._fault:
            self._fault = str(error)
            _log.warning("job %s rolls out without its leases: %s", self._permit.job, error)
