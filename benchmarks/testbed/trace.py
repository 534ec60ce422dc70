"""Reads a trace of production requests: `t_s,input_tokens,output_tokens`, plain or gzipped CSV.
The columns of AzurePublicDataset's LLM traces are taken for these.

Decides whether a file is a trace and says at which line it is not. Never guesses at a malformed
value and never holds more than its bounds. `window` decides which part is replayed, and how fast.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harvester.contracts.errors import ConfigError

COLUMNS = ("t_s", "input_tokens", "output_tokens")
_OF_AZURE = {
    "TIMESTAMP": "t_s",
    "ContextTokens": "input_tokens",
    "GeneratedTokens": "output_tokens",
}
LINE_MAX_BYTES = 4096
ROWS_MAX = 2_000_000
BYTES_MAX = 256 << 20
"""Unpacked."""
TOKENS_MAX = 10_000_000
TIME_MAX_S = 1e10
"""Above any Unix time, so that absolute seconds are welcome too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request to send: `t_s` seconds after the start of the replay."""

    index: int
    t_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Columns of equal length; `t_s` never falls and begins at 0."""

    name: str
    t_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    @property
    def duration_s(self) -> float:
        return float(self.t_s[-1])

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.t_s) / self.duration_s


def read_trace(path: Path) -> Trace:
    """The whole trace. Raises ConfigError that names the file, and the line where one is at fault.

    Columns may come in any order and beside others; blank lines are skipped.
    """
    rows: list[tuple[float, int, int]] = []
    with _opened(path) as file:
        lines = _lines(file, path)
        number, header = next(lines, (1, ""))
        places = _places(header, path, number)
        last_s = 0.0
        for number, line in lines:
            if len(rows) == ROWS_MAX:
                raise ConfigError(f"{path}, line {number}: more than {ROWS_MAX} requests; cut it")
            try:
                row = _row(line, places)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            if row[0] < last_s:
                raise ConfigError(
                    f"{path}, line {number}: t_s goes back from {last_s:g} to {row[0]:g}; "
                    "sort the trace by t_s"
                )
            last_s = row[0]
            rows.append(row)
    return _trace(rows, path)


def _trace(rows: list[tuple[float, int, int]], path: Path) -> Trace:
    if not rows:
        raise ConfigError(f"{path} holds no request; give a trace with at least two")
    if rows[-1][0] <= rows[0][0]:
        raise ConfigError(f"{path}: all requests have the same t_s; a trace needs a length")
    t_s = np.array([row[0] for row in rows])
    return Trace(
        name=path.name,
        t_s=t_s - t_s[0],
        input_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        output_tokens=np.array([row[2] for row in rows], dtype=np.int64),
    )


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; --trace takes a .csv or .csv.gz")
    try:
        with path.open("rb") as file:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(fileobj=file) as unzipped:
                    yield unzipped
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is not a whole gzip file ({error})") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _lines(file: io.BufferedIOBase, path: Path) -> Iterator[tuple[int, str]]:
    number, total_bytes = 0, 0
    while raw := file.readline(LINE_MAX_BYTES + 1):
        number += 1
        total_bytes += len(raw)
        if total_bytes > BYTES_MAX:
            raise ConfigError(f"{path}, line {number}: more than {BYTES_MAX >> 20} MiB; cut it")
        if len(raw) > LINE_MAX_BYTES:
            raise ConfigError(f"{path}, line {number}: longer than {LINE_MAX_BYTES} bytes")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {number}: not UTF-8 text") from None
        if line:
            yield number, line


def _places(header: str, path: Path, number: int) -> tuple[int, int, int]:
    try:
        names = [name.strip() for name in _cells(header)] if header else []
        names = [_OF_AZURE.get(name, name) for name in names]
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
    for column in COLUMNS:
        if names.count(column) != 1:
            fault = "is missing" if column not in names else "appears twice"
            raise ConfigError(
                f"{path}, line {number}: column {column} {fault}; "
                f"the header must name {','.join(COLUMNS)}"
            )
    t_s, input_tokens, output_tokens = (names.index(column) for column in COLUMNS)
    return t_s, input_tokens, output_tokens


def _row(line: str, places: tuple[int, int, int]) -> tuple[float, int, int]:
    cells = _cells(line)
    if len(cells) <= max(places):
        raise ValueError(f"{len(cells)} columns, at least {max(places) + 1} expected")
    return (
        _seconds(cells[places[0]]),
        _tokens("input_tokens", cells[places[1]]),
        _tokens("output_tokens", cells[places[2]]),
    )


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader((line,), strict=True))
    except csv.Error as error:
        raise ValueError(f"not CSV ({error})") from None


def _seconds(cell: str) -> float:
    """A number of seconds, or a date and time."""
    with suppress(ValueError):
        date = datetime.fromisoformat(cell.strip())
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    return _number("t_s", cell, TIME_MAX_S)


def _tokens(column: str, cell: str) -> int:
    number = _number(column, cell, TOKENS_MAX)
    if number != int(number):
        raise ValueError(f"{column} is {cell.strip()}, not a whole number")
    return int(number)


def _number(column: str, cell: str, most: float) -> float:
    text = cell.strip()
    shown = repr(text[:40])
    try:
        number = float(text.replace("_", "?"))
    except ValueError:
        raise ValueError(f"{column} is {shown}, not a number") from None
    if not 0 <= number <= most:
        raise ValueError(f"{column} is {shown}, must be between 0 and {most:g}")
    return number
