"""The journal of a phase control, read in the order in which it was written, with times of day."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from os.path import samestat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from harvester.contracts.errors import ConfigError
from harvester.contracts.journal import Decided, Opened, lines_of

POLICIES = ("scheduler.policy.cluster", "scheduler.policy.phases")
"""Policies of a planning control and of one without a plan."""
_TRIES = 100


class JournalMoment(NamedTuple):
    at: datetime
    """The time of day, for people."""
    t_s: float
    """Time on the control's clock, in s; durations are differences of it."""


class Began(NamedTuple):
    """Start of a process or file, with a snapshot of the known jobs; None without a snapshot."""

    moment: JournalMoment
    snapshot: dict[str, Any] | None
    missing: int
    """Decisions before this that could not be written."""


class Dated(NamedTuple):
    moment: JournalMoment
    decided: Decided


def journal_lines(directory: Path) -> Iterator[Began | Dated]:
    """Reads line by line; a control may be writing meanwhile.

    Raises ConfigError without a phase control's journal, Corrupt for an invalid line.
    """
    paths = (directory / f"{policy}.jsonl" for policy in POLICIES)
    there = [path for path in paths if path.exists()]
    if not there:
        raise ConfigError(f"no journal of a phase control in {directory}")
    # A directory may have been of both kinds of control, one after the other.
    path = max(there, key=lambda one: one.stat().st_mtime_ns)
    with ExitStack() as stack:
        for name, file in _files(path, stack):
            yield from _dated(name, file)


def _files(path: Path, stack: ExitStack) -> list[tuple[str, BinaryIO]]:
    """The older file first; both are open before one is read, so that no rotation loses one."""
    old = path.with_name(path.name + ".1")
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            current = stack.enter_context(path.open("rb"))
            found = [stack.enter_context(old.open("rb"))] if old.exists() else []
            if samestat(path.stat(), os.fstat(current.fileno())):
                return [*((old.name, file) for file in found), (path.name, current)]
    raise ConfigError(f"{path} changes too fast to be read")


def _dated(name: str, file: BinaryIO) -> Iterator[Began | Dated]:
    opened: Opened | None = None
    offset_s = 0.0
    for line in lines_of(file, name):
        if isinstance(line, Opened):
            opened = line
        if line.t_s is None:
            # An older control did not say: its first decision is taken to come at once.
            continue
        if opened is not None:
            began = JournalMoment(datetime.fromisoformat(opened.wall), line.t_s)
            offset_s = began.at.timestamp() - began.t_s
            yield Began(began, opened.snapshot, opened.missing)
            opened = None
        if isinstance(line, Decided):
            at = datetime.fromtimestamp(offset_s + line.t_s, UTC)
            yield Dated(JournalMoment(at, line.t_s), line)
