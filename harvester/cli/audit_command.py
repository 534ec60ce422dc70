"""`rosemux audit`: prints the audit events of one agent, from its files."""

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harvester.cli.root import plain
from harvester.config_file import read_agent_config
from harvester.contracts.audit import AuditEvent, AuditKind, audit_files, read_audit
from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_CONFIG_SUFFIXES = (".yaml", ".yml")
_PIPE_COLUMNS = 400
_OF_THE_NODE = frozenset(
    {
        *(AuditKind.AGENT_STARTED, AuditKind.AGENT_STOPPED, AuditKind.AUDIT_RESUMED),
        *(AuditKind.CONFIG_RELOADED, AuditKind.CONFIG_REFUSED, AuditKind.KILL_SWITCH),
        *(AuditKind.STOP_PLACED, AuditKind.STOP_LIFTED),
    }
)
"""Events that concern every slot where they name none: they are often why a slot closed."""
ROWS_MAX = 1000
"""A row takes 1 ms and 10 KB, and an audit may have a million events."""


def audit(
    source: Annotated[
        Path, typer.Argument(help="The agent's YAML file, or a file of its audit (.jsonl).")
    ],
    since: Annotated[
        str | None, typer.Option(help="How long ago (30m, 2h, 7d), or from which time (RFC 3339).")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only events of this tenant.")] = None,
    slot: Annotated[
        str | None, typer.Option(help="Only events of this slot and of the whole node.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the events as JSON lines.")] = False,
) -> None:
    from_time = None if since is None else _begin(since)
    events = (
        event
        for event in _events(_files(source), from_time)
        if (tenant is None or event.tenant == tenant)
        and (slot is None or event.slot == slot or _is_of_the_node(event))
        and (from_time is None or _time(event) >= from_time)
    )
    if json:
        for event in events:
            typer.echo(msgspec.json.encode(event).decode())
        return
    latest, found = deque[AuditEvent](maxlen=ROWS_MAX), 0
    for event in events:
        latest.append(event)
        found += 1
    row_console().print(_table(latest))
    if found > len(latest):
        text = f"the latest {len(latest)} of {found} events: choose with --since, or --json for all"
        typer.echo(f"rosemux audit: {text}", err=True)


def _is_of_the_node(event: AuditEvent) -> bool:
    return not event.slot and event.event in _OF_THE_NODE


def _files(source: Path) -> list[Path]:
    """Raises ConfigError where there is no audit."""
    if source.suffix not in _CONFIG_SUFFIXES:
        if not source.is_file():
            raise ConfigError(f"no file {source}: name the agent's YAML file or its audit.jsonl")
        return [source]
    path = read_agent_config(source).config.audit_file
    files = audit_files(path)
    if not files:
        raise ConfigError(f"no audit at {path}: has the agent of {source} run here?")
    return files


def _events(files: list[Path], from_time: datetime | None) -> Iterator[AuditEvent]:
    """The events of files that were written after a time."""
    for path in files:
        try:
            if from_time is not None and path.stat().st_mtime < from_time.timestamp():
                continue
            for found in read_audit(path):
                if isinstance(found, AuditEvent):
                    yield found
                else:
                    typer.echo(f"rosemux audit: {found}", err=True)
        except FileNotFoundError:
            # The agent has removed or renamed it meanwhile.
            typer.echo(f"rosemux audit: {path.name} is gone", err=True)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _begin(since: str) -> datetime:
    try:
        if found := re.fullmatch(r"(\d{1,6})([smhdw])", since):
            ago = timedelta(seconds=int(found[1]) * _UNITS_S[found[2]])
            return datetime.fromisoformat(wall_time_utc()) - ago
        time = datetime.fromisoformat(since)
    except (ValueError, OverflowError):  # No calendar goes back by 999999 weeks.
        time = None
    if time is None or time.tzinfo is None:
        raise ConfigError(f"--since {since}: write 30m, 2h, 7d, or a time as 2026-01-31T12:00:00Z")
    return time


def _time(event: AuditEvent) -> datetime:
    try:
        time = datetime.fromisoformat(event.time)
    except ValueError:
        time = None
    # An event whose time cannot be read is shown rather than hidden.
    return datetime.fromisoformat(wall_time_utc()) if time is None or not time.tzinfo else time


def _table(events: Iterable[AuditEvent]) -> Table:
    table = Table("time", "event", "slot", "lease", "tenant", "job", "who", "what", box=None)
    for event in events:
        held = (event.slot, event.lease, event.tenant, event.job)
        cells = (event.time, event.event, *held, event.who, _what(event))
        table.add_row(*map(printable, cells))
    return table


def row_console() -> Console:
    """A console with the terminal's width; a pipe has no width, and gets one line for each row."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def printable(text: str) -> Text:
    """Text of another process for a terminal: no markup, and no control character."""
    return Text(plain(text))


def _what(event: AuditEvent) -> str:
    change = f"{event.from_state} -> {event.to_state}" if event.to_state else ""
    omitted = f"{event.omitted} events are missing before it" if event.omitted else ""
    return "; ".join(filter(None, (change, event.reason, *event.changes, omitted)))
