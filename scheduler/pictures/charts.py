"""Curves, stacked areas and bars as SVG. Decides how things look; computes nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.pictures.axes import Frame
from scheduler.pictures.svg import GRID, INK, LIMIT, Drawing

_WIDTH: Final = 880.0
_HEIGHT: Final = 300.0
_LEFT: Final = 64.0
_TOP: Final = 34.0
_KEY_WIDTH: Final = 150.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    colour: str
    points: Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Texts of a chart."""

    title: str
    x: str
    y: str
    alt: str
    """Description of the chart's content for readers who cannot see it."""


def curves(series: Sequence[Series], words: Words, *, limit_x: float | None = None) -> str:
    """One line a series, its name at its side; `limit_x` is drawn as a dashed line."""
    drawing, frame = _framed(series, words, top=max(y for one in series for _, y in one.points))
    if limit_x is not None:
        x = frame.x(limit_x)
        drawing.line(x, frame.top, x, frame.top + frame.height, LIMIT, dashed=True)
    for one in series:
        points = [(frame.x(x), frame.y(y)) for x, y in one.points]
        drawing.curve(points, one.colour, title=one.name)
    _key(drawing, frame, series)
    return str(drawing)


def stacked(series: Sequence[Series], words: Words) -> str:
    """Areas on top of each other; all series have the same x."""
    tops = [sum(one.points[at][1] for one in series) for at in range(len(series[0].points))]
    drawing, frame = _framed(series, words, top=max(tops))
    floor = [0.0] * len(tops)
    for one in series:
        ceiling = [low + y for low, (_, y) in zip(floor, one.points, strict=True)]
        xs = [frame.x(x) for x, _ in one.points]
        upper = [(x, frame.y(y)) for x, y in zip(xs, ceiling, strict=True)]
        lower = [(x, frame.y(y)) for x, y in zip(xs, floor, strict=True)]
        drawing.area([*upper, *reversed(lower)], one.colour, title=one.name)
        floor = ceiling
    _key(drawing, frame, series)
    return str(drawing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    value: float
    words: str
    """The value as it is to be read."""
    colour: str


def bars(rows: Sequence[Bar], *, title: str, alt: str, most: float | None = None) -> str:
    """A bar a row from 0, its value written beside it."""
    row, left = 26.0, 150.0
    drawing = Drawing(_WIDTH, _TOP + row * len(rows) + 6, label=alt)
    drawing.text(0, 16, title, fill=INK, size=13, bold=True)
    top = most or max((one.value for one in rows), default=1.0) or 1.0
    room = _WIDTH - left - 110
    for at, one in enumerate(rows):
        y = _TOP + at * row
        drawing.text(left - 8, y + 15, one.name, anchor="end")
        drawing.rectangle(left, y + 3, room, row - 8, GRID, opacity=0.6)
        drawing.rectangle(
            left, y + 3, room * min(1.0, one.value / top), row - 8, one.colour, title=one.words
        )
        drawing.text(left + room + 8, y + 15, one.words, fill=INK)
    return str(drawing)


def _framed(series: Sequence[Series], words: Words, *, top: float) -> tuple[Drawing, Frame]:
    drawing = Drawing(_WIDTH, _HEIGHT, label=words.alt)
    xs = [x for one in series for x, _ in one.points]
    frame = Frame(
        left=_LEFT,
        top=_TOP,
        width=_WIDTH - _LEFT - _KEY_WIDTH,
        height=_HEIGHT - _TOP - 44,
        x_range=(min(xs), max(xs)),
        y_range=(0.0, top * 1.05 or 1.0),
    )
    frame.draw(drawing, title=words.title, x_label=words.x, y_label=words.y)
    return drawing, frame


def _key(drawing: Drawing, frame: Frame, series: Sequence[Series]) -> None:
    x = frame.left + frame.width + 14
    for at, one in enumerate(series):
        y = frame.top + 6 + 20 * at
        drawing.rectangle(x, y, 12, 12, one.colour)
        drawing.text(x + 18, y + 10, one.name)
