"""Self-contained HTML pages and charts as inline SVG, on jinja2 and matplotlib.

Both come with the extra `report`; without them this module raises ConfigError when it is imported.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from io import StringIO
from typing import Any, Final

from harvester.contracts.errors import ConfigError

try:
    import jinja2
    import matplotlib as mpl
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError(f"pages need {error.name}: pip install rosemux[report]") from error

__all__ = ["COLOURS", "GRID", "INK", "LIMIT", "SOFT", "WIDTH", "Axes", "Markup"]
__all__ += ["chart", "colour", "page", "svg", "titled"]

INK, SOFT, GRID, LIMIT = "#1f2937", "#4b5563", "#e5e7eb", "#b91c1c"
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
WIDTH: Final = 11.0
"""Width of a chart that fills the page, in inches."""
_STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rosemux",
}
_UNWRITTEN: Final = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_TITLE: Final = "title: "


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def titled(words: str) -> str:
    """A `gid` for an artist that shows `words` where a reader points at it."""
    return _TITLE + words


@contextmanager
def chart(height: float, *, width: float = WIDTH) -> Iterator[Figure]:
    """A figure in the pages' style, sized in inches; draw it and take its `svg` inside."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, *, alt: str) -> Markup:
    """The figure as an SVG element, the same for the same data; `alt` says what it shows."""
    out = StringIO()
    figure.savefig(out, format="svg", metadata=_UNWRITTEN)
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg ") :].replace(
        "<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1
    )
    drawn = re.sub(rf"<g id=([\"']){_TITLE}(.*?)\1>", r"<g><title>\2</title>", drawn)
    # Names of groups, which the figures of one page would share.
    return Markup(re.sub(r'<g id="[^"]*">', "<g>", drawn))


def page(package: str, template: str, **facts: object) -> str:
    """The template of a package, which may extend `report_page.html`; every fact is escaped."""
    folders = [str(files(package)), str(files("scheduler"))]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    return environment.get_template(template).render(facts)


def _figure(value: float) -> str:
    """A number with three digits after the point at most."""
    return f"{value:,.3f}" if value % 1 else f"{value:,.0f}"
