"""States that stay on accelerators between a job's phases, until another job is to start there.

Leaving a phase keeps its state loaded, so that the next phase of the kind starts at once where no
other job was there meanwhile. A thread asks the control whether another is to start there, for as
long as anything is loaded: then the state is released, and the control hears so before that job
starts. A process that cannot hear the control, or stood still, releases everything one margin
before its lease ends: by then the control takes it for gone.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.wire import Accepted, ControlUnreachable, Ended, Transport
from scheduler.rollmux.permits.events import Unloaded

_ASKS_PER_LEASE = 5
_ASK_MAX_S = 0.5
_MARGIN_RATIO = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LoadedState:
    nodes: frozenset[NodeId]
    release: Callable[[], None]


class LoadedStates:
    """Loaded states of one process of a job. Safe to use from any thread."""

    def __init__(self, transport: Transport, clock: Clock, job: JobId, holder: str) -> None:
        self._transport = transport
        self._clock = clock
        self._job, self._holder = job, holder
        self.busy: Callable[[], tuple[NodeId, ...]] = tuple
        """Nodes of the phase that runs now: reported as clear only once it has ended."""
        self._states: dict[PhaseKind, _LoadedState] = {}
        self._stuck: set[PhaseKind] = set()
        """States whose release failed: not loaded as they should be, and not gone. Logged once in a
        row, and tried again."""
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._lease_s = 0.0
        self._answered_s = 0.0

    def leave(
        self,
        kind: PhaseKind,
        nodes: Iterable[NodeId],
        release: Callable[[], None],
        *,
        lease_s: float,
        stuck: bool = False,
    ) -> None:
        """The phase has ended, and its state is still on these nodes.

        `stuck`: since its release failed.
        """
        with self._lock:
            if stuck:
                self._stuck.add(kind)
            if not self._states:
                self._answered_s = self._clock.now()
            self._states[kind], self._lease_s = _LoadedState(frozenset(nodes), release), lease_s
            if self._asking is None:
                self._asking = threading.Thread(
                    target=self._asks, name=f"loaded-{self._job}", daemon=True
                )
                self._asking.start()

    def take(self, kind: PhaseKind, nodes: Iterable[NodeId]) -> bool:
        """Whether the state is loaded on all of these nodes; releases others there, and reports it.

        Raises the error of a failed release.
        """
        required = frozenset(nodes)
        gone: set[NodeId] = set()
        with self._lock:
            for other, state in list(self._states.items()):
                fits = state.nodes >= required if other == kind else not state.nodes & required
                if not fits or other in self._stuck:
                    gone |= self._take_off(other)
            found = self._states.pop(kind, None)
        if gone - required:
            self._say(gone - required)
        return found is not None

    def release(self, nodes: Iterable[NodeId] | None = None) -> None:
        """Releases states on these nodes, or all, and reports clear nodes; failed ones stay."""
        asked = None if nodes is None else frozenset(nodes)
        gone = set(asked or ())
        with self._lock:
            for kind in list(self._states):
                if asked is not None and not self._states[kind].nodes & asked:
                    continue
                known = kind in self._stuck
                try:
                    gone |= self._take_off(kind)
                except Exception:
                    if not known:
                        _log.exception("job %s: its %s state stays loaded", self._job, kind)
            kept = (state.nodes for state in self._states.values())
            gone = gone.difference(self.busy(), *kept)
        if gone:
            self._say(gone)

    def _take_off(self, kind: PhaseKind) -> frozenset[NodeId]:
        """Releases a state; returns the nodes that it was on. Raises the error of its hook."""
        self._stuck.add(kind)
        self._states[kind].release()
        self._stuck.discard(kind)
        return self._states.pop(kind).nodes

    def _asks(self) -> None:
        while True:
            threading.Event().wait(self._period_s)
            with self._lock:
                if not self._states:
                    self._asking = None
                    return
            self._release_silent(self._clock.now())
            asked_s = self._clock.now()
            reply = self._say(())
            if isinstance(reply, Accepted) and reply.unload:
                self._release_on_request(reply.unload)
            elif isinstance(reply, Ended):
                self.release()
            else:
                # The next call may take as long as this one before it fails.
                self._release_silent(2 * self._clock.now() - asked_s)

    @property
    def _period_s(self) -> float:
        return min(self._lease_s / _ASKS_PER_LEASE, _ASK_MAX_S)

    def _release_on_request(self, nodes: tuple[NodeId, ...]) -> None:
        """Goes on calling meanwhile: a release may take longer than a lease, and a silent process
        counts as gone."""
        work = threading.Thread(target=self.release, args=(nodes,), daemon=True)
        work.start()
        while work.is_alive():
            work.join(self._period_s)
            self._say(())

    def _release_silent(self, until_s: float) -> None:
        if until_s - self._answered_s > self._lease_s * (1 - _MARGIN_RATIO):
            _log.warning("job %s: no answer for a lease; its states are released", self._job)
            self.release()

    def _say(self, nodes: Iterable[NodeId]) -> object:
        """The reply; None without a reply. An absent control cannot start another job either."""
        asked_s = self._clock.now()
        call = Unloaded(job=self._job, holder=self._holder, nodes=tuple(sorted(nodes)))
        try:
            reply: object = self._transport.call(call)
        except ControlUnreachable:
            reply = None
        except (Exhausted, PeerProtocolError):
            return None
        if not call.nodes:
            # A report by another thread must not hide that the process stood still.
            self._answered_s = asked_s
        return reply
