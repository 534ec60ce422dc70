"""One job's history in a journal, for people and for machines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, is_name
from scheduler.rollmux.explain.history_entry import SUMMARISED, HistoryEntry, seconds
from scheduler.rollmux.explain.job_history import JobHistory
from scheduler.rollmux.explain.journal_lines import journal_lines
from scheduler.rollmux.explain.permit_history import PermitSummary, behind_in_words

EVER: Final = datetime.min.replace(tzinfo=UTC)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LAST: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


@dataclass(frozen=True, slots=True)
class Explanation:
    job: JobId
    entries: tuple[HistoryEntry, ...]
    permits: tuple[PermitSummary, ...]

    def encoded(self) -> str:
        document = {
            "job": self.job,
            "entries": self.entries,
            "permits": [one.document() for one in self.permits],
        }
        return msgspec.json.encode(document).decode()

    def lines(self) -> Iterator[str]:
        for entry in self.entries:
            # A tenant wrote the reason of a failure.
            shown = "".join(each if each.isprintable() else " " for each in entry.text)
            yield f"{entry.at:%Y-%m-%d %H:%M:%S}  {shown}"
        if self.permits:
            yield ""
        for one in self.permits:
            yield _in_words(one)


def explanation(directory: Path, job: str, *, since: datetime, permits: bool) -> Explanation:
    """The history of one job; with `permits`, every permit by itself, not only a summary.

    Raises ConfigError if the journal or the job in it is missing.
    """
    if not is_name(job):
        raise ConfigError(f"{job[:80]!r} is no name of a job")
    history = JobHistory(JobId(job), since=since)
    entries: list[HistoryEntry] = []
    for line in journal_lines(directory):
        read = history.read(line)
        entries += read if permits else (one for one in read if one.kind not in SUMMARISED)
    if not history.was_known:
        raise ConfigError(f"the journal in {directory} has no line of job {job}")
    summaries = tuple(summary for _, summary in sorted(history.permits.summaries.items()))
    return Explanation(JobId(job), tuple(entries), summaries)


def moment(*, last: str, since: str) -> datetime:
    """Start of the requested time; a time without a zone is in UTC. Raises ConfigError."""
    if last and since:
        raise ConfigError("--last and --since exclude each other")
    if since:
        try:
            found = datetime.fromisoformat(since)
        except ValueError as error:
            raise ConfigError(f"--since {since!r}: write it as 2026-01-31T12:00") from error
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    if not last:
        return EVER
    given = _LAST.fullmatch(last)
    if given is None:
        raise ConfigError(f"--last {last!r}: write a number and s, m, h or d, as 24h")
    number, unit = given.groups()
    try:
        ago = timedelta(seconds=float(number) * _UNITS_S[unit])
        return datetime.fromisoformat(wall_time_utc()) - ago
    except OverflowError:
        return EVER


def _in_words(one: PermitSummary) -> str:
    summary = one.document()
    words = f"{one.kind}: {summary['granted']} permits"
    if one.waits_s:
        words += (
            f", waited {seconds(summary['wait_median_s'])} in the median, "
            f"{seconds(summary['wait_longest_s'])} at most{behind_in_words(one.behind_s)}"
        )
    if one.held_s:
        words += (
            f"; took {seconds(summary['held_median_s'])} in the median, "
            f"alone {seconds(summary['solo_median_s'])}"
        )
    counted = {**one.happened, **{f"ended {reason}": n for reason, n in one.ended.items()}}
    return "; ".join((words, *(f"{count} {what}" for what, count in counted.items())))
