"""A permit in its holder's hands: beats that keep it, its state in the replies, and its end.

A thread of its own reports that the holder lives. If the control is absent, the holder goes on:
nothing can give its nodes away meanwhile, and the returning control knows the epoch. If the control
is present but silent, the permit is given up one margin before its lease ends.
"""

import threading
from operator import index

from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.wire import (
    ControlUnreachable,
    Ended,
    Granted,
    PermitSnapshot,
    Transport,
)
from scheduler.rollmux.permits.events import Beat, Recall
from scheduler.rollmux.permits.job_permit import PermitStage

_BEATS_PER_LEASE = 3
_BEAT_MAX_S = 1.0
"""Upper bound of the beat period, in s: the reply shows a tail that other jobs wait."""
_PROGRESS_STEP = 0.01
"""Progress by less than this waits for the next beat."""
_MARGIN_RATIO = 0.1
_ROUNDING = 1e-6
"""Excess over 1 that a sum of shares may have, in 32-bit floats too."""


class Permit:
    """One phase of a job while it runs. Safe to use from any thread of its process."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        job: JobId,
        kind: PhaseKind,
        granted: Granted,
        asked_s: float,
    ) -> None:
        """`asked_s`: time of the request that the grant answers. The control counts the lease from
        a later moment, so that it ends for the holder first."""
        self.job, self.kind = job, kind
        self.epoch = granted.epoch
        self._transport = transport
        self._clock = clock
        self.lease_s = granted.lease_s
        self._state = PermitSnapshot(
            stage=PermitStage.RUNNING, nodes=granted.nodes, accelerators=granted.accelerators
        )
        self._complete_ratio, self._tokens, self._narrowed = 0.0, 0, False
        self._recall: Recall | None = None
        self._reported_ratio = 0.0
        self._lost = self._fault = ""
        self._answered_s = asked_s
        self._asked_to_narrow_s: float | None = None
        self.narrowing_s = 0.0
        """Time spent on bringing the tail together, in s."""
        self._ended = False
        self._wake = threading.Event()
        self._beating = threading.Thread(target=self._beats, name=f"permit-{job}", daemon=True)
        self._beating.start()

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Nodes held now: grows when another job's tail leaves, shrinks when this one is
        narrowed."""
        return self._state.nodes

    @property
    def accelerators(self) -> dict[NodeId, tuple[int, ...]]:
        """Accelerator numbers of the partly held nodes; other nodes are held whole."""
        return self._state.accelerators

    @property
    def keep_accelerators(self) -> dict[NodeId, tuple[int, ...]]:
        """Accelerator numbers to keep of the nodes in `keep`; nodes not named are kept whole."""
        return self._state.keep_accelerators

    @property
    def stage(self) -> PermitStage:
        """Stage by the control's last reply."""
        return self._state.stage

    @property
    def keep(self) -> tuple[NodeId, ...] | None:
        """Nodes on which to gather the tail before calling `narrowed`; None without a request."""
        return self._state.keep if self._state.stage is PermitStage.NARROWING else None

    @property
    def warned(self) -> bool:
        """The phase takes longer than the job declared."""
        return self._state.warned

    @property
    def ends_in_s(self) -> float | None:
        """Set when the permit is revoked: end the phase within this."""
        return self._state.ends_in_s

    @property
    def lost(self) -> str:
        """Why the permit has ended; empty while it is held."""
        if self.in_doubt and not (self._lost or self._ended):
            self._lost = f"the phase control is silent: {self._fault or 'no answer'}"
        return self._lost

    @property
    def in_doubt(self) -> bool:
        """Whether another job may hold its nodes by now; a control that stood still too may yet
        take the phase's end."""
        # A call that is not answered may fail only after the lease.
        silent_s = self._clock.now() - self._answered_s
        return bool(self._lost) or silent_s > self.lease_s * (1 - _MARGIN_RATIO)

    def check(self) -> None:
        """Raises Stale when the permit has ended: stop, and go back to the last checkpoint."""
        if self.lost:
            raise Stale(f"{self.kind} phase of job {self.job}: {self._lost}")

    @property
    def complete_ratio(self) -> float:
        """Completed share of responses, as last reported by the job."""
        return self._complete_ratio

    def progress(self, complete_ratio: float, *, tokens: int = 0) -> None:
        """Reports the completed share of the phase, 0 to 1, and the number of its tokens.

        Raises ConfigError for anything else: in a beat the control would refuse it.
        """
        try:
            complete_ratio, tokens = float(complete_ratio), index(tokens)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"progress: give a share and a number of tokens: {error}") from error
        if not 0.0 <= complete_ratio <= 1.0 + _ROUNDING:
            raise ConfigError(f"progress: give a share from 0 to 1, not {complete_ratio}")
        if tokens < 0:
            raise ConfigError(f"progress: give 0 tokens or more, not {tokens}")
        self._complete_ratio, self._tokens = min(complete_ratio, 1.0), tokens
        if complete_ratio >= self._reported_ratio + _PROGRESS_STEP:
            self._reported_ratio = complete_ratio
            self._wake.set()

    def narrowed(self) -> None:
        """The tail runs on `keep`; the other nodes are empty."""
        if self._asked_to_narrow_s is not None and not self._narrowed:
            self.narrowing_s += self._clock.now() - self._asked_to_narrow_s
        self._narrowed, self._recall = True, None
        self._wake.set()

    def recall(self, how: Recall) -> None:
        """The tail asks for the nodes that it left; `nodes` has them when it may use them."""
        self._recall, self._narrowed = how, False
        self._wake.set()

    def end(self) -> None:
        """Stops the beats; none is under way after it."""
        self._ended = True
        self._wake.set()
        self._beating.join()

    def _beats(self) -> None:
        while not self._ended and not self.lost:
            self._wake.wait(min(self.lease_s / _BEATS_PER_LEASE, _BEAT_MAX_S))
            self._wake.clear()
            if not self._ended:
                self._beat()

    def _beat(self) -> None:
        recall, self._recall = self._recall, None
        beat = Beat(
            job=self.job,
            epoch=self.epoch,
            complete_ratio=self._complete_ratio,
            tokens=self._tokens,
            narrowed=self._narrowed,
            recall=recall,
        )
        asked_s = self._clock.now()
        try:
            reply = self._transport.call(beat)
        except ControlUnreachable:
            self._answered_s = asked_s
            return
        except (Exhausted, PeerProtocolError) as error:
            self._fault = str(error)
            return
        self._answered_s = asked_s
        if isinstance(reply, PermitSnapshot):
            self._state = reply
            if reply.stage is PermitStage.NARROWING and self._asked_to_narrow_s is None:
                self._asked_to_narrow_s = self._clock.now()
        elif isinstance(reply, Ended):
            self._lost = reply.reason
