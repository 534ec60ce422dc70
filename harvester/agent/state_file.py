"""One slot's durable state on disk: a header line, and a line with the state.

An incomplete file does not count: the slot's history is then unknown, and the reader decides on the
consequences. A file under another slot's name is that slot's, renamed, or a mistake.
"""

import contextlib
import logging
from collections.abc import Collection
from itertools import chain, count
from pathlib import Path

import msgspec
import xxhash

from harvester.contracts.clock import monotonic_origin, wall_time_utc
from harvester.contracts.errors import UNDECODABLE, ConfigError, Corrupt
from harvester.platform import whole_file
from harvester.policy.durable import DurableState, moved

_log = logging.getLogger(__name__)

SCHEMA = 1
MAX_BYTES = 16 << 20
_NAMES_SHOWN = 4


class StateHead(msgspec.Struct, frozen=True, kw_only=True, tag="slot_state"):
    schema: int = SCHEMA
    """Raised for a state that an older agent could not read; new fields do not raise it."""
    node: str
    slot: str
    origin: str
    """Origin of `at_s`."""
    at_s: float
    wall: str = ""
    digest: str
    """xxh3-64 of the second line."""


class StateFile:
    def __init__(
        self, path: Path, *, node: str, slot: str, configured: Collection[str] = ()
    ) -> None:
        """`configured` are the node's slots."""
        self.path = path
        self._configured = configured
        self._node = node
        self._slot = slot
        self._origin = monotonic_origin()

    def save(self, state: DurableState, *, now: float) -> None:
        """Save the state. Raises OSError; the previously saved state then stays."""
        body = msgspec.json.encode(state)
        head = StateHead(
            node=self._node,
            slot=self._slot,
            origin=self._origin,
            at_s=now,
            wall=wall_time_utc(),
            digest=xxhash.xxh3_64_hexdigest(body),
        )
        whole_file.replace(self.path, msgspec.json.encode(head) + b"\n" + body + b"\n")

    def load(self, *, now: float) -> DurableState | None:
        """The last saved state, in times that compare with `now`; None if none was ever saved.

        Raises Corrupt for a file that cannot be believed, OSError for one that cannot be read, and
        ConfigError for one of another node or another configured slot: a mistake that is mended
        must cost no history.
        """
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            if self._refused.exists():
                # The agent that refused the file ended before it saved a new state.
                raise Corrupt(f"{self.path} was unreadable; none was saved since") from None
            self._warn_of_others()
            return None
        head, state = self._decoded(raw)
        if head.origin == self._origin != "" and head.at_s <= now:
            return moved(state, from_s=head.at_s, to_s=head.at_s)
        return moved(state, from_s=head.at_s, to_s=now)

    def _warn_of_others(self) -> None:
        """A slot that was renamed is a new one, without what its guards knew."""
        ours = {*self._configured, self._slot}
        names = {path.name.removesuffix(".state") for path in self.path.parent.glob("[!.]*.state")}
        if left := sorted(names - ours):
            _log.warning(
                "slot %s begins without a history, and %s has that of slots that are not "
                "configured: %s. If one of them was renamed, move its .state file to %s while no "
                "agent runs",
                self._slot,
                self.path.parent,
                ", ".join(left[:_NAMES_SHOWN]) + (", ..." if left[_NAMES_SHOWN:] else ""),
                self.path.name,
            )

    def put_aside(self) -> None:
        """Keep a file that could not be believed, for people, beside earlier ones."""
        later = (self.path.with_name(f"{self._refused.name}.{number}") for number in count(2))
        with contextlib.suppress(OSError):
            self.path.replace(next(p for p in chain([self._refused], later) if not p.exists()))

    @property
    def _refused(self) -> Path:
        return self.path.with_name(self.path.name + ".refused")

    def _decoded(self, raw: bytes) -> tuple[StateHead, DurableState]:
        first, _, rest = raw.partition(b"\n")
        body, end, after = rest.partition(b"\n")
        try:
            head = msgspec.json.decode(first, type=StateHead)
            whole = bool(end) and not after and xxhash.xxh3_64_hexdigest(body) == head.digest
            if head.schema != SCHEMA:
                raise Corrupt(f"{self.path}: schema {head.schema}, this agent reads {SCHEMA}")
            if not whole:
                raise Corrupt(f"{self.path}: its digest does not match its content")
            if head.node != self._node:
                raise ConfigError(
                    f"{self.path} belongs to node {head.node}, this is node {self._node}: correct "
                    "`node`, or if it has its new name for good move the file away"
                )
            if head.slot != self._slot and head.slot in self._configured:
                raise ConfigError(
                    f"{self.path} is of slot {head.slot}, which is configured too: give each slot "
                    "its own file back"
                )
            if head.slot != self._slot:
                _log.warning("slot %s goes on with the history of %s", self._slot, head.slot)
            return head, msgspec.json.decode(body, type=DurableState)
        except UNDECODABLE as error:
            raise Corrupt(f"{self.path}: {error}") from error
