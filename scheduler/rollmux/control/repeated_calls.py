"""A job's calls that wait: for a control that answers, for a placement, for a permit.

Each is repeated for as long as the job's patience lasts. That no control answers is logged once a
minute: a wait without a word looks like a queue.
"""

import logging
import threading
from contextlib import suppress
from math import inf

from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import JobId
from harvester.platform.backoff import Backoff, RetryLimits
from scheduler.rollmux.cluster.runtime_events import Call, Submit
from scheduler.rollmux.control.wire import (
    Accepted,
    CallRefused,
    Ended,
    Granted,
    Placed,
    Reply,
    Transport,
    Waiting,
    reply_text,
)
from scheduler.rollmux.permits.events import Enter, Leave, Register, Withdraw

_log = logging.getLogger(__name__)
_OLD_RATIO = 1 / 3
"""Share of the lease after which the answer to a request is too old: it is asked again, which gives
the permit a whole lease."""


class RepeatedCalls:
    """Calls raise Exhausted after `timeout_s`, ConfigError where the control refuses for good."""

    def __init__(self, transport: Transport, clock: Clock, job: JobId, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._transport = transport
        self._clock = clock
        self._job = job
        self._silences = EventLimit(burst=1.0, per_s=1 / 60)

    def patience(self, timeout_s: float | None = None) -> Backoff:
        """A wait that begins now."""
        limits = RetryLimits(
            give_up_s=self.timeout_s if timeout_s is None else timeout_s,
            attempts_max=inf,
            first_wait_s=0.02,
            wait_max_s=0.5,
        )
        return Backoff(limits, self._clock)

    def place(self, declaration: Submit | Register) -> Placed | None:
        """The job's placement; None by a control that does not plan."""
        pauses = self.patience()
        while True:
            reply = self._answer(declaration, pauses)
            if reply is None:
                continue
            if isinstance(reply, Accepted):
                return None
            if isinstance(reply, Placed):
                return reply
            if isinstance(reply, CallRefused) and reply.retry_after_s is None:
                raise ConfigError(f"job {self._job}: {reply.reason}")
            pauses.pause(Exhausted(f"job {self._job} {reply_text(reply)}"))

    def enter(
        self, entry: Enter, pauses: Backoff, cancelled: threading.Event
    ) -> tuple[Granted, float] | None:
        """The permit, and the time of the request that it answers; None: first place the job."""
        what = f"{entry.kind} phase of job {self._job}"
        while not cancelled.is_set():
            asked_s = self._clock.now()
            match reply := self._answer(entry, pauses):
                case None:
                    continue
                case Granted() if cancelled.is_set():
                    break
                case Granted() if self._clock.now() - asked_s > _OLD_RATIO * reply.lease_s:
                    # Not held open: the permit is there.
                    entry = Enter(job=entry.job, kind=entry.kind, holder=entry.holder)
                    pauses.check("the control answers too slowly")
                case Granted():
                    return reply, asked_s
                case Waiting():
                    pauses.check(f"{reply.ahead} jobs are before it")
                case CallRefused(unknown=True):
                    return None
                case CallRefused(retry_after_s=None):
                    raise ConfigError(f"job {self._job}: {reply.reason}")
                case _:
                    pauses.pause(Exhausted(f"{what} {reply_text(reply)}"))
        raise Exhausted(f"{what}: cancelled")

    def leave(self, leave: Leave, *, timeout_s: float) -> Reply:
        """Raises Stale where the permit had ended."""
        pauses = self.patience(timeout_s)
        while True:
            reply = self._answer(leave, pauses)
            if isinstance(reply, Ended):
                raise Stale(f"phase of job {self._job}: {reply.reason}")
            if reply is not None:
                return reply

    def withdraw(self, holder: str) -> None:
        """Withdraws the request for a permit or a placement. If the control cannot be reached, the
        permit's lease, or the placement's `gone_s`, expires instead."""
        with suppress(Exhausted, PeerProtocolError):
            self._transport.call(Withdraw(job=self._job, holder=holder))

    def _answer(self, message: Call, pauses: Backoff) -> Reply | None:
        """The reply; None, after a pause, if no reply came."""
        try:
            return self._transport.call(message)
        except Exhausted as error:
            if self._silences.admits(now=self._clock.now()):
                _log.warning("job %s waits for a phase control: %s", self._job, error)
            pauses.pause(error)
            return None
