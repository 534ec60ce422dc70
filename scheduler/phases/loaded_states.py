"""States that stay on accelerators between a job's phases, until another job is to start there.

Leaving a phase keeps its state loaded, so that the next phase of the kind starts at once where no
other job was there meanwhile. When one is to start there, the control asks; then the state is
released, by a thread of its own, and the control hears so.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, NodeId
from scheduler.phases.wire import Transport, Unloaded
from scheduler.policy.model import PhaseKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    nodes: frozenset[NodeId]
    release: Callable[[], None]


class LoadedStates:
    """Of one process of a job. Safe to use from any thread."""

    def __init__(self, transport: Transport, job: JobId) -> None:
        self._transport = transport
        self._job = job
        self._states: dict[PhaseKind, _Loaded] = {}
        self._lock = threading.Lock()

    def leave(self, kind: PhaseKind, nodes: Iterable[NodeId], release: Callable[[], None]) -> None:
        """The phase has ended, and its state is still on these nodes."""
        with self._lock:
            self._states[kind] = _Loaded(frozenset(nodes), release)

    def take(self, kind: PhaseKind, nodes: Iterable[NodeId]) -> bool:
        """Whether the state is loaded on all of these nodes; those of other kinds leave them.

        Raises what a release raises.
        """
        wanted = frozenset(nodes)
        with self._lock:
            found = self._states.pop(kind, None)
            for other in [each for each in self._states if self._states[each].nodes & wanted]:
                self._states.pop(other).release()
            if found is not None and not found.nodes >= wanted:
                found.release()
                return False
            return found is not None

    def ask(self, nodes: tuple[NodeId, ...]) -> None:
        """Another job is to start there: release what is there, without keeping the caller."""
        if nodes:
            name = f"unload-{self._job}"
            threading.Thread(target=self.release, args=(nodes,), name=name, daemon=True).start()

    def release(self, nodes: Iterable[NodeId] | None = None) -> None:
        """From these nodes, or from all. A state that cannot be released is said to nobody."""
        asked = None if nodes is None else frozenset(nodes)
        gone: set[NodeId] = set()
        with self._lock:
            for kind in list(self._states):
                state = self._states[kind]
                if asked is not None and not state.nodes & asked:
                    continue
                try:
                    state.release()
                except Exception:
                    _log.exception("job %s: its %s state stays loaded", self._job, kind)
                    continue
                gone |= state.nodes
                del self._states[kind]
        if asked is None or not gone:
            return
        with suppress(Exhausted, PeerProtocolError):
            self._transport.call("unloaded", Unloaded(job=self._job, nodes=tuple(sorted(gone))))
