"""The stops of one node: from the table on disk, the stop file and the configuration.

The table is durable: an order is in force at once, and it ends only once its end is on disk. A
table that cannot be believed drains the node until an operator resumes it.
"""

import logging
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from harvester.agent.operator_files import LastRead, awaits_word, unclear_words
from harvester.config import AgentConfig
from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import UNDECODABLE, Exhausted, PeerProtocolError
from harvester.contracts.page.owners import user_name
from harvester.contracts.wire.stops import (
    KUEUE_WORDS,
    Stop,
    StopOrder,
    StopReply,
    StopRequest,
    StopSource,
    one_line,
    order_of,
)
from harvester.platform import whole_file
from harvester.policy.stop_table import StopTable

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 1024
_TABLE_BYTES_MAX = 1 << 20
_RETRY_S = 1.0


def read_stop_file(path: Path, last: LastRead[Stop | None]) -> Stop | None:
    """The order in the node's stop file: its word, and a reason behind it.

    A file that stays empty, is unreadable, no file, or of an unknown word drains.
    """
    try:
        os.lstat(path)  # Without a file no descriptor is needed.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            by, at = user_name(status.st_uid), _time_of(status)
            if not stat.S_ISREG(status.st_mode):
                return _of_file(StopOrder.DRAIN, f"{path.name} is no file", by=by, at=at)
            text = os.read(file, _FILE_BYTES_MAX).decode(errors="replace").strip()
            word, *reason = text.split(maxsplit=1) or ["hold" if awaits_word(file) else ""]
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"{path.name} cannot be read: {error.strerror}"
        return last.value(path, error, otherwise=_of_file(StopOrder.DRAIN, why, by="the agent"))
    order, found = order_of(word), None
    if order is None:
        why = unclear_words(path, text.encode(), (*tuple(StopOrder), *KUEUE_WORDS))
        found = _of_file(StopOrder.DRAIN, why, by=by, at=at)
    elif order is not StopOrder.NONE:
        found = _of_file(order, "".join(reason), by=by, at=at)
    return last.keep(status, found) if text else found


def _time_of(status: os.stat_result) -> str:
    try:
        return datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError):
        # Any time may be set on a file; no calendar has all of them.
        return ""


def _of_file(order: StopOrder, reason: str, *, by: str = "", at: str = "") -> Stop:
    return Stop(order=order, source=StopSource.FILE, by=by, at=at, reason=one_line(reason))


class StopRegistry:
    def __init__(self, config: AgentConfig) -> None:
        """Reads the table of an earlier agent; writes nothing yet."""
        self._path, self._file_path = config.state_dir / "stops.json", config.stop_path
        self._config = config
        self._configured: dict[str, Stop] = {}
        self.configure(config)
        self._table = StopTable(self._kept())
        self._unsaved = False
        self._retry_at_s = 0.0
        self._file: Stop | None = None
        self._last_read = LastRead[Stop | None]()
        self.stops: tuple[Stop, ...] = ()
        self.interlocks: tuple[Stop, ...] = ()
        for stop in self._gather():
            _log.warning("stop in force: %s", _shown(stop))

    def configure(self, config: AgentConfig) -> None:
        """Take over `stop` of a configuration; an order that stays keeps its time."""
        self._config = config
        ordered = {"": config.stop, **{slot.name: slot.stop for slot in config.slots}}
        before = self._configured
        self._configured = {
            slot: before[slot]
            if slot in before and before[slot].order is order
            else Stop(
                order=order,
                source=StopSource.CONFIG,
                slot=slot,
                at=wall_time_utc(),
                reason="stop in the configuration",
            )
            for slot, order in ordered.items()
            if order is not StopOrder.NONE
        }

    def refresh(self, *, now: float) -> tuple[Stop, ...]:
        """Every stop in force, once per beat."""
        self._file = read_stop_file(self._file_path, self._last_read)
        # A table that another program removed is written again.
        gone = bool(self._table.stops) and not os.access(self._path, os.F_OK)
        if (self._unsaved or gone) and now >= self._retry_at_s:
            self._save(now)
        return self._gather()

    def order(self, request: StopRequest, *, now: float) -> StopReply:
        """Place an order, or lift one. Raises PeerProtocolError for a scope that is not here, and
        Exhausted if there are too many or a lifted one cannot be taken off the disk."""
        request.check()
        source = StopSource.CLUSTER if request.cluster else StopSource.OPERATOR
        # An order for a slot that has gone since can be lifted.
        slots = {slot.name for slot in self._config.slots}
        slots.update(stop.slot for stop in self._table.stops)
        if request.slot and request.slot not in slots:
            raise PeerProtocolError(f"slot: this node has no slot {request.slot}")
        if request.order is StopOrder.NONE:
            return self._lift(request, source, now)
        stop = Stop(
            order=request.order,
            source=source,
            slot=request.slot,
            tenant=request.tenant,
            by=request.by,
            reason=request.reason,
            at=wall_time_utc(),
            number=request.number,
        )
        before = self._table.stops
        in_force = self._table.place(stop)
        if self._table.stops != before:
            self._save(now)
        return StopReply(in_force=in_force, recorded=not self._unsaved)

    def _lift(self, request: StopRequest, source: StopSource, now: float) -> StopReply:
        before = self._table.stops
        left = self._table.lift(
            source, slot=request.slot, tenant=request.tenant, number=request.number
        )
        if self._table.stops == before:
            return StopReply(in_force=left, recorded=not self._unsaved, lifted=False)
        self._save(now)
        if self._unsaved:
            # A restarted agent would stop again: the operator shall know now.
            self._table = StopTable(before)
            raise Exhausted("the stop stays: its end cannot be written to state_dir")
        return StopReply(in_force=left)

    def _gather(self) -> tuple[Stop, ...]:
        own = (self._file,) if self._file is not None else ()
        configured = tuple(self._configured.values())
        self.stops = (*configured, *own, *self._table.stops, *self.interlocks)
        return self.stops

    def _kept(self) -> tuple[Stop, ...]:
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(_TABLE_BYTES_MAX), type=tuple[Stop, ...])
        except FileNotFoundError:
            return ()
        except (OSError, *UNDECODABLE) as error:
            _log.error("%s cannot be believed: %s", self._path, error)
            return (
                Stop(
                    order=StopOrder.DRAIN,
                    source=StopSource.OPERATOR,
                    by="the agent",
                    reason="stops.json cannot be believed; what it held is unknown",
                    at=wall_time_utc(),
                ),
            )

    def _save(self, now: float) -> None:
        try:
            whole_file.replace(self._path, msgspec.json.encode(self._table.stops))
        except OSError as error:
            if not self._unsaved:
                _log.error("a restart would forget the stops: %s: %s", self._path, error.strerror)
            self._unsaved, self._retry_at_s = True, now + _RETRY_S
        else:
            self._unsaved = False


def _shown(stop: Stop) -> str:
    scope = f"slot {stop.slot}" if stop.slot else "node"
    return f"{scope}{f', tenant {stop.tenant}' if stop.tenant else ''}: {stop.text}"
