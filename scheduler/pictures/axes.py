"""Scales from values to places in a drawing, with ticks at round numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10

from scheduler.pictures.svg import GRID, INK, SOFT, Drawing


def ticks(low: float, high: float, *, most: int = 7) -> list[float]:
    """Round numbers from `low` to `high`, `most` of them at the most."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** floor(log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= most)
    first = ceil(low / step - 1e-9)
    last = floor(high / step + 1e-9)
    return [round(at * step, 12) for at in range(first, last + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A rectangle of a drawing and the values at its edges; y grows upwards in values."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + self.width * (value - low) / (high - low or 1.0)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.top + self.height * (1.0 - (value - low) / (high - low or 1.0))

    def draw(
        self,
        drawing: Drawing,
        *,
        title: str,
        x_label: str,
        y_label: str,
        x_words: Callable[[float], str] = "{:g}".format,
        y_words: Callable[[float], str] = "{:g}".format,
    ) -> None:
        """Grid, ticks and words."""
        bottom = self.top + self.height
        for value in ticks(*self.y_range, most=6):
            at = self.y(value)
            drawing.line(self.left, at, self.left + self.width, at, GRID)
            drawing.text(self.left - 6, at + 4, y_words(value), anchor="end", size=11)
        for value in ticks(*self.x_range):
            at = self.x(value)
            drawing.line(at, bottom, at, bottom + 4, SOFT)
            drawing.text(at, bottom + 17, x_words(value), anchor="middle", size=11)
        drawing.line(self.left, bottom, self.left + self.width, bottom, SOFT)
        drawing.text(self.left, self.top - 12, title, fill=INK, size=13, bold=True)
        drawing.text(self.left + self.width, self.top - 12, y_label, anchor="end", size=11)
        drawing.text(self.left + self.width / 2, bottom + 33, x_label, anchor="middle", size=11)
