"""One HTML file that shows everything and loads nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is written as it is; everything else is escaped."""

    html: str


Cell = str | float | Markup


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """Numbers are set to the right, to three digits after the point at most."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return Markup(f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>")


def verdict(good: bool, words: str) -> Markup:
    return Markup(f'<span class="{"ok" if good else "not"}">{escape(words)}</span>')


def section(title: str, *parts: str | Markup) -> Markup:
    """A card; texts become paragraphs."""
    body = "".join(part.html if isinstance(part, Markup) else _paragraph(part) for part in parts)
    return Markup(f'<section class="card"><h2>{escape(title)}</h2>{body}</section>')


def heading(words: str) -> Markup:
    return Markup(f"<h3>{escape(words)}</h3>")


def page(title: str, lead: str, sections: Sequence[Markup]) -> str:
    style = files("scheduler.pictures").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n'
        + "\n".join(part.html for part in sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _paragraph(words: str) -> str:
    return f"<p>{escape(words)}</p>"


def _cell(value: Cell) -> str:
    if isinstance(value, Markup):
        return f"<td>{value.html}</td>"
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td class="n">{value:,.3f}</td>' if value % 1 else f'<td class="n">{value:,.0f}</td>'
