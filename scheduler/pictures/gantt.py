"""A Gantt chart of jobs on nodes: as SVG, and as letters for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.pictures.axes import ticks
from scheduler.pictures.svg import GRID, INK, Drawing, colour

_WIDTH: Final = 880.0
_LEFT: Final = 110.0
_ROW: Final = 34.0
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
IDLE: Final = "·"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stint:
    """One actor on one row."""

    row: str
    actor: str
    start_s: float
    end_s: float
    partial: bool
    """Whether it is on a part of the row, beside the next one."""
    words: str = ""


def letter(actor: str, actors: Sequence[str]) -> str:
    return _LETTERS[list(actors).index(actor) % len(_LETTERS)]


def gantt_svg(
    rows: Sequence[str],
    actors: Sequence[str],
    stints: Sequence[Stint],
    *,
    length_s: float,
    alt: str,
) -> str:
    """Draws rows from top to bottom; a partial interval is a thin bar under the full ones."""
    height = _ROW * len(rows) + 62
    drawing = Drawing(_WIDTH, height, label=alt)
    scale = (_WIDTH - _LEFT - 12) / (length_s or 1.0)
    bottom = 8 + _ROW * len(rows)
    for value in ticks(0.0, length_s, most=9):
        x = _LEFT + value * scale
        drawing.line(x, 8, x, bottom + 4, GRID)
        drawing.text(x, bottom + 17, f"{value:g} s", anchor="middle", size=11)
    for at, row in enumerate(rows):
        y = 8 + _ROW * at
        drawing.text(_LEFT - 8, y + 20, row, anchor="end", fill=INK)
        drawing.line(_LEFT, y + _ROW, _WIDTH - 12, y + _ROW, GRID)
        for one in (each for each in stints if each.row == row):
            _stint(drawing, one, y, actors, scale)
    for at, actor in enumerate(actors):
        x = _LEFT + at * 150.0
        drawing.rectangle(x, height - 18, 12, 12, colour(at))
        drawing.text(x + 18, height - 8, actor)
    return str(drawing)


def gantt_text(
    rows: Sequence[str],
    actors: Sequence[str],
    stints: Sequence[Stint],
    *,
    length_s: float,
    columns: int,
) -> list[tuple[str, str]]:
    """A row's name and its line of letters; partial stints have a line below, in small letters."""
    lines: list[tuple[str, str]] = []
    for row in rows:
        own = [one for one in stints if one.row == row]
        for partial in (False, True):
            chosen = [one for one in own if one.partial is partial]
            if chosen or not partial:
                line = _letters(chosen, actors, length_s=length_s, columns=columns)
                lines.append(("" if partial else row, line.lower() if partial else line))
    return lines


def _letters(
    stints: Sequence[Stint], actors: Sequence[str], *, length_s: float, columns: int
) -> str:
    width_s = (length_s or 1.0) / columns
    cells = [IDLE] * columns
    for one in stints:
        for at in range(columns):
            if one.start_s <= (at + 0.5) * width_s < one.end_s:
                cells[at] = letter(one.actor, actors)
    return "".join(cells)


def _stint(drawing: Drawing, one: Stint, y: float, actors: Sequence[str], scale: float) -> None:
    number = list(actors).index(one.actor)
    x, width = _LEFT + one.start_s * scale, (one.end_s - one.start_s) * scale
    top, height = (y + 23, 7.0) if one.partial else (y + 5, 17.0)
    words = f"{one.actor}: {one.words}, {one.start_s:.0f} to {one.end_s:.0f} s"
    drawing.rectangle(x, top, width, height, colour(number), title=words)
    if not one.partial and width > 7.0 * len(one.actor) + 8:
        drawing.text(x + 5, y + 18, one.actor, fill="#fff", size=11)
