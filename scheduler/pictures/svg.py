"""A drawing in SVG text: a few shapes, numbers rounded, every text escaped.

Written by hand because a plan must draw on a machine that has no plotting library.
"""

from collections.abc import Sequence
from html import escape
from typing import Final

INK: Final = "#1f2937"
SOFT: Final = "#4b5563"
GRID: Final = "#e5e7eb"
LIMIT: Final = "#b91c1c"
COLOURS: Final = (
    "#0b62a8",
    "#b8480a",
    "#2f7d4f",
    "#7c3f98",
    "#8a6d00",
    "#a3194f",
    "#0f766e",
    "#5b5bd6",
)
"""Distinguishable by lightness at least, for colour-blind readers; texts beside repeat the name."""


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


class Drawing:
    """Shapes in their order; `str` is the picture. Units are pixels of the picture's own width."""

    def __init__(self, width: float, height: float, *, label: str) -> None:
        """`label` describes the drawing's content in words."""
        self.width = width
        self.height = height
        self._label = label
        self._parts: list[str] = []

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        opacity: float = 1.0,
        title: str = "",
    ) -> None:
        shown = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" '
            f'height="{max(height, 0.0):.1f}" fill="{fill}" fill-opacity="{opacity:g}">'
            f"{shown}</rect>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, *, dashed: bool = False
    ) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{stroke}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        fill: str = SOFT,
        size: float = 12.0,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size:g}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def curve(self, points: Sequence[tuple[float, float]], stroke: str, *, title: str = "") -> None:
        shown = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<path d="{_path(points)}" fill="none" stroke="{stroke}" stroke-width="1.8" '
            f'stroke-linejoin="round">{shown}</path>'
        )

    def area(self, points: Sequence[tuple[float, float]], fill: str, *, title: str = "") -> None:
        """The inside of a closed line."""
        shown = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<path d="{_path(points)} Z" fill="{fill}" fill-opacity="0.75">{shown}</path>'
        )

    def __str__(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self._label)}" xmlns="http://www.w3.org/2000/svg" '
            f'font-family="system-ui, sans-serif">{"".join(self._parts)}</svg>'
        )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
